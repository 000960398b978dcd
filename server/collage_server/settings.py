"""Settings of the server: one frozen object, from environment and flags."""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from collage_monitor.errors import CollageError
from collage_monitor.local import SERVER_PORT, data_folder
from collage_monitor.wire import LIMITS

__all__ = ["LOOPBACK_HOSTS", "Settings", "SettingsError", "settings_from_environment"]

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})
_PREFIX = "COLLAGE_SERVER_"
_NOT_OURS = "COLLAGE_SERVER_URL"
_SECRET = frozenset({"token"})
_IN_ADDRESS = re.compile(r"(://[^/@\s:]*:)\S*@")
_IN_QUERY = re.compile(r"(\b(?:ssl)?password=)[^&\s]*", re.IGNORECASE)
_KINDS = {int: "a whole number", float: "a number"}
_POSITIVE = (
    "body_bytes",
    "decompressed_bytes",
    "in_flight_bytes",
    "journal_run_bytes",
    "journal_bytes",
    "commit_bytes",
    "answer_cache_bytes",
    "seal_interval_seconds",
    "stale_after_seconds",
    "shutdown_seconds",
    "busy_timeout_seconds",
    "runs_per_project",
    "tags_per_project",
    "layers_per_project",
    "retention_raw_days",
    "retention_coarse_days",
    "disk_budget_bytes",
    "disk_reserve_bytes",
)


class SettingsError(CollageError, ValueError):
    """A setting that is missing, malformed, or unsafe in its combination."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be set, with its default. Sizes in bytes, times in seconds.

    `database` is a postgresql:// URL; without one, SQLite in `folder`. `unsafe_database` accepts one that
    may lose what was acknowledged. `token` guards every route but /healthz, /readyz and the API description.
    `no_auth` does without one, on loopback only. `in_flight_bytes` bounds the report bodies that are read but not
    yet acknowledged: beyond it the answer is 503.

    `journal_run_bytes` and `journal_bytes` bound the reports of one run, and of all, that wait to be sealed into
    chunks: beyond them the answer is 429. A reader takes all that waits of a run into memory.

    `retention_raw_days` is how long single measured points are kept, `retention_coarse_days` how long points of 16,
    both for good when None; points of 256 always are. Beyond `disk_budget_bytes` of data, or with less than
    `disk_reserve_bytes` left on the disk, the server reads only.
    """

    folder: Path
    database: str | None = field(default=None, repr=False)
    unsafe_database: bool = False
    host: str = "127.0.0.1"
    port: int = SERVER_PORT
    token: str | None = field(default=None, repr=False)
    no_auth: bool = False
    body_bytes: int = LIMITS["body_bytes"]
    decompressed_bytes: int = 64 * 2**20
    in_flight_bytes: int = 128 * 2**20
    journal_run_bytes: int = 128 * 2**20
    journal_bytes: int = 2**30
    commit_bytes: int = 16 * 2**20
    answer_cache_bytes: int = 64 * 2**20
    stale_after_seconds: float = 600.0
    seal_interval_seconds: float = 5.0
    shutdown_seconds: float = 10.0
    busy_timeout_seconds: float = 30.0
    runs_per_project: int = 10_000
    tags_per_project: int = 10_000
    layers_per_project: int = 5_000_000
    retention_raw_days: float | None = None
    retention_coarse_days: float | None = None
    disk_budget_bytes: int | None = None
    disk_reserve_bytes: int = 512 * 2**20
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        if not self.token and not self.no_auth:
            raise SettingsError("no token: pass --token-file, or --no-auth to serve this machine alone without one")
        if self.token and (self.token.split() != [self.token] or not self.token.isascii()):
            raise SettingsError(
                f"{_variable('token')} must be one word of ASCII characters, without white space around it: no "
                "request could carry it"
            )
        if self.no_auth and self.host not in LOOPBACK_HOSTS:
            raise SettingsError(
                f"--no-auth serves loopback only, not host {self.host!r}; pass --token-file instead"
            )
        if self.database is not None and not self.database.startswith(("postgresql://", "postgresql+psycopg://")):
            # The value may hold a password and stays out of messages.
            raise SettingsError(
                f"{_variable('database')} must be postgresql://USER@HOST/NAME; leave it out for SQLite in a file"
            )
        if not 0 <= self.port < 65_536:
            raise SettingsError(f"{_variable('port')} must be from 0 to 65535, not {self.port}; 0 takes a free one")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SettingsError(
                    f"{_variable(name)} must be positive and finite, not {value}; unset it for the default"
                )
        raw, coarse = self.retention_raw_days, self.retention_coarse_days
        if coarse is not None and (raw is None or raw > coarse):
            raise SettingsError(
                f"{_variable('retention_coarse_days')} is {coarse}, but single points are kept for "
                f"{'good' if raw is None else f'{raw} days'}; keep them no longer than points of 16, with "
                f"{_variable('retention_raw_days')}"
            )

    @property
    def retention_days(self) -> dict[int, float]:
        """Days by level of those levels that are not kept for good."""
        days = {1: self.retention_raw_days, 16: self.retention_coarse_days}
        return {level: kept for level, kept in days.items() if kept is not None}

    def masked(self) -> dict[str, Any]:
        """Every setting as plain JSON values; secrets are masked."""
        return {name: _shown(name, value) for name, value in dataclasses.asdict(self).items()}


def _shown(name: str, value: Any) -> Any:
    if name in _SECRET and value:
        return "***"
    if isinstance(value, str):
        return _IN_QUERY.sub(r"\1***", _IN_ADDRESS.sub(r"\1***@", value))
    return str(value) if isinstance(value, Path) else value


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def settings_from_environment(
    environment: Mapping[str, str] | None = None, own_token: Callable[[Path], str] | None = None, **flags: Any
) -> Settings:
    """Settings from COLLAGE_SERVER_NAME variables; a flag that is not None wins.

    Without a folder it is the user's data folder. `own_token` gives the token that stands in the folder, where
    none is stated and one is asked for.

    Raises:
        SettingsError: a variable that cannot be read as its setting's type, or an unsafe combination.
    """
    values = os.environ if environment is None else environment
    hints = typing.get_type_hints(Settings)
    given: dict[str, Any] = {}
    known = {_variable(entry.name): entry.name for entry in dataclasses.fields(Settings)}
    for variable, text in values.items():
        if variable in known:
            given[known[variable]] = _read(variable, text, hints[known[variable]])
        elif variable.startswith(_PREFIX) and variable != _NOT_OURS:
            raise SettingsError(
                f"{variable} is no setting; unset it, then `collage-monitor serve --print-settings` lists them all"
            )
    given.update({name: value for name, value in flags.items() if value is not None})
    given["folder"] = data_folder(given.get("folder"), values)
    if own_token is not None and not given.get("token") and not given.get("no_auth"):
        given["token"] = own_token(given["folder"])
    return Settings(**given)


def _read(variable: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind is not type(None))
    if typing.get_origin(kind) is Literal:
        if text in typing.get_args(kind):
            return text
        raise SettingsError(f"{variable}={text!r}; set one of {', '.join(typing.get_args(kind))}")
    if kind is bool:
        if text.lower() in {"1", "true", "yes", "on"}:
            return True
        if text.lower() in {"0", "false", "no", "off", ""}:
            return False
        raise SettingsError(f"{variable}={text!r} is not a yes or no; set 1 or 0")
    try:
        return kind(text)
    except ValueError as error:
        raise SettingsError(
            f"{variable}={text!r} is not {_KINDS[kind]}; set one, or unset it for the default"
        ) from error
