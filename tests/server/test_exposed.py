"""A server that others can reach: its names, who asks and how often in vain, and what its words give away."""

from __future__ import annotations

import io
import json
import logging
import stat
import warnings

import pytest
from collage_server.auth import bearer
from collage_server.errors import Busy
from collage_server.logs import configure
from collage_server.settings import Settings, SettingsError
from collage_server.store import SqliteStore
from collage_server.store.backup import back_up, restore
from sqlalchemy.exc import OperationalError

from collage_monitor import wire
from tests.server.guarded import OWN, guarded_server
from tests.server.sockets import listening, status_of
from tests.server.test_process import serving

pytestmark = pytest.mark.slow


def asked(server, path="/healthz", host="127.0.0.1", **headers):
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return server.ask("\r\n".join([*lines, "", ""]).encode())


def test_beyond_loopback_names_must_be_stated(tmp_path):
    with pytest.raises(SettingsError, match="--allowed-host"):
        Settings(folder=tmp_path, host="0.0.0.0", token=OWN)


def test_only_stated_names_are_answered(tmp_path):
    with listening(tmp_path, host="0.0.0.0", token=OWN, allowed_hosts=("box.lan", "Other.lan")) as server:
        for host, status in (
            ("evil.example", 403),
            ("box.lan", 200),
            ("other.lan:7420", 200),
            (f"127.0.0.1:{server.port}", 200),
            ("box.lan.evil.example", 403),
        ):
            assert status_of(asked(server, host=host)) == status, host
        assert b'"field":"Host"' in asked(server, "/api/v1/runs", "evil.example", Authorization=f"Bearer {OWN}")


def test_without_tokens_only_its_own_pages_may_ask(tmp_path):
    with listening(tmp_path) as server:
        own = f"127.0.0.1:{server.port}"
        assert status_of(asked(server, "/api/v1/runs", own, Origin=f"http://{own}")) == 200
        assert status_of(asked(server, "/api/v1/runs", own, Origin="http://127.0.0.1:1")) == 403


@pytest.mark.parametrize("weak", ["password", "12345678901234567890", "x" * 64])
def test_a_token_that_can_be_guessed_is_refused_and_not_named(tmp_path, weak):
    with pytest.raises(SettingsError, match="too weak") as refused:
        Settings(folder=tmp_path, token=weak)
    assert weak not in str(refused.value)


def test_unknown_tokens_are_limited_by_address_and_known_ones_pass(tmp_path):
    with listening(tmp_path, token=OWN, trusted_proxies=("127.0.0.1",)) as server:
        vain = [
            status_of(
                asked(server, "/api/v1/runs", Authorization=f"Bearer guess-{i}", **{"X-Forwarded-For": "10.9.9.9"})
            )
            for i in range(bearer._MOST_FAILURES + 2)
        ]
        assert vain == [401] * bearer._MOST_FAILURES + [429] * 2
        known = asked(server, "/api/v1/runs", Authorization=f"Bearer {OWN}", **{"X-Forwarded-For": "10.9.9.9"})
        assert status_of(known) == 200
        other = asked(server, "/api/v1/runs", Authorization="Bearer x", **{"X-Forwarded-For": "10.9.9.8"})
        assert status_of(other) == 401


