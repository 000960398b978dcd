"""What a run is told: arguments of `init` over the environment over defaults, as one frozen value.

An argument that makes no sense raises ValueError; an environment variable that makes no sense is named in one log
line and its default is used, so that a stray variable never stops a training job.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from collage_agent.options import DEFAULTS, WatchOptions, default, is_default, plain
from collage_monitor.local import DEFAULT_SERVER_URL, data_folder, find_token, server_address
from collage_monitor.wire import LIMITS

__all__ = [
    "DEFAULT_MODE",
    "NO_TAGS",
    "DeliveryLimits",
    "Mode",
    "Resume",
    "Settings",
    "read_settings",
    "watch_defaults",
]

Mode = Literal["online", "offline", "disabled"]
Resume = Literal["allow", "must", "never"]
_Value = TypeVar("_Value")

_LOG = logging.getLogger("collage_agent")
DEFAULT_PROJECT: Final = "default"
DEFAULT_MODE: Final[Mode] = default("online")
NO_TAGS: Final[tuple[str, ...]] = default(())
_WORDS: Final = f"pass a text of 1 to {LIMITS['name_characters']} characters"
_NAME: Final = Meta(min_length=1, max_length=LIMITS["name_characters"])
_TYPES: Final[dict[str, tuple[Any, str]]] = {
    "project": (Annotated[str, _NAME, Meta(pattern=r"^(?!\.{1,2}\Z)")], _WORDS),
    "name": (Annotated[str, _NAME], _WORDS),
    "group": (Annotated[str, _NAME], _WORDS),
    "run_id": (
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}\Z")],
        "pass 1 to 64 letters, digits, '_', '.', ':' or '-', the first a letter or digit",
    ),
    "resume": (Resume, "choose one of 'allow', 'must', 'never'"),
    "mode": (Mode, "choose one of 'online', 'offline', 'disabled'"),
    "tags": (
        Annotated[tuple[Annotated[str, _NAME], ...], Meta(max_length=LIMITS["tags_per_run"])],
        f"pass a list of at most {LIMITS['tags_per_run']} texts",
    ),
    "notes": (Annotated[str, Meta(max_length=65_536)], "pass a text of at most 65536 characters"),
    "seed": (Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)], "pass a 64-bit integer or None"),
    "token": (
        Annotated[str, Meta(pattern=r"^[!-~]+\Z")],
        "pass the printable ASCII text that the server gave out, without spaces",
    ),
}
"""What each argument must be, and what to pass where it is not."""


@dataclass(frozen=True)
class DeliveryLimits:
    """How much the delivering side may hold, and how long it may wait."""

    queue_steps: int = 2_000
    queue_bytes: int = 64 * 2**20
    batch_reports: int = 500
    batch_bytes: int = 4 * 2**20
    spool_bytes: int = 2**30
    linger_seconds: float = 0.5
    """Reports wait this long for company, so that fast loops make few requests."""
    step_seconds: float = 5.0
    """The newest step waits this long for more that is told of it, so that one step makes one report."""
    connect_timeout_seconds: float = 2.0
    answer_timeout_seconds: float = 10.0
    retry_seconds: float = 3.0
    """A request is repeated for this long; then its reports go to the spool."""
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 30.0
    """Between tries while the server is away; the pause doubles from the first to the longest."""
    finish_seconds: float = 20.0


@dataclass(frozen=True)
class Settings:
    """Everything that one run was told; the token never shows in its text."""

    project: str
    name: str | None
    run_id: str | None
    resume: Resume
    group: str | None
    tags: tuple[str, ...]
    notes: str
    seed: int | None
    config: dict[str, Any]
    server_url: str | None
    """None: a local server, if one answers."""
    explicit_token: str | None = field(repr=False)
    mode: Mode
    folder: Path
    limits: DeliveryLimits = DeliveryLimits()

    @property
    def address(self) -> str:
        """Where reports are sent in online mode, without a trailing slash."""
        return self.server_url or server_address()

    @property
    def token(self) -> str | None:
        """The given token, else that of a server on this machine, which may come later."""
        return self.explicit_token or find_token(self.address, self.folder)


def read_settings(
    environment: Mapping[str, str] | None = None,
    *,
    project: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    resume: Resume = "allow",
    group: str | None = None,
    tags: Iterable[str] = NO_TAGS,
    notes: str = "",
    seed: int | None = None,
    config: object = None,
    server_url: str | None = None,
    token: str | None = None,
    mode: Mode = DEFAULT_MODE,
    folder: str | Path | None = None,
) -> Settings:
    """Settings from arguments and environment. Whatever was passed wins; a default gives way to the environment.

    Raises:
        ValueError: an argument cannot be used; the message names it, its value and what is expected.
    """
    values = os.environ if environment is None else environment

    def chosen(what: str, variable: str, given: Any, otherwise: Any, read: Callable[[str], Any] = str) -> Any:
        if given is not None and not is_default(given):
            return _checked(what, given)
        return _from(values, variable, lambda text: _checked(what, read(text)), otherwise)

    return Settings(
        project=chosen("project", "PROJECT", project, DEFAULT_PROJECT),
        name=chosen("name", "RUN_NAME", name, None),
        run_id=chosen("run_id", "RUN_ID", run_id, None),
        resume=_checked("resume", resume),
        group=chosen("group", "RUN_GROUP", group, None),
        tags=chosen("tags", "TAGS", tags, (), _split),
        notes=_checked("notes", notes),
        seed=None if seed is None else _checked("seed", seed),
        config=_config(config),
        server_url=chosen("server_url", "SERVER_URL", server_url, None),
        explicit_token=chosen("token", "TOKEN", token, None),
        mode=chosen("mode", "MODE", mode, plain(DEFAULT_MODE)),
        folder=data_folder(folder, values),
    )


def watch_defaults(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What COLLAGE_EVERY, COLLAGE_SAMPLE and COLLAGE_BUDGET ("none": no governor) put in the place of defaults."""
    values = os.environ if environment is None else environment
    readers: dict[str, Callable[[str], Any]] = {
        "EVERY": int,
        "SAMPLE": lambda text: "all" if text == "all" else int(text),
        "BUDGET": lambda text: None if text.lower() == "none" else float(text),
    }
    found: dict[str, Any] = {}
    for variable, read in readers.items():
        name = variable.lower()
        found[name] = _from(values, variable, _option(name, read), plain(DEFAULTS[name]))
    return found


