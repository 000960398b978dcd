"""Settings of the server: one frozen object, from environment and flags.

Names, defaults and bounds are the operator's interface: `docs/server.md` lists them, and a new field breaks a test
on purpose (`tests/server/test_settings.py`). Values are read by `collage_monitor.setting_values`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from collage_monitor import wire
from collage_monitor.local import LOOPBACK_HOSTS, SERVER_PORT, data_folder, is_loopback
from collage_monitor.setting_values import SettingsError, WebAddress, kinds_of, masked, read_setting

__all__ = [
    "FIXED_LIMITS",
    "FixedLimits",
    "Settings",
    "SettingsError",
    "grants_by_group",
    "settings_beside_server",
    "settings_from_environment",
]

_PREFIX = "COLLAGE_SERVER_"
_NOT_OURS = "COLLAGE_SERVER_URL"
_SECRET = frozenset({"token", "alert_webhook", "alert_slack", "alert_smtp", "oidc_client_secret"})
_LEAST_BITS: Final = 72
_LEAST_MEMORY: Final = 256 * 2**20
_UNITS: Final = {"K": 2**10, "M": 2**20, "G": 2**30}
_Flag = Annotated[bool, Meta(description="yes or no; set 1 or 0")]
_Count = Annotated[int, Meta(gt=0, description="a positive whole number; unset it for the default")]
_Number = Annotated[
    float,
    Meta(gt=0, le=sys.float_info.max, description="a positive and finite number; unset it for the default"),
]
_Database = Annotated[
    str,
    Meta(
        pattern=r"^postgresql(\+psycopg)?://",
        description="postgresql://USER@HOST/NAME; leave it out for SQLite in a file",
    ),
]
_Archive = Annotated[
    str,
    Meta(
        pattern=r"^([^:]+|[A-Za-z]:[\\/].*|(s3|s3a|gs|az|adl|azure|abfs|abfss|https|file|memory)://.*)$",
        description="a folder, a bucket such as s3://BUCKET/FOLDER, gs://… or az://…, or off",
    ),
]
_Port = Annotated[int, Meta(ge=0, le=65_535, description="a whole number from 0 to 65535; 0 takes a free one")]
_Token = Annotated[
    str,
    Meta(
        pattern=r"^[!-~]*\Z",
        description="one word of ASCII characters, without white space around it: no request could carry it",
    ),
]
_MailServer = Annotated[
    str, Meta(pattern=r"^smtps?://\S+$", description="smtp://USER:PASSWORD@HOST:PORT, or smtps:// for TLS at once")
]
_MailAddresses = Annotated[
    str,
    Meta(
        pattern=r"^[^@\s,]+@[^@\s,]+(,\s*[^@\s,]+@[^@\s,]+)*$", description="e-mail addresses, with commas between"
    ),
]
_Alerts = Annotated[
    Literal["off", "default", "info", "warning", "critical"],
    Meta(description="one that it knows; set one of off, default, info, warning, critical"),
]
_Names = Annotated[tuple[str, ...], Meta(description="names with commas between them, as box.lan,10.0.0.7")]
_Word = Annotated[str, Meta(pattern=r"^[!-~]+\Z", description="one word of ASCII characters, without white space")]
_Scopes = Annotated[
    str,
    Meta(
        pattern=r"^([!-~]+ )*openid( [!-~]+)*\Z",
        description="scopes with single spaces between them, openid among them",
    ),
]
_LogFormat = Annotated[Literal["text", "json"], Meta(description="one that it knows; set one of text, json")]
_LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    Meta(description="one that it knows; set one of debug, info, warning, error"),
]
_Size = Annotated[
    str, Meta(pattern=r"^[1-9][0-9]{0,12}[KMG]?\Z", description="bytes, or a whole number with K, M or G, as 512M")
]
"""What a setting must be, and what to set where it is not: the sentence that follows `VARIABLE must be`."""


@dataclass(frozen=True, kw_only=True)
class FixedLimits:
    """Bounds that no operator has a reason to change; tests use others. Sizes in bytes, times in seconds.

    `connections` bounds those open at a time, `idle_seconds` the wait for a whole head. `in_flight_bytes` bounds
    report bodies that are read but not yet acknowledged: beyond it the answer is 503. A running run that is silent
    for `stale_after_seconds` is stale. The sealer pauses for `seal_interval_seconds` when it has nothing to do. The
    server ends within `shutdown_seconds`: half for requests under way, the rest to commit and close. The last
    `archive_cache_bytes` read from a bucket stay on this machine's disk.

    `journal_run_bytes` and `journal_bytes` bound the reports of one run, and of all, that wait to be sealed into
    chunks: beyond them the answer is 429. A reader takes all waiting reports of a run into memory.
    `tags_per_project` and `layers_per_project` stop a script that runs away sooner than `runs_per_project` would.
    """

    connections: int = 1000
    idle_seconds: float = 10.0
    in_flight_bytes: int = 128 * 2**20
    stale_after_seconds: float = 600.0
    seal_interval_seconds: float = 5.0
    shutdown_seconds: float = 10.0
    archive_cache_bytes: int = 2 * 2**30
    journal_run_bytes: int = 128 * 2**20
    journal_bytes: int = 2**30
    tags_per_project: int = 10_000
    layers_per_project: int = 5_000_000


FIXED_LIMITS: Final = FixedLimits()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be set, with its default. Sizes in bytes, times in seconds.

    `database` is a postgresql:// URL; without one, SQLite in `folder`. `unsafe_database` accepts a database that
    may lose acknowledged reports. `archive` is where layers of older points lie as Parquet files: a folder, the URL
    of a bucket, or "off". Left out it is the folder `archive` beside an SQLite file, and off for PostgreSQL, which
    several servers may share. With `archive_publish` the server publishes runs that have ended, as
    `archive publish` does. `token` guards every route but /healthz, /readyz and the API description. `no_auth` does
    without one, on loopback only.
    `allowed_hosts` are the names, besides loopback's, under which the server answers; beyond it they must be
    stated. `trusted_proxies` are addresses whose X-Forwarded-For gives the client's address.

    `memory` is what the whole server may take (docs/server.md says by whom), 256M at least; None: half of what its
    control group or the machine has, from 512M to 4G.

    `alerts` says which entries of the catalogue this server evaluates, every `alert_interval_seconds`: those on by
    default, these and all from a severity on, or none. Messages go to `alert_webhook` (JSON), `alert_slack`, and by
    e-mail through `alert_smtp` to `alert_email`, whose first address is the sender, too. Each leads to the
    incident's page, if `dashboard_url` says where people reach the dashboard.

    With `oidc_issuer`, people sign in to the dashboard (at `dashboard_url`) through that provider, where this
    server is the client `oidc_client_id` with `oidc_client_secret`. `oidc_roles` says what members of which group
    may (`grants_by_group`). Groups stand in the claim `oidc_groups_claim` of the ID token; `oidc_scopes` ask for
    it. A session ends after `session_seconds`.

    `retention_raw_days` is how long single measured points are kept, `retention_coarse_days` how long points of 16,
    both for good when None; points of 256 always are. `retention_event_days` is how long incidents that have ended,
    events of runs, and silences that are over are kept; open ones and people's notes always are.
    `retention_audit_days` is how long the audit log is kept. Beyond `disk_budget_bytes` of data, or with less than
    `disk_reserve_bytes` left on the disk, the server reads only.
    """

    folder: Path
    database: _Database | None = field(default=None, repr=False)
    unsafe_database: _Flag = False
    archive: _Archive | None = None
    archive_publish: _Flag = False
    host: str = "127.0.0.1"
    port: _Port = SERVER_PORT
    token: _Token | None = field(default=None, repr=False)
    no_auth: _Flag = False
    allowed_hosts: _Names = ()
    trusted_proxies: _Names = ()
    memory: _Size | None = None
    runs_per_project: _Count = 10_000
    retention_raw_days: _Number | None = None
    retention_coarse_days: _Number | None = None
    retention_event_days: _Number | None = None
    retention_audit_days: _Number | None = None
    disk_budget_bytes: _Count | None = None
    disk_reserve_bytes: _Count = 512 * 2**20
    alerts: _Alerts = "default"
    alert_interval_seconds: _Number = 15.0
    alert_webhook: WebAddress | None = field(default=None, repr=False)
    alert_slack: WebAddress | None = field(default=None, repr=False)
    alert_smtp: _MailServer | None = field(default=None, repr=False)
    alert_email: _MailAddresses | None = None
    dashboard_url: WebAddress | None = None
    oidc_issuer: WebAddress | None = None
    oidc_client_id: _Word | None = None
    oidc_client_secret: _Word | None = field(default=None, repr=False)
    oidc_roles: str | None = None
    oidc_groups_claim: _Word = "groups"
    oidc_scopes: _Scopes = "openid profile"
    session_seconds: _Number = 43_200.0
    log_format: _LogFormat = "text"
    log_level: _LogLevel = "info"

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            object.__setattr__(self, name, _read(name, getattr(self, name), kind))
        if not self.token and not self.no_auth:
            raise SettingsError("no token: pass --token-file, or --no-auth to serve this machine alone without one")
        if self.no_auth and self.host not in LOOPBACK_HOSTS:
            raise SettingsError(
                f"--no-auth serves loopback only, not host {self.host!r}; pass --token-file instead"
            )
        if self.host not in LOOPBACK_HOSTS and not self.allowed_hosts:
            raise SettingsError(
                f"host {self.host!r} listens beyond this machine: any web page could reach it through a rebound "
                f"name; list the server's own names with --allowed-host or {_variable('allowed_hosts')}"
            )
        if self.token and _most_bits(self.token) < _LEAST_BITS:
            raise SettingsError(
                f"{_variable('token')} is too weak: its characters hold {_most_bits(self.token):.0f} bits at most, "
                f"{_LEAST_BITS} are asked for; make one with: openssl rand -base64 32"
            )
        if self.memory is not None and _bytes_of(self.memory) < _LEAST_MEMORY:
            raise SettingsError(
                f"{_variable('memory')}={self.memory} is too little: an idle server takes 128M; set 256M or more"
            )
        raw, coarse = self.retention_raw_days, self.retention_coarse_days
        if coarse is not None and (raw is None or raw > coarse):
            raise SettingsError(
                f"{_variable('retention_coarse_days')} is {coarse}, but fine points are kept for "
                f"{'good' if raw is None else f'{raw} days'}; keep them no longer than points of 16, with "
                f"{_variable('retention_raw_days')}"
            )
        _check_oidc(self)

    @property
    def archive_address(self) -> str | None:
        """Where archived files lie; None where nothing is archived."""
        if self.archive is None:
            return str(self.folder / "archive") if self.database is None else None
        return None if self.archive == "off" else self.archive

    @property
    def memory_bytes(self) -> int | None:
        """`memory` as bytes."""
        return None if self.memory is None else _bytes_of(self.memory)

    @property
    def retention_days(self) -> dict[int, float]:
        """Days by level of those levels that are not kept for good."""
        days = {1: self.retention_raw_days, 16: self.retention_coarse_days}
        return {level: kept for level, kept in days.items() if kept is not None}

    def masked(self) -> dict[str, Any]:
        """Every setting as plain JSON values; secrets are masked."""
        values = dataclasses.asdict(self)
        return {name: "***" if name in _SECRET and value else masked(value) for name, value in values.items()}


