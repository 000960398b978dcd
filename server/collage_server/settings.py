"""Settings of the server: one frozen object, from environment and flags."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from collage_monitor.errors import CollageError
from collage_monitor.local import SERVER_PORT
from collage_monitor.wire import LIMITS

__all__ = ["LOOPBACK_HOSTS", "Settings", "SettingsError", "settings_from_environment"]

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})
_PREFIX = "COLLAGE_SERVER_"
_SECRET = frozenset({"token"})
_POSITIVE = (
    "body_bytes",
    "in_flight_bytes",
    "commit_bytes",
    "seal_interval_seconds",
    "stale_after_seconds",
    "shutdown_seconds",
    "busy_timeout_seconds",
    "runs_per_project",
    "tags_per_project",
    "layers_per_project",
)


class SettingsError(CollageError, ValueError):
    """A setting that is missing, malformed, or unsafe in its combination."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be set, with its default. Sizes in bytes, times in seconds.

    `token` guards every route but /healthz, /readyz and the API description. `no_auth` does without one, on
    loopback only. `in_flight_bytes` bounds the report bodies that are read but not yet acknowledged: beyond it
    the answer is 503.
    """

    folder: Path
    host: str = "127.0.0.1"
    port: int = SERVER_PORT
    token: str | None = field(default=None, repr=False)
    no_auth: bool = False
    body_bytes: int = LIMITS["body_bytes"]
    in_flight_bytes: int = 128 * 2**20
    commit_bytes: int = 16 * 2**20
    stale_after_seconds: float = 600.0
    seal_interval_seconds: float = 5.0
    shutdown_seconds: float = 10.0
    busy_timeout_seconds: float = 30.0
    runs_per_project: int = 10_000
    tags_per_project: int = 10_000
    layers_per_project: int = 5_000_000

    def __post_init__(self) -> None:
        if self.token is None and not self.no_auth:
            raise SettingsError("no token: pass --token-file, or --no-auth to serve this machine alone without one")
        if self.no_auth and self.host not in LOOPBACK_HOSTS:
            raise SettingsError(
                f"--no-auth serves loopback only, not host {self.host!r}; pass --token-file instead"
            )
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} must be positive, not {getattr(self, name)}")

    def masked(self) -> dict[str, Any]:
        """Every setting as plain JSON values; secrets are masked."""
        values = dataclasses.asdict(self)
        return {
            name: "***" if name in _SECRET and value else str(value) if isinstance(value, Path) else value
            for name, value in values.items()
        }


def settings_from_environment(environment: Mapping[str, str] | None = None, **flags: Any) -> Settings:
    """Settings from COLLAGE_SERVER_NAME variables; a flag that is not None wins.

    Raises:
        SettingsError: a variable that cannot be read as its setting's type, or an unsafe combination.
    """
    values = os.environ if environment is None else environment
    hints = typing.get_type_hints(Settings)
    given: dict[str, Any] = {}
    for name in (entry.name for entry in dataclasses.fields(Settings)):
        text = values.get(_PREFIX + name.upper())
        if text is not None:
            given[name] = _read(name, text, hints[name])
    given.update({name: value for name, value in flags.items() if value is not None})
    return Settings(**given)


def _read(name: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind is not type(None))
    if kind is bool:
        if text.lower() in {"1", "true", "yes", "on"}:
            return True
        if text.lower() in {"0", "false", "no", "off", ""}:
            return False
        raise SettingsError(f"{_PREFIX}{name.upper()}={text!r} is not a yes or no; set 1 or 0")
    try:
        return kind(text)
    except ValueError as error:
        raise SettingsError(f"{_PREFIX}{name.upper()}={text!r} is not a {kind.__name__}") from error
