"""Settings of a run. Arguments of `init` win over the environment, which wins over defaults.

An argument that makes no sense raises ValueError; an environment variable that makes no sense is named in one log
line and its default is used, so that a stray variable never stops a training job.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from collage_agent.options import WatchOptions
from collage_monitor.environment import VARIABLES
from collage_monitor.local import DEFAULT_SERVER_URL, data_folder, find_token, server_address
from collage_monitor.wire import LIMITS

__all__ = ["DeliveryLimits", "Mode", "Resume", "Settings", "read_settings", "watch_defaults"]

Mode = Literal["online", "offline", "disabled"]
Resume = Literal["allow", "must", "never"]

_LOG = logging.getLogger("collage_agent")


@dataclass(frozen=True)
class _Argument:
    """What an argument of `init` must be, what to pass where it is not, and what stands for it if it is left out.

    read: how the text of its environment variable is read, if it has one.
    """

    kind: Any
    wanted: str
    default: Any = None
    read: Callable[[str], Any] = str


def _tags(text: str) -> tuple[str, ...]:
    return tuple(tag.strip() for tag in text.split(",") if tag.strip())


_NAME: Final = Meta(min_length=1, max_length=LIMITS["name_characters"])
_WORDS: Final = f"pass a text of 1 to {LIMITS['name_characters']} characters"
_ARGUMENTS: Final = {
    "project": _Argument(Annotated[str, _NAME, Meta(pattern=r"^(?!\.{1,2}\Z)")], _WORDS, default="default"),
    "name": _Argument(Annotated[str, _NAME], _WORDS),
    "run_id": _Argument(
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}\Z")],
        "pass 1 to 64 letters, digits, '_', '.', ':' or '-', the first a letter or digit",
    ),
    "group": _Argument(Annotated[str, _NAME], _WORDS),
    "tags": _Argument(
        Annotated[tuple[Annotated[str, _NAME], ...], Meta(max_length=LIMITS["tags_per_run"])],
        f"pass a list of at most {LIMITS['tags_per_run']} texts",
        default=(),
        read=_tags,
    ),
    "mode": _Argument(Mode, "choose one of 'online', 'offline', 'disabled'", default="online"),
    "server_url": _Argument(str, f"pass an address such as {DEFAULT_SERVER_URL}"),
    "token": _Argument(
        Annotated[str, Meta(pattern=r"^[!-~]+\Z")],
        "pass the printable ASCII text that the server gave out, without spaces",
    ),
    "resume": _Argument(Resume, "choose one of 'allow', 'must', 'never'", default="allow"),
    "notes": _Argument(
        Annotated[str, Meta(max_length=65_536)], "pass a text of at most 65536 characters", default=""
    ),
    "seed": _Argument(Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)], "pass a 64-bit integer or None"),
}
"""Of `init`, all but `config`, `dir` and `transport`."""
_WATCH_ARGUMENTS: Final[dict[str, Callable[[str], Any]]] = {
    "every": int,
    "sample": lambda text: "all" if text == "all" else int(text),
    "budget": lambda text: None if text.lower() == "none" else float(text),
}
"""Of `watch`, with how the text of COLLAGE_EVERY and so on is read."""


@dataclass(frozen=True)
class DeliveryLimits:
    """How much the delivering side may hold, and how long it may wait."""

    queue_steps: int = 20_000
    queue_bytes: int = 64 * 2**20
    batch_reports: int = 500
    batch_bytes: int = 4 * 2**20
    spool_bytes: int = 2**30
    linger_seconds: float = 0.5
    """Reports wait this long for others, so that fast loops make few requests."""
    step_seconds: float = 5.0
    """The newest step waits this long for more data of its own, so that one step makes one report."""
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
    """All settings of one run, frozen; `repr` leaves the token out."""

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


def read_settings(environment: Mapping[str, str] | None = None, **given: Any) -> Settings:
    """Settings from arguments of `init` and the environment. Whatever was passed, and is not None, wins.

    Raises:
        ValueError: an argument cannot be used; the message names it, its value and what is expected.
    """
    values = os.environ if environment is None else environment
    config, folder = _config(given.pop("config", None)), data_folder(given.pop("dir", None), values)
    found: dict[str, Any] = {}
    for name, entry in _ARGUMENTS.items():
        value = given.pop(name, None)
        if value is not None:
            found[name] = _checked(name, value)
        elif name not in VARIABLES:
            found[name] = entry.default
        else:
            found[name] = _from(values, name, entry.read, _checked, entry.default)
    if given:
        raise TypeError(f"init() has no argument {', '.join(given)}")
    return Settings(explicit_token=found.pop("token"), config=config, folder=folder, **found)


def watch_defaults(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What COLLAGE_EVERY, COLLAGE_SAMPLE and COLLAGE_BUDGET ("none": no governor) put in the place of defaults."""
    values = os.environ if environment is None else environment
    default = WatchOptions()

    def checked(name: str, value: Any) -> Any:
        return getattr(WatchOptions(**{name: value}), name)

    return {
        name: _from(values, name, read, checked, getattr(default, name)) for name, read in _WATCH_ARGUMENTS.items()
    }


def _from(
    values: Mapping[str, str],
    name: str,
    read: Callable[[str], Any],
    check: Callable[[str, Any], Any],
    otherwise: Any,
) -> Any:
    """The value that the environment has for an argument; `otherwise` where it has none that can be used."""
    text = values.get(VARIABLES[name], "").strip()
    if not text:
        return otherwise
    try:
        return check(name, read(text))
    except ValueError as error:
        _LOG.warning("environment variable %s ignored: %s", VARIABLES[name], error)
        return otherwise


def _checked(name: str, value: Any) -> Any:
    """The value, if it is what the table says.

    Raises:
        ValueError: it is not.
    """
    entry = _ARGUMENTS[name]
    if name == "server_url":
        return _url(value, entry.wanted)
    try:
        if name == "tags" and not isinstance(value, str):
            value = tuple(value)
        return msgspec.convert(value, entry.kind)
    except (msgspec.ValidationError, TypeError):
        # A token's value is a secret and stays out of messages.
        shown = name if name == "token" else f"{name}={value!r:.200}"
        raise ValueError(f"{shown}: {entry.wanted}") from None


def _url(value: object, wanted: str) -> str:
    parts = urlsplit(value) if isinstance(value, str) else urlsplit("")
    if parts.username is not None or parts.password is not None:
        # Addresses are printed, secrets are not.
        raise ValueError("server_url: leave user and password out of the address, and pass token=")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"server_url={value!r}: {wanted}")
    return cast(str, value).rstrip("/")


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
