"""`setup team`, for real: its units by systemd, its site by nginx, its server, tokens, message and back-up."""

import getpass
import os
import re
import subprocess
import tempfile

import pytest
from click import UsageError
from click.testing import CliRunner
from collage_server.command.setup_team import Installation, setup
from collage_server.store import SqliteStore

from tests.alerts.receivers import web_server
from tests.deploy.secrets import ROOT
from tests.server.store.postgresql import Cluster, programs_or_skip
from tests.system import is_content, require

pytestmark = pytest.mark.slow


@pytest.fixture
def messages():
    """(address, requests) of a target of messages."""
    with web_server() as target:
        yield target


def run(root, *more):
    command = ["team", "--name", "monitor.example", "--root", str(root), "--user", getpass.getuser(), *more]
    return CliRunner().invoke(setup, command)


def certificate(folder):
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = [str(folder / name) for name in ("certificate.pem", "key.pem")]
    subprocess.run(
        [*made, "-subj", "/CN=x", "-keyout", names[1], "-out", names[0]], check=True, capture_output=True
    )
    return names


def test_a_team_s_server_is_set_up_and_tried(tmp_path, messages, capfd):
    for program in ("nginx", "openssl", "systemd-analyze"):
        require(program)
    address, told = messages
    first = run(tmp_path / "m")
    assert first.exit_code == 1
    assert "set COLLAGE_SERVER_ALERT_SLACK" in capfd.readouterr().err
    assert "certbot certonly --nginx --domain monitor.example" in first.output

    # Again, with what it said to set: settings and tokens stay.
    etc = tmp_path / "m/etc"
    with (etc / "collage/server.env").open("a") as settings:
        settings.write(f"COLLAGE_SERVER_ALERT_WEBHOOK={address}\n")
    before = {path: path.read_bytes() for path in (etc / "collage").iterdir()}
    public, private = certificate(tmp_path)
    found = run(tmp_path / "m", "--certificate", public, "--key", private)
    output = capfd.readouterr().out
    assert found.exit_code == 0, (found.output, output)
    assert len(told) == 1
    assert "took the message" in output
    assert "all of them good" in output
    assert "systemctl enable --now collage-server collage-dashboard collage-backup.timer" in found.output
    assert {path: path.read_bytes() for path in (etc / "collage").iterdir()} == before
    assert {path.stat().st_mode & 0o777 for path in (etc / "collage").iterdir()} == {0o600}
    store = SqliteStore(tmp_path / "m/var/lib/collage/collage.sqlite", stale_after_seconds=600.0)
    store.open()
    assert sorted(token.role for token in store.access.tokens()) == ["ingest", "read"]
    store.close()
    units = sorted((etc / "systemd/system").iterdir())
    checked = is_content("systemd-analyze", "verify", "--man=no", *units)
    assert not [line for line in checked.splitlines() if "collage" in line], checked
    site = etc / "nginx/conf.d/collage-monitor.conf"
    whole = tmp_path / "nginx.conf"
    whole.write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\n ssl_protocols TLSv1.3;\n include {site};\n}}\n")
    is_content("nginx", "-t", "-c", whole)


def test_services_get_what_is_set_and_a_file_of_settings_stays(tmp_path):
    place = Installation(tmp_path, getpass.getuser(), "monitor.example")
    address = "https://hooks.example/a?b=c;d&e=$f"
    place.write_settings([f"ALERT_SLACK={address}"])
    assert place.settings()["COLLAGE_SERVER_ALERT_SLACK"] == address
    with pytest.raises(UsageError, match="is there and stays"):
        place.write_settings(["ALERT_SLACK=https://other.example"])


def test_somebody_else_s_file_stays(tmp_path):
    site = tmp_path / "etc/nginx/conf.d/collage-monitor.conf"
    site.parent.mkdir(parents=True)
    site.write_text("# mine\n")
    found = run(tmp_path)
    assert found.exit_code == 1
    assert f"{site} is somebody else's; move it away" in found.output
    assert site.read_text() == "# mine\n"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--set", "ALERT_SLAKC=https://a.example"), "COLLAGE_SERVER_ALERT_SLAKC is no setting"),
        (("--set", "ALERT_SLACK"), "is no NAME=VALUE"),
        (("--set", "ALERT_SLACK=a'b"), "without ' and line breaks"),
        (("--name", "a; rm"), "name"),
        (("--user", "nobody-here"), "adduser --system --group"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(tmp_path, monkeypatch, more, told):
    monkeypatch.setattr(os, "getuid", lambda: 0)  # Another one is not changed to any user.
    found = run(tmp_path, *more)
    assert found.exit_code == 2
    assert told in found.output
    assert not (tmp_path / "etc/systemd").exists()
    assert "--set" in more or not list(tmp_path.iterdir())


def test_the_site_keeps_the_shipped_proxy_s_bounds(tmp_path):
    """All but what is of the whole of nginx, or of containers."""
    place = Installation(tmp_path, getpass.getuser(), "monitor.example")
    place.write_site("c.pem", "k.pem")
    site = (tmp_path / "etc/nginx/conf.d/collage-monitor.conf").read_text()
    http = (ROOT / "server/deploy/nginx.conf").read_text().partition("http {")[2].partition("    server {")[0]
    bounds = re.findall(r"^ {4}((?:client|large|keepalive|reset|proxy|limit_conn)\w* .*;)$", http, re.MULTILINE)
    left_out = re.compile("temp_path|limit_conn_zone|limit_conn address|Authorization")
    kept = [bound for bound in bounds if not left_out.search(bound)]
    assert len(kept) >= 15
    assert [bound for bound in kept if site.count(f"    {bound}\n") != 2] == []


@pytest.mark.nightly
def test_on_postgresql_the_timer_dumps_and_copies_archived_files(tmp_path, messages, capfd):
    programs = programs_or_skip()
    address, told = messages
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(folder, programs)
        cluster.create()
        cluster.start()
        try:
            cluster.execute("CREATE DATABASE team")
            settings = (f"DATABASE={cluster.url('team')}", f"ALERT_WEBHOOK={address}")
            found = run(tmp_path / "m", *(part for setting in settings for part in ("--set", setting)))
        finally:
            cluster.stop()
    assert (found.exit_code, len(told)) == (0, 1), (found.output, capfd.readouterr())
    made = {path.suffix: path.stat().st_size for path in (tmp_path / "m/var/backups/collage").iterdir()}
    assert made.keys() == {".dump", ".tar"}
    unit = (tmp_path / "m/etc/systemd/system/collage-backup.service").read_text()
    assert 'pg_dump --format=custom --file="$$day.dump" "$$COLLAGE_SERVER_DATABASE"' in unit
    assert "day=$$(date +%%u)" in unit
