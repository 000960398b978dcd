"""The verbs about a server: `token` on its host and through the API; `status`, whatever the server is like."""

import getpass
import json
import os

import httpx
import pytest
from click.testing import CliRunner
from collage_server.command.token import token

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.command.status import _number_checks, status
from collage_monitor.errors import NotAuthorised
from collage_monitor.local import LocalServer, announced, read_token
from tests.server.test_process import serving
from tests.waiting import until

pytestmark = pytest.mark.slow


def call(*arguments, code=0):
    result = CliRunner().invoke(token, [str(part) for part in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def runs(url, secret):
    headers = {"Authorization": f"Bearer {secret}"}
    return httpx.get(f"{url}/api/v1/runs", headers=headers, trust_env=False).status_code


def test_on_the_host_while_a_server_runs_and_through_it(tmp_path):
    host = ("--offline", "--dir", tmp_path)
    first = call("create", *host, "--name", "first", "--role", "admin").stdout.split()[0]
    with serving(tmp_path) as (_, _, ready):
        url = ready["server_url"]
        there = ("--server-url", url, "--token", first)
        reads = ("--name", "x", "--role", "read", "--project", "p")
        made = json.loads(call("create", *there, *reads, "--json").stdout)
        assert runs(url, made["secret"]) == 200
        token_id = made["token"]["token_id"]
        assert token_id in call("list", *there).stdout
        assert made["secret"] not in call("list", *host).stdout
        call("revoke", *there, token_id)
        assert runs(url, made["secret"]) == 401
        # With the data folder's own token instead of an administrator's.
        assert "revoked" in call("list", "--server-url", url, "--dir", tmp_path).stdout


def test_a_server_that_up_keeps_elsewhere_is_found_with_its_token(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder = tmp_path / "elsewhere"
    with (
        serving(folder) as (process, _, ready),
        announced(LocalServer(ready["server_url"], "", str(folder), process.pid)),
    ):
        assert "no tokens yet" in call("list").stdout
        # A folder that is named is asked for its token, and has none.
        assert isinstance(call("list", "--dir", tmp_path, code=1).exception, NotAuthorised)


def test_unclear_reach_is_refused(tmp_path):
    host = ("--offline", "--dir", tmp_path)
    for arguments in (
        ("--role", "read"),
        ("--role", "admin", "--project", "p"),
        ("--role", "read", "--project", "p", "--all-projects"),
        ("--role", "root", "--all-projects"),
    ):
        call("create", *host, "--name", "n", *arguments, code=2)
        assert "no tokens yet" in call("list", *host).stdout


def test_what_only_the_host_itself_can_do_names_the_way_there(tmp_path):
    result = call("list", "--server-url", "http://127.0.0.1:1", "--dir", tmp_path, code=1)
    assert "--offline" in result.output
    result = call("create", "--name", "x", "--role", "read", "--all-projects", "--output", tmp_path / "t", code=2)
    assert "--offline" in result.output


def test_a_host_without_a_name_for_its_user_and_a_name_that_would_steer_the_terminal(tmp_path, monkeypatch):
    def nobody():
        raise KeyError("getpwuid(): uid not found: 54321")

    monkeypatch.setattr(getpass, "getuser", nobody)
    host = ("--offline", "--dir", tmp_path)
    made = call("create", *host, "--name", "n\x1b[2J\nm", "--role", "admin", "--json").stdout
    assert json.loads(made)["token"]["created_by"] == f"host:{os.getuid()}"
    [line] = call("list", *host).stdout.splitlines()
    assert "n\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}m" in line


def test_a_file_keeps_its_token_for_as_long_as_it_counts(tmp_path):
    host, file = ("--offline", "--dir", tmp_path), tmp_path / "secret"
    create = ("create", *host, "--name", "scraper", "--all-projects", "--output", file, "--role")
    made = call(*create, "read")
    first = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert first.strip() not in made.output
    call(*create, "read")
    assert file.read_text() == first
    call("revoke", *host, made.stderr.split()[0])
    second = call(*create, "read").stderr.split()[0]
    assert file.read_text() != first
    # Of another role, and of no database at all, it does not count.
    call(*create, "ingest")
    assert len({first, file.read_text()}) == 2
    assert second in call("list", *host).stdout
    file.write_text("something else\n")
    call(*create, "ingest")
    assert file.read_text().startswith("collage_")


def told(address, *arguments):
    """(exit status, whether it says healthy, (ok, text) by name)."""
    result = CliRunner().invoke(status, ["--server-url", address, "--json", *arguments])
    answer = json.loads(result.output)
    checks = {check["name"]: (check["ok"], check["text"]) for check in answer["checks"]}
    return result.exit_code, answer["healthy"], checks


def test_a_server_that_is_well_and_one_that_is_gone(tmp_path):
    quick = {"alert_interval_seconds": 0.2, "seal_interval_seconds": 0.2}
    with serving(tmp_path, "--no-auth", **quick) as (_, _, ready):
        address = ready["server_url"]
        until(lambda: told(address)[2]["alerts"][0], "a round of alerts")
        until(lambda: told(address)[2]["files"][0], "a look at archived files")
        code, healthy, checks = told(address)
        assert (code, healthy) == (0, True)
        assert {name: ok for name, (ok, _) in checks.items()} == {
            **dict.fromkeys(("server", "disk", "sealer", "alerts", "archive", "files"), True),
            **dict.fromkeys(("journal", "rows", "back-up", "clock", "memory"), None),
        }
        assert checks["alerts"][1].endswith(", by this server")
        lines = CliRunner().invoke(status, ["--server-url", address]).output.splitlines()
        assert [line.split()[0] for line in lines] == list(checks)
    code, healthy, checks = told(address)
    assert (code, healthy, list(checks)) == (1, False, ["server"])
    assert "is it running?" in checks["server"][1]


def test_a_server_that_only_reads_is_not_well(tmp_path):
    with serving(tmp_path, "--no-auth", disk_budget_bytes=1) as (_, _, ready):
        code, healthy, checks = told(ready["server_url"])
    assert (code, healthy) == (1, False)
    assert "read-only: the data takes" in checks["server"][1]
    assert checks["disk"] == (False, "0% of the room is left")


def test_a_token_that_may_not_see_the_numbers_says_so(tmp_path):
    with serving(tmp_path) as (_, _, ready):
        address, secret = ready["server_url"], read_token(tmp_path)
        for create, word in (
            (wire.TokenCreate(name="one", role="read", projects=["p"]), "some projects"),
            (wire.TokenCreate(name="two", role="ingest", projects=None), "read"),
        ):
            with Client(address, secret) as client:
                own = client.create_token(create).secret
            code, _, checks = told(address, "--token", own)
            assert code == 0
            assert checks.keys() == {"server", "numbers"}
            assert checks["numbers"][0] is None
            assert word in checks["numbers"][1]
        assert told(address, "--token", secret)[2].keys() > {"memory", "clock"}


def test_damaged_files_and_an_old_back_up_are_not_well_and_a_clock_is_ahead_behind_or_agrees():
    numbers = {"archive_damaged_files": 2.0, "database_damaged_rows": 1.0, "backup_age_seconds": 9 * 86_400.0}
    checks = {check.name: (check.ok, check.text) for check in _number_checks(numbers, 0.0)}
    assert checks["files"] == (False, "2 archived files are damaged")
    assert checks["rows"] == (False, "1 rows of the database are damaged")
    assert checks["back-up"] == (False, "the newest is 9.0 days old")
    for skew, said in ((-0.04, "agrees with"), (1.26, "is 1.3 s ahead of"), (-2.0, "is 2.0 s behind")):
        [told] = [one.text for one in _number_checks({"clock_skew_seconds": skew}, 0.0) if one.name == "clock"]
        assert said in told