def _bytes_of(size: str) -> int:
    number, unit = (size[:-1], size[-1]) if size[-1] in _UNITS else (size, "")
    return int(number) * _UNITS.get(unit, 1)


def _most_bits(token: str) -> float:
    """Bits that a token of these characters can hold."""
    return len(token) * math.log2(max(len(set(token)), 1))


_FOR_PEOPLE: Final[tuple[wire.Role, ...]] = ("read", "operate", "admin")
_OIDC: Final = ("oidc_issuer", "oidc_client_id", "oidc_client_secret", "oidc_roles")


def grants_by_group(text: str) -> dict[str, list[wire.Grant]]:
    """The grants of each group, from "admins=admin; team-a=operate:vision,speech; *=read".

    A group may have several entries; `*` is everybody whom the provider lets in.

    Raises:
        SettingsError: an entry is not of that form, or nothing is there.
    """
    found: dict[str, list[wire.Grant]] = {}
    for entry in filter(None, map(str.strip, text.split(";"))):
        # The last one: names of groups in a directory have some, cn=team-a,ou=groups.
        group, _, given = map(str.strip, entry.rpartition("="))
        name, colon, listed = map(str.strip, given.partition(":"))
        projects = [project for project in map(str.strip, listed.split(",")) if project]
        role = next((known for known in _FOR_PEOPLE if known == name), None)
        if not group or role is None or bool(colon) != bool(projects) or (role == "admin" and projects):
            raise SettingsError(
                f"{_variable('oidc_roles')}: {entry!r} must be GROUP=ROLE, or GROUP=ROLE:PROJECT,PROJECT, with a "
                f"role of {', '.join(_FOR_PEOPLE)}; admin is for every project, and ingest for tokens alone"
            )
        found.setdefault(group, []).append(wire.Grant(role=role, projects=projects or None))
    if not found:
        raise SettingsError(f"{_variable('oidc_roles')} gives nobody a role; set it as *=read")
    return found


