"""Settings: one frozen object, printed with its secrets masked; adding one breaks a test on purpose."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from collage_server.command.serve import serve
from collage_server.settings import (
    Settings,
    SettingsError,
    grants_by_group,
    settings_beside_server,
    settings_from_environment,
)

from collage_monitor import wire
from tests.server.guarded import OWN

ROOT = Path(__file__).parents[2]
BASE = {"COLLAGE_SERVER_FOLDER": "/data", "COLLAGE_SERVER_TOKEN": OWN}


def test_what_is_printed_holds_every_documented_setting_and_no_secret():
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    listed = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert listed == {entry.name for entry in dataclasses.fields(Settings)}, "a row each in docs/server.md"
    shown = settings_from_environment(
        {**BASE, "COLLAGE_SERVER_HOST": "postgresql://user:hush@host/db", "COLLAGE_SERVER_ALLOWED_HOSTS": "host"}
    ).masked()
    assert set(shown) == listed
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


def test_the_agents_address_is_no_misspelt_setting():
    assert settings_from_environment({**BASE, "COLLAGE_SERVER_URL": "http://127.0.0.1:7420"}).port == 7420


def test_a_folder_is_stated_or_the_users_data_folder(tmp_path):
    for stated, expected in (
        ({"COLLAGE_SERVER_FOLDER": "/data", "COLLAGE_DIR": "/x"}, "/data"),
        ({"COLLAGE_DIR": "/x"}, "/x"),
    ):
        environment = {"COLLAGE_SERVER_TOKEN": OWN, **stated}
        assert settings_from_environment(environment).folder == Path(expected)
        assert settings_from_environment(environment, folder=tmp_path).folder == tmp_path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--token-file"),
        ({"host": "0.0.0.0", "token": OWN}, "--allowed-host"),
        *(({"no_auth": True, "host": host}, "loopback") for host in ("0.0.0.0", "::", "192.168.1.5", "box.lan")),
        *(({"token": token}, "too weak") for token in ("password", "12345678901234567890", "x" * 64)),
        *(({"no_auth": True, "memory": size}, "COLLAGE_SERVER_MEMORY") for size in ("255M", "1", "512MB", "half")),
        *(({"no_auth": True, "memory": size}, "COLLAGE_SERVER_MEMORY") for size in ("-1M", "")),
    ],
)
def test_a_server_that_anybody_could_use_or_that_has_no_room_is_refused(tmp_path, given, message):
    with pytest.raises(SettingsError, match=message) as refused:
        Settings(folder=tmp_path, **given)
    assert given.get("token", OWN) not in str(refused.value)


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
    default = printed()
    assert (default["folder"], default["token"], default["port"]) == (str(tmp_path / "default"), "***", 7420)
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
    stated = {"PORT": " 7 ", "UNSAFE_DATABASE": "Yes", "SESSION_SECONDS": "1e1", "RETENTION_COARSE_DAYS": "9"}
    named = {f"COLLAGE_SERVER_{name}": value for name, value in stated.items()}
    settings = settings_from_environment({**BASE, **named, "COLLAGE_SERVER_RETENTION_RAW_DAYS": "2"})
    assert (settings.port, settings.unsafe_database, settings.session_seconds) == (7, True, 10.0)
    assert (type(settings.session_seconds), settings.retention_days) == (float, {1: 2.0, 16: 9.0})


OIDC = {
    "OIDC_ISSUER": "https://login.example/realms/team",
    "OIDC_CLIENT_ID": "collage",
    "OIDC_CLIENT_SECRET": "hush-hush",
    "OIDC_ROLES": "ml-admins=admin; team-a=operate:vision,speech; everyone=read",
    "DASHBOARD_URL": "https://monitor.example:7421",
}


def with_oidc(but=(), **other):
    stated = {name: value for name, value in OIDC.items() if name not in but} | other
    return settings_from_environment(BASE | {f"COLLAGE_SERVER_{name}": value for name, value in stated.items()})


def test_a_provider_is_stated_as_a_whole_and_its_secret_is_not_shown():
    settings = with_oidc()
    assert settings.masked()["oidc_client_secret"] == "***"
    assert "hush" not in repr(settings)
    assert grants_by_group(settings.oidc_roles or "") == {
        "ml-admins": [wire.Grant(role="admin")],
        "team-a": [wire.Grant(role="operate", projects=["vision", "speech"])],
        "everyone": [wire.Grant(role="read")],
    }
    twice = "cn=a,ou=groups=read:vision; cn=a,ou=groups = operate : speech ;"
    grants = [wire.Grant(role="read", projects=["vision"]), wire.Grant(role="operate", projects=["speech"])]
    assert grants_by_group(twice) == {"cn=a,ou=groups": grants}, "groups of a directory have equals signs"
    plain = with_oidc(OIDC_ISSUER="http://localhost:8080/realms/a", DASHBOARD_URL="http://127.0.0.1:7421")
    assert plain.oidc_issuer == "http://localhost:8080/realms/a", "this machine may do without TLS"


def test_sign_in_hinders_no_verb_beside_the_server(monkeypatch, tmp_path):
    """`token create --offline` asks for no token, which `serve --no-auth` may not combine with sign-in."""
    for name, value in OIDC.items():
        monkeypatch.setenv(f"COLLAGE_SERVER_{name}", value)
    monkeypatch.setenv("COLLAGE_SERVER_HOST", "0.0.0.0")
    assert settings_beside_server(tmp_path).folder == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", OIDC)
def test_a_provider_that_lacks_one_setting_or_has_one_alone_is_refused_and_names_are_told(name):
    with pytest.raises(SettingsError, match=f"COLLAGE_SERVER_{name} is not: set it, too"):
        with_oidc(but=(name,))
    alone = [other for other in OIDC if other != name]
    if name == "DASHBOARD_URL":
        assert with_oidc(but=alone).dashboard_url == OIDC[name]
    else:
        with pytest.raises(SettingsError, match=f"COLLAGE_SERVER_{name} is set, but COLLAGE_SERVER_OIDC_.* is not"):
            with_oidc(but=alone)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PROT", "1", "COLLAGE_SERVER_PROT is no setting"),
        ("Port", "1", "COLLAGE_SERVER_Port is no setting"),
        ("PORT", "70000", "0 to 65535"),
        ("PORT", "-1", "0 to 65535"),
        ("SESSION_SECONDS", "inf", "positive and finite"),
        ("SESSION_SECONDS", "nan", "positive and finite"),
        ("RUNS_PER_PROJECT", "0", "positive"),
        ("RUNS_PER_PROJECT", "1.5", "COLLAGE_SERVER_RUNS_PER_PROJECT='1.5' must be a positive whole"),
        ("ALERT_INTERVAL_SECONDS", "soon", "must be a positive and finite number; unset it"),
        ("DISK_RESERVE_BYTES", "-5", "COLLAGE_SERVER_DISK_RESERVE_BYTES='-5' must be a positive"),
        ("LOG_FORMAT", "xml", "set one of text, json"),
        ("UNSAFE_DATABASE", "maybe", "COLLAGE_SERVER_UNSAFE_DATABASE='maybe' must be yes or no; set 1 or 0"),
        ("DATABASE", "sqlite:///x", "COLLAGE_SERVER_DATABASE must be postgresql://USER@HOST/NAME; leave it out"),
        ("DATABASE", "", "COLLAGE_SERVER_DATABASE must be"),
        ("DASHBOARD_URL", "http://me:hush@box.lan", "must be an http:// or https:// address"),
        *(("TOKEN", token, "token") for token in ("", " ", "two words", "token\n", "tök")),
        ("OIDC_ISSUER", "http://login.example", "OIDC_ISSUER='http://login.example' must be an https:// address"),
        ("OIDC_ISSUER", "login.example", "OIDC_ISSUER='login.example' must be an http:// or https:// address"),
        ("DASHBOARD_URL", "http://monitor.example", "DASHBOARD_URL='http://monitor.example' must be an https://"),
        ("NO_AUTH", "1", "--no-auth asks nobody to"),
        ("OIDC_CLIENT_SECRET", "", "COLLAGE_SERVER_OIDC_CLIENT_SECRET must be one word"),
        ("OIDC_CLIENT_SECRET", "two words", "COLLAGE_SERVER_OIDC_CLIENT_SECRET must be one word"),
        ("OIDC_SCOPES", "profile", "openid among them"),
        ("OIDC_SCOPES", "openid,profile", "openid among them"),
        ("SESSION_SECONDS", "0", "positive and finite"),
        ("OIDC_ROLES", "", "gives nobody a role; set it as"),
        ("OIDC_ROLES", " ; ", "gives nobody a role; set it as"),
        ("OIDC_ROLES", "team-a", "'team-a' must be GROUP=ROLE"),
        ("OIDC_ROLES", "a=read; =read", "'=read' must be GROUP=ROLE"),
        ("OIDC_ROLES", "a=write", "with a role of read, operate, admin"),
        ("OIDC_ROLES", "a=ingest", "ingest for tokens alone"),
        ("OIDC_ROLES", "a=admin:vision", "admin is for every project"),
        ("OIDC_ROLES", "a=read:", "'a=read:' must be GROUP=ROLE"),
        ("OIDC_ROLES", "a=read:,", "'a=read:,' must be GROUP=ROLE"),
    ],
)
def test_bad_values_are_named_and_no_secret_with_them(name, value, message):
    with pytest.raises(SettingsError) as refused:
        with_oidc(**{name: value})
    told = str(refused.value)
    assert message.lower() in told.lower()
    assert not [secret for secret in ("two words", "hush") if secret in told]
