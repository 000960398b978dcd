"""`collage-monitor token`: on the host and through the API."""

from __future__ import annotations

import getpass
import json
import os

import httpx
import pytest
from click.testing import CliRunner
from collage_server.command.token import token

from collage_monitor.errors import NotAuthorised
from collage_monitor.local import LocalServer, announced
from tests.server.test_process import serving

pytestmark = pytest.mark.slow


@pytest.fixture
def call():
    def call(*arguments, code=0):
        result = CliRunner().invoke(token, [str(part) for part in arguments])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return call


def runs(url, secret):
    return httpx.get(
        f"{url}/api/v1/runs", headers={"Authorization": f"Bearer {secret}"}, trust_env=False
    ).status_code


def test_on_the_host_while_a_server_runs_and_through_it(call, tmp_path):
    host = ("--offline", "--dir", tmp_path)
    first = call("create", *host, "--name", "first", "--role", "admin").stdout.split()[0]
    with serving(tmp_path) as (_, _, ready):
        url = ready["server_url"]
        there = ("--server-url", url, "--token", first)
        made = json.loads(
            call("create", *there, "--name", "x", "--role", "read", "--project", "p", "--json").stdout
        )
        assert runs(url, made["secret"]) == 200
        token_id = made["token"]["token_id"]
        assert token_id in call("list", *there).stdout
        assert made["secret"] not in call("list", *host).stdout
        call("revoke", *there, token_id)
        assert runs(url, made["secret"]) == 401
        # With the data folder's own token instead of an administrator's.
        assert "revoked" in call("list", "--server-url", url, "--dir", tmp_path).stdout


def test_a_server_that_up_keeps_elsewhere_is_found_with_its_token(call, tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    "arguments",
    [
        ("--role", "read"),
        ("--role", "admin", "--project", "p"),
        ("--role", "read", "--project", "p", "--all-projects"),
        ("--role", "root", "--all-projects"),
    ],
)
def test_unclear_reach_is_refused(call, tmp_path, arguments):
    call("create", "--offline", "--dir", tmp_path, "--name", "n", *arguments, code=2)
    assert "no tokens yet" in call("list", "--offline", "--dir", tmp_path).stdout


def test_without_a_server_the_message_names_the_way_on_the_host(call, tmp_path):
    result = call("list", "--server-url", "http://127.0.0.1:1", "--dir", tmp_path, code=1)
    assert "--offline" in result.output


def test_a_host_without_a_name_for_its_user_and_a_name_that_would_steer_the_terminal(call, tmp_path, monkeypatch):
    def nobody():
        raise KeyError("getpwuid(): uid not found: 54321")

    monkeypatch.setattr(getpass, "getuser", nobody)
    host = ("--offline", "--dir", tmp_path)
    made = call("create", *host, "--name", "n\x1b[2J\nm", "--role", "admin", "--json").stdout
    assert json.loads(made)["token"]["created_by"] == f"host:{os.getuid()}"
    [line] = call("list", *host).stdout.splitlines()
    assert "n\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}m" in line


def test_a_file_keeps_its_token_for_as_long_as_it_counts(call, tmp_path):
    host, file = ("--offline", "--dir", tmp_path), tmp_path / "secret"
    create = ("create", *host, "--name", "scraper", "--all-projects", "--output", file)
    made = call(*create, "--role", "read")
    first = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert first.strip() not in made.output
    call(*create, "--role", "read")
    assert file.read_text() == first
    call("revoke", *host, made.stderr.split()[0])
    second = call(*create, "--role", "read").stderr.split()[0]
    assert file.read_text() != first
    # Of another role, and of no database at all, it does not count.
    call(*create, "--role", "ingest")
    assert len({first, file.read_text()}) == 2
    assert second in call("list", *host).stdout
    file.write_text("something else\n")
    call(*create, "--role", "ingest")
    assert file.read_text().startswith("collage_")


def test_a_file_is_for_the_host_itself(call, tmp_path):
    result = call("create", "--name", "x", "--role", "read", "--all-projects", "--output", tmp_path / "t", code=2)
    assert "--offline" in result.output