def _option(name: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Reads a text as an option of `watch`, and checks it as one."""
    return lambda text: getattr(WatchOptions(**{name: read(text)}), name)


def _from(values: Mapping[str, str], name: str, read: Callable[[str], _Value], otherwise: _Value) -> _Value:
    text = values.get(f"COLLAGE_{name}", "").strip()
    if not text:
        return otherwise
    try:
        return read(text)
    except ValueError as error:
        _LOG.warning("environment variable COLLAGE_%s ignored: %s", name, error)
        return otherwise


def _checked(what: str, value: Any) -> Any:
    """The value, if it is what the table says.

    Raises:
        ValueError: it is not.
    """
    if what == "server_url":
        return _url(value)
    kind, wanted = _TYPES[what]
    try:
        if what == "tags" and not isinstance(value, str):
            value = tuple(value)
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError):
        # A token's value is a secret and stays out of messages.
        shown = what if what == "token" else f"{what}={value!r:.200}"
        raise ValueError(f"{shown}: {wanted}") from None


def _url(value: object) -> str:
    parts = urlsplit(value) if isinstance(value, str) else urlsplit("")
    if parts.username is not None or parts.password is not None:
        # Addresses are printed, secrets are not.
        raise ValueError("server_url: leave user and password out of the address, and pass token=")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"server_url={value!r}: pass an address such as {DEFAULT_SERVER_URL}")
    return cast(str, value).rstrip("/")


def _split(text: str) -> tuple[str, ...]:
    return tuple(tag.strip() for tag in text.split(",") if tag.strip())


def _config(value: object) -> dict[str, Any]:
    """The configuration as plain data: anything without a JSON form is kept as its text."""
    if value is None:
        return {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    elif not isinstance(value, Mapping) and hasattr(value, "__dict__"):
        value = vars(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"config={value!r}: pass a mapping, a dataclass or a namespace")
    plain = {str(key): _plain(entry) for key, entry in value.items()}
    size = len(msgspec.json.encode(plain))
    if size > LIMITS["config_bytes"]:
        raise ValueError(f"config takes {size} bytes as JSON, at most {LIMITS['config_bytes']} are kept")
    return plain


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, float):
        return float(value) if abs(value) < float("inf") else str(float(value))
    return str(value)
