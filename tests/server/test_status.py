"""`collage-monitor status` against real servers: well, reading only, gone; with a token for one project."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.command.status import _number_checks, status
from collage_monitor.local import ensure_token, token_path
from tests.ports import command, free_port, running
from tests.server.test_process import serving
from tests.waiting import until


def told(address, *arguments):
    """(exit status, whether it says healthy, (ok, text) by name)."""
    result = CliRunner().invoke(status, ["--server-url", address, "--json", *arguments])
    answer = json.loads(result.output)
    checks = {check["name"]: (check["ok"], check["text"]) for check in answer["checks"]}
    return result.exit_code, answer["healthy"], checks


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_server_that_only_reads_is_not_well(tmp_path):
    with serving(tmp_path, "--no-auth", disk_budget_bytes=1) as (_, _, ready):
        code, healthy, checks = told(ready["server_url"])
    assert (code, healthy) == (1, False)
    assert "read-only: the data takes" in checks["server"][1]
    assert checks["disk"] == (False, "0% of the room is left")


@pytest.mark.slow
def test_a_token_that_may_not_see_the_numbers_says_so(tmp_path):
    secret, port = ensure_token(tmp_path), free_port()
    address = f"http://127.0.0.1:{port}"
    serve = command("serve", "--dir", tmp_path, "--port", port, "--token-file", token_path(tmp_path))
    with running(serve, f"{address}/healthz", tmp_path / "server.log"), Client(address, secret) as client:
        for create, word in (
            (wire.TokenCreate(name="one", role="read", projects=["p"]), "some projects"),
            (wire.TokenCreate(name="two", role="ingest", projects=None), "read"),
        ):
            code, _, checks = told(address, "--token", client.create_token(create).secret)
            assert code == 0
            assert checks.keys() == {"server", "numbers"}
            assert checks["numbers"][0] is None
            assert word in checks["numbers"][1]
        assert told(address, "--token", secret)[2].keys() > {"memory", "clock"}


def test_damaged_files_and_an_old_back_up_are_not_well():
    numbers = {"archive_damaged_files": 2.0, "database_damaged_rows": 1.0, "backup_age_seconds": 9 * 86_400.0}
    checks = {check.name: (check.ok, check.text) for check in _number_checks(numbers, 0.0)}
    assert checks["files"] == (False, "2 archived files are damaged")
    assert checks["rows"] == (False, "1 rows of the database are damaged")
    assert checks["back-up"] == (False, "the newest is 9.0 days old")


@pytest.mark.parametrize(
    ("skew", "told"),
    [(-0.04, "agrees with the server's"), (1.26, "is 1.3 s ahead of the server's"), (-2.0, "is 2.0 s behind the")],
)
def test_a_clock_is_ahead_behind_or_agrees(skew, told):
    checks = {check.name: check.text for check in _number_checks({"clock_skew_seconds": skew}, 0.0)}
    assert told in checks["clock"]
