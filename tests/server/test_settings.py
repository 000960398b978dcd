"""Settings: one frozen object, printed with its secrets masked; adding one breaks a test on purpose."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from collage_server.command.serve import serve
from collage_server.settings import Settings, SettingsError, settings_from_environment

from tests.server.guarded import OWN

ROOT = Path(__file__).parents[2]
BASE = {"COLLAGE_SERVER_FOLDER": "/data", "COLLAGE_SERVER_TOKEN": OWN}


def test_they_are_frozen():
    settings = settings_from_environment(BASE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, "port", 1)  # noqa: B010


def test_every_setting_is_documented():
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    listed = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert listed == {entry.name for entry in dataclasses.fields(Settings)}, "a row each in docs/server.md"


def test_what_is_printed_holds_every_setting_and_no_secret():
    shown = settings_from_environment(
        {**BASE, "COLLAGE_SERVER_HOST": "postgresql://user:hush@host/db", "COLLAGE_SERVER_ALLOWED_HOSTS": "host"}
    ).masked()
    assert set(shown) == {entry.name for entry in dataclasses.fields(Settings)}
    assert shown["token"] == "***"
    assert shown["host"] == "postgresql://user:***@host/db"
    assert settings_from_environment({"COLLAGE_SERVER_FOLDER": "/d"}, no_auth=True).masked()["token"] is None


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("postgresql://user:hush@host/db", "postgresql://user:***@host/db"),
        ("postgresql://user:p@ss/word@host/db", "postgresql://user:***@host/db"),
        ("postgresql://user@host/db?sslmode=require", "postgresql://user@host/db?sslmode=require"),
        ("postgresql://host/db?user=u&password=hush&port=1", "postgresql://host/db?user=u&password=***&port=1"),
        ("postgresql://host/db?sslPassword=hush", "postgresql://host/db?sslPassword=***"),
    ],
)
def test_no_password_of_a_database_is_printed(given, shown):
    assert settings_from_environment({**BASE, "COLLAGE_SERVER_DATABASE": given}).masked()["database"] == shown


def test_a_misspelt_variable_is_an_error_but_the_agents_address_is_not():
    assert settings_from_environment({**BASE, "COLLAGE_SERVER_URL": "http://127.0.0.1:7420"}).port == 7420
    with pytest.raises(SettingsError, match="COLLAGE_SERVER_PROT is no setting"):
        settings_from_environment({**BASE, "COLLAGE_SERVER_PROT": "1"})
    with pytest.raises(SettingsError, match="COLLAGE_SERVER_Port is no setting"):
        settings_from_environment({**BASE, "COLLAGE_SERVER_Port": "1"})


def test_a_folder_is_stated_or_the_users_data_folder(tmp_path):
    for stated, expected in (
        ({"COLLAGE_SERVER_FOLDER": "/data", "COLLAGE_DIR": "/x"}, "/data"),
        ({"COLLAGE_DIR": "/x"}, "/x"),
    ):
        environment = {"COLLAGE_SERVER_TOKEN": OWN, **stated}
        assert settings_from_environment(environment).folder == Path(expected)
        assert settings_from_environment(environment, folder=tmp_path).folder == tmp_path


@pytest.mark.parametrize("token", ["", " ", "two words", "token\n", "tök"])
def test_a_token_that_nobody_or_anybody_could_send_is_refused(token):
    with pytest.raises(SettingsError, match=r"token|TOKEN"):
        settings_from_environment({**BASE, "COLLAGE_SERVER_TOKEN": token})


@pytest.fixture
def printed(monkeypatch, tmp_path):
    """What `serve --print-settings` prints with these flags and variables."""
    monkeypatch.setenv("COLLAGE_DIR", str(tmp_path / "default"))

    def run(*flags, **variables):
        stated = {f"COLLAGE_SERVER_{name.upper()}": str(value) for name, value in variables.items()}
        result = CliRunner(env=stated).invoke(serve, ["--print-settings", *map(str, flags)])
        return json.loads(result.stdout) if result.exit_code == 0 else result

    return run


def test_a_flag_wins_over_its_variable_and_that_over_the_default(printed, tmp_path):
    assert printed()["folder"] == str(tmp_path / "default")
    assert printed(folder=tmp_path / "stated")["folder"] == str(tmp_path / "stated")
    assert printed("--dir", tmp_path / "flag", folder=tmp_path / "stated")["folder"] == str(tmp_path / "flag")
    assert [printed(*flags, port=7).get("port") for flags in ((), ("--port", 8))] == [7, 8]


def test_which_token_is_asked_for(printed, tmp_path):
    file = tmp_path / "secret"
    file.write_text(f"{OWN}\n", encoding="ascii")
    for flags, variables, asks in (
        ((), {}, True),
        ((), {"no_auth": "0"}, True),
        ((), {"no_auth": "1"}, False),
        ((), {"token": ""}, True),
        (("--no-auth",), {"token": OWN}, False),
        (("--token-file", file), {"no_auth": "1"}, True),
    ):
        shown = printed(*flags, **variables)
        assert (shown["no_auth"], shown["token"] is not None or not asks) == (not asks, True), (flags, variables)
    refused = printed("--no-auth", "--token-file", file)
    assert (refused.exit_code, "give one of the two" in refused.output) == (2, True)


def test_texts_are_read_as_what_their_setting_is():
    stated = {"PORT": " 7 ", "UNSAFE_DATABASE": "Yes", "SHUTDOWN_SECONDS": "1e1", "RETENTION_COARSE_DAYS": "9"}
    named = {f"COLLAGE_SERVER_{name}": value for name, value in stated.items()}
    settings = settings_from_environment({**BASE, **named, "COLLAGE_SERVER_RETENTION_RAW_DAYS": "2"})
    assert (settings.port, settings.unsafe_database, settings.shutdown_seconds) == (7, True, 10.0)
    assert (type(settings.shutdown_seconds), settings.retention_days) == (float, {1: 2.0, 16: 9.0})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PORT", "70000", "0 to 65535"),
        ("PORT", "-1", "0 to 65535"),
        ("SHUTDOWN_SECONDS", "inf", "positive and finite"),
        ("SHUTDOWN_SECONDS", "nan", "positive and finite"),
        ("RUNS_PER_PROJECT", "0", "positive"),
        ("RUNS_PER_PROJECT", "1.5", "COLLAGE_SERVER_RUNS_PER_PROJECT='1.5' must be a positive whole"),
        ("SEAL_INTERVAL_SECONDS", "soon", "must be a positive and finite number; unset it"),
        ("DISK_RESERVE_BYTES", "-5", "COLLAGE_SERVER_DISK_RESERVE_BYTES='-5' must be a positive"),
        ("LOG_FORMAT", "xml", "set one of text, json"),
        ("UNSAFE_DATABASE", "maybe", "COLLAGE_SERVER_UNSAFE_DATABASE='maybe' must be yes or no; set 1 or 0"),
        ("DATABASE", "sqlite:///x", "COLLAGE_SERVER_DATABASE must be postgresql://USER@HOST/NAME; leave it out"),
        ("DATABASE", "", "COLLAGE_SERVER_DATABASE must be"),
    ],
)
def test_bad_values_are_named(name, value, message):
    with pytest.raises(SettingsError, match=message):
        settings_from_environment({**BASE, f"COLLAGE_SERVER_{name}": value})


def test_an_address_is_refused_without_the_password_in_it():
    with pytest.raises(SettingsError, match="must be an http:// or https:// address") as refused:
        settings_from_environment({**BASE, "COLLAGE_SERVER_DASHBOARD_URL": "http://me:hush@box.lan"})
    assert "hush" not in str(refused.value)
