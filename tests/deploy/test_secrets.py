"""The secrets of docker-compose.yml: made once, each for the user of one service alone."""

import shutil
import stat
import subprocess

import pytest

from tests.deploy.secrets import ROOT, Secrets

pytestmark = pytest.mark.slow


@pytest.fixture
def secrets(tmp_path):
    made = Secrets(tmp_path)
    done = made.run("start")
    assert done.returncode == 0, done.stderr
    return made


def test_what_is_made_is_kept(secrets):
    before = secrets.files()
    assert secrets.run("start").returncode == 0
    assert secrets.files() == before
    passwords = {before[name] for name in before if name.endswith(("password", "token"))}
    # Grafana's stands twice: for Grafana, and for people.
    assert len(passwords) == 3
    assert all(len(secret.strip()) >= 40 for secret in passwords)
    assert before["server/pgpass"] == f"database:5432:collage:collage:{before['database/password']}"


def test_each_folder_is_one_user_s(secrets):
    assert secrets.run("tokens").returncode == 0
    folders = {folder.name: folder for folder in secrets.folder.iterdir()}
    assert {line.split()[-1].rpartition("/")[2] for line in secrets.lines("chown")} == folders.keys()
    for folder in folders.values():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o500, folder
        assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o400}


def test_configuration_is_readable_by_every_service_whatever_the_umask_of_the_checkout(tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "server", checkout, ignore=shutil.ignore_patterns("collage_server"))
    for path in (checkout, *checkout.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    made = Secrets(tmp_path)
    for _ in range(2):
        done = made.run("start", CHECKOUT=str(checkout))
        assert done.returncode == 0, done.stderr
    paths = list(made.configuration.rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o755}
    files = {str(path.relative_to(made.configuration)): path for path in paths if path.is_file()}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o444}
    assert files.keys() >= {"prometheus/prometheus.yml", "grafana/dashboards/collage.json", "proxy/nginx.conf"}


def test_the_database_is_brought_up_to_date_before_tokens_are_made_by_role(secrets):
    assert secrets.run("tokens").returncode == 0
    migrate, *created = secrets.lines("command")
    assert migrate == "setup database"
    roles = {line.split("--role ")[1].split()[0]: line for line in created}
    assert roles.keys() == {"ingest", "read"}
    assert len(created) == 4
    assert all("token create --offline" in line and "--all-projects" in line for line in created)


def test_a_command_that_fails_ends_it(secrets):
    assert secrets.run("tokens", FAILS="1").returncode == 1
    assert not (secrets.folder / "agents").exists()


@pytest.mark.parametrize(("name", "option"), [("monitor.example", "-checkhost"), ("192.0.2.7", "-checkip")])
def test_the_certificate_is_for_the_name(tmp_path, name, option):
    made = Secrets(tmp_path)
    assert made.run("start", COLLAGE_NAME=name).returncode == 0
    certificate = made.folder / "certificate/certificate.pem"
    for asked in ((option, name), ("-checkhost", "localhost")):
        told = subprocess.run(
            ["openssl", "x509", "-noout", *asked, "-in", certificate], capture_output=True, text=True, check=True
        )
        assert "does match certificate" in told.stdout