@pytest.mark.parametrize(("proxies", "client"), [("", "127.0.0.1"), ("127.0.0.1", "10.1.2.3")])
def test_log_and_audit_name_who_asks(tmp_path, caplog, proxies, client):
    caplog.set_level(logging.DEBUG, "collage_server.requests")
    forwarded = {"X-Forwarded-For": "10.1.2.3", "Authorization": f"Bearer {OWN}"}
    with listening(tmp_path, token=OWN, trusted_proxies=tuple(filter(None, [proxies]))) as server:
        body = wire.encode_message(wire.TokenCreate(name="n", role="read", projects=None), wire.JSON)
        lines = ["POST /api/v1/tokens HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in forwarded.items()]
        assert status_of(server.ask("\r\n".join([*lines, "", ""]).encode() + body)) == 201
        page = asked(server, "/api/v1/audit", **forwarded).partition(b"\r\n\r\n")[2]
    [entry] = wire.decode_message(page, wire.AuditLogPage, wire.JSON).acts
    assert (entry.client, entry.actor) == (client, "server-token")
    assert "client address" not in entry.details
    assert {(record.client, record.actor) for record in caplog.records if record.name.endswith("requests")} == {
        (client, "server-token")
    }


def test_files_are_for_their_owner_alone(tmp_path):
    folder = tmp_path / "new" / "data"
    with listening(folder) as server:
        assert status_of(asked(server)) == 200
        back_up(folder / "collage.sqlite", tmp_path / "copy.sqlite")
        made = [folder, tmp_path / "copy.sqlite", *folder.rglob("*")]
        assert {path.name for path in made} >= {"collage.sqlite", "collage.sqlite-wal", "collage.sqlite-shm"}
        modes = {path.name: (path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in made}
    assert set(modes.values()) == {(True, 0o700), (False, 0o600)}, modes
    (folder / "collage.sqlite").chmod(0o644)
    with listening(folder):
        assert stat.S_IMODE((folder / "collage.sqlite").stat().st_mode) == 0o600, "an earlier release's"
    restore(tmp_path / "copy.sqlite", tmp_path / "restored" / "collage.sqlite")
    assert stat.S_IMODE((tmp_path / "restored" / "collage.sqlite").stat().st_mode) == 0o600


def test_what_the_database_says_is_for_the_log(caplog, tmp_path):
    said = 'connection to server at "db.internal" (10.0.0.5), port 5432 failed'
    with pytest.raises(Busy) as refused, SqliteStore(tmp_path, stale_after_seconds=1.0)._translated():
        raise OperationalError("SELECT 1", {}, Exception(said))
    assert "db.internal" not in refused.value.message
    assert "10.0.0.5" not in refused.value.message
    assert said in caplog.text


def test_a_warning_keeps_to_the_form_of_the_log():
    root, shown = logging.getLogger(), warnings.showwarning
    before, level = root.handlers[:], root.level
    buffer = io.StringIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            configure("json", "info", (), buffer)
            warnings.warn("invalid value encountered in divide", RuntimeWarning, stacklevel=1)
    finally:
        logging.captureWarnings(False)
        warnings.showwarning = shown
        root.handlers[:] = before
        root.setLevel(level)
    [line] = buffer.getvalue().splitlines()
    assert json.loads(line)["level"] == "warning"
    assert "invalid value" in json.loads(line)["message"]


def test_pages_for_people_load_nothing_and_a_slash_is_no_redirect(tmp_path):
    with guarded_server(tmp_path) as server:
        for path in ("/docs", "/", "/runs/r1"):
            headers = server.client.get(path).headers
            assert "default-src 'none'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
        answer = server.client.get("/docs/", follow_redirects=False)
        assert (answer.status_code, answer.headers["content-type"]) == (401, wire.JSON)
        answer = server.ask("GET", "/docs/")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_the_description_has_both_answers_to_creating_a_run(tmp_path):
    with guarded_server(tmp_path) as server:
        described = server.client.get("/openapi.json").json()["paths"]["/api/v1/projects/{project}/runs"]["post"]
    assert {"200", "201"} <= set(described["responses"])
    for status in ("200", "201"):
        schema = described["responses"][status]["content"][wire.JSON]["schema"]
        assert schema == {"$ref": "#/components/schemas/Run"}


def test_plain_http_beyond_this_machine_is_warned_of(tmp_path):
    log = tmp_path / "log"
    flags = ("--host", "0.0.0.0", "--allowed-host", "box.lan")
    with log.open("wb") as stderr, serving(tmp_path / "data", *flags, stderr=stderr):
        assert "plain HTTP on 0.0.0.0" in log.read_text()