def _check_oidc(settings: Settings) -> None:
    """Check that the OpenID settings are complete, and that no secret would travel unencrypted.

    Raises:
        SettingsError: which setting is missing or unsafe, and what to set.
    """
    stated = [name for name in _OIDC if getattr(settings, name) is not None]
    if not stated:
        return
    for name in (*_OIDC, "dashboard_url"):
        if getattr(settings, name) is None:
            raise SettingsError(
                f"{_variable(stated[0])} is set, but {_variable(name)} is not: set it, too (docs/access.md says to "
                "what), or unset all that begin with COLLAGE_SERVER_OIDC_"
            )
    for name in ("oidc_issuer", "dashboard_url"):
        address = str(getattr(settings, name))
        if not address.lower().startswith("https:") and not is_loopback(address):
            raise SettingsError(
                f"{_variable(name)}={address!r} must be an https:// address: plain http shows who signs in"
            )
    if settings.no_auth:
        raise SettingsError(
            f"{_variable(stated[0])} lets people sign in, and --no-auth asks nobody to; leave one of them out"
        )
    grants_by_group(str(settings.oidc_roles))


_KINDS: Final = kinds_of(Settings)


def _read(name: str, value: Any, kind: Any, *, is_text: bool = False) -> Any:
    # A database's address may hold a password, too.
    secret = name in _SECRET or name == "database"
    return read_setting(_variable(name), value, kind, is_text=is_text, secret=secret)


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def settings_from_environment(
    environment: Mapping[str, str] | None = None, own_token: Callable[[Path], str] | None = None, **flags: Any
) -> Settings:
    """Settings from COLLAGE_SERVER_NAME variables; a flag that is not None wins.

    Without a folder it is the user's data folder. `own_token` gives the folder's token, if none is set and one is
    required.

    Raises:
        SettingsError: a variable that cannot be read as its setting's type, or an unsafe combination.
    """
    values = os.environ if environment is None else environment
    given: dict[str, Any] = {}
    known = {_variable(name): name for name in _KINDS}
    for variable, text in values.items():
        if variable in known:
            name = known[variable]
            given[name] = _read(name, text if name == "token" else text.strip(), _KINDS[name], is_text=True)
        elif variable.startswith(_PREFIX) and variable != _NOT_OURS:
            raise SettingsError(
                f"{variable} is no setting; unset it, then `collage-monitor serve --print-settings` lists them all"
            )
    given.update({name: value for name, value in flags.items() if value is not None})
    given["folder"] = data_folder(given.get("folder"), values)
    if own_token is not None and not given.get("token") and not given.get("no_auth"):
        given["token"] = own_token(given["folder"])
    return Settings(**given)


def settings_beside_server(folder: Path | None) -> Settings:
    """The server's settings, for a verb that works on its data and asks for no token; a setting needs one."""
    return settings_from_environment(own_token=lambda _: secrets.token_urlsafe(32), folder=folder, host="127.0.0.1")
