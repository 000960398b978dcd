"""Settings: one frozen object, printed with its secrets masked; adding one breaks a test on purpose."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from collage_server.settings import Settings, SettingsError, settings_from_environment

ROOT = Path(__file__).parents[2]
BASE = {"COLLAGE_SERVER_FOLDER": "/data", "COLLAGE_SERVER_TOKEN": "t" * 43}


def test_they_are_frozen():
    settings = settings_from_environment(BASE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, "port", 1)  # noqa: B010


def test_every_setting_is_documented():
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    listed = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert listed == {entry.name for entry in dataclasses.fields(Settings)}, "a row each in docs/server.md"


def test_what_is_printed_holds_every_setting_and_no_secret():
    shown = settings_from_environment({**BASE, "COLLAGE_SERVER_HOST": "postgresql://user:hush@host/db"}).masked()
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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PORT", "70000", "0 to 65535"),
        ("PORT", "-1", "0 to 65535"),
        ("SHUTDOWN_SECONDS", "inf", "positive and finite"),
        ("SHUTDOWN_SECONDS", "nan", "positive and finite"),
        ("RUNS_PER_PROJECT", "0", "positive"),
        ("RUNS_PER_PROJECT", "1.5", "is not a int"),
        ("LOG_FORMAT", "xml", "set one of text, json"),
    ],
)
def test_bad_values_are_named(name, value, message):
    with pytest.raises(SettingsError, match=message):
        settings_from_environment({**BASE, f"COLLAGE_SERVER_{name}": value})
