"""Settings of a run. Arguments of `init` win over the environment, which wins over defaults.

An argument that makes no sense raises ValueError; an environment variable that makes no sense is named in one log
line and its default is used, so that a stray variable never stops a training job.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from collage_agent.watch_options import WatchOptions
from collage_monitor.environment import VARIABLES, unknown_variables
from collage_monitor.errors import CatalogueError
from collage_monitor.extensions import extensions
from collage_monitor.local import data_folder, find_token, server_address
from collage_monitor.setting_values import WebAddress, kinds_of, read_setting
from collage_monitor.wire import LIMITS

__all__ = [
    "DeliveryLimits",
    "Mode",
    "ROLE_ENDS",
    "Resume",
    "Settings",
    "is_second_writers",
    "read_settings",
    "watch_defaults",
]

Mode = Literal["online", "offline", "disabled"]
Resume = Literal["allow", "must", "never"]

ROLE_ENDS: Final = ":"
"""Ends the role with which the id of a second writer's stream begins; no other stream's has it."""

_LOG = logging.getLogger("collage_agent")


_CHARACTERS: Final = LIMITS["name_characters"]
_Name = Annotated[
    str, Meta(min_length=1, max_length=_CHARACTERS, description=f"a text of 1 to {_CHARACTERS} characters")
]
_Project = Annotated[_Name, Meta(pattern=r"^(?!\.{1,2}\Z)")]
_RunId = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}\Z",
        description="1 to 64 letters, digits, '_', '.', ':' or '-', the first a letter or digit",
    ),
]
_Tags = Annotated[
    tuple[_Name, ...],
    Meta(max_length=LIMITS["tags_per_run"], description=f"a list of at most {LIMITS['tags_per_run']} texts"),
]
_Mirrors = Annotated[
    tuple[Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]*(:.*)?\Z")], ...],
    Meta(max_length=16, description="a list of at most 16 names such as 'wandb' or 'tensorboard:logs'"),
]
_Role = Annotated[
    str,
    Meta(
        pattern=r"^[a-z][a-z0-9-]{0,23}\Z",
        description="'trainer', or a word of at most 24 lowercase letters, digits and '-', such as 'evaluator'",
    ),
]
_Notes = Annotated[str, Meta(max_length=65_536, description="a text of at most 65536 characters")]
_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a 64-bit integer or None")]
_Token = Annotated[
    str,
    Meta(pattern=r"^[!-~]+\Z", description="the printable ASCII text that the server gave out, without spaces"),
]
_Mode = Annotated[Mode, Meta(description="one of 'online', 'offline', 'disabled'")]
_Resume = Annotated[Resume, Meta(description="one of 'allow', 'must', 'never'")]
_OTHERS: Final = ("config", "folder", "limits")
"""Of `Settings`, what is read in a way of its own."""
_OF_THE_TRAINING: Final = ("name", "resume", "group", "tags", "notes", "seed", "config", "mirrors")
"""Arguments that say what a run is, and where else it is written: not for a second writer."""
_NOTHING_STATED: Final[tuple[Any, ...]] = (None, "", "allow", (), [], {})


def _number(text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is no {'whole ' if kind is int else ''}number") from None


_WATCH_ARGUMENTS: Final[dict[str, Callable[[str], Any]]] = {
    "every": partial(_number, kind=int),
    "sample": lambda text: "all" if text == "all" else _number(text, int),
    "budget": lambda text: None if text.lower() == "none" else _number(text, float),
    "expect": str,
    "on_breach": str,
}
"""Of `watch`, with how the text of COLLAGE_EVERY and so on is read."""


@dataclass(frozen=True)
class DeliveryLimits:
    """Limits on the memory and the waits of the delivering side."""

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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one run, frozen; `repr` leaves the token out."""

    project: _Project = "default"
    name: _Name | None = None
    run_id: _RunId | None = None
    resume: _Resume = "allow"
    group: _Name | None = None
    tags: _Tags = ()
    notes: _Notes = ""
    seed: _Seed | None = None
    mirrors: _Mirrors = ()
    server_url: WebAddress | None = None
    """None: a local server, if one answers."""
    explicit_token: _Token | None = field(default=None, repr=False)
    mode: _Mode = "online"
    role: _Role = "trainer"
    config: dict[str, Any] = field(default_factory=dict)
    folder: Path
    limits: DeliveryLimits = DeliveryLimits()

    @property
    def second_role(self) -> str | None:
        """The role of a process that writes to the run beside its training; None: it is the training."""
        return None if self.role == "trainer" else self.role

    @property
    def address(self) -> str:
        """Where reports are sent in online mode, without a trailing slash."""
        return self.server_url or server_address()

    @property
    def token(self) -> str | None:
        """The given token, else that of a server on this machine, which may come later."""
        return self.explicit_token or find_token(self.address, self.folder)


def read_settings(environment: Mapping[str, str] | None = None, **given: Any) -> Settings:
    """Settings from arguments of `init` and the environment. Arguments that are not None win.

    Raises:
        ValueError: an argument cannot be used; the message names it, its value and what is expected.
    """
    values = os.environ if environment is None else environment
    stated = [name for name in _OF_THE_TRAINING if given.get(name) not in _NOTHING_STATED]
    config, folder = _config(given.pop("config", None)), data_folder(given.pop("dir", None), values)
    readers = {name: partial(_read, name, kind) for name, kind in _KINDS.items()}
    for unknown, hint in unknown_variables(values).items():
        if hint:
            _LOG.warning("environment variable %s is not a variable of ours; %s", unknown, hint)
    found = _from_environment(values, {name: readers[name] for name in VARIABLES if name in readers})
    for name, read in readers.items():
        value = given.pop(name, None)
        if value is not None:
            several = name in {"tags", "mirrors"} and isinstance(value, Iterable) and not isinstance(value, str)
            found[name] = read(tuple(value) if several else value, is_text=False)
    if given:
        raise TypeError(f"init() has no argument {', '.join(given)}")
    settings = Settings(explicit_token=found.pop("token", None), config=config, folder=folder, **found)
    if settings.second_role is not None:
        _check_second_writer(settings, stated)
    return settings


def _check_second_writer(settings: Settings, stated: list[str]) -> None:
    if settings.run_id is None:
        raise ValueError(
            f"role={settings.role!r} writes to a run that a training began: pass its id as run_id=… (there: "
            "collage.current_run().run_id), or set COLLAGE_RUN_ID"
        )
    if stated:
        raise ValueError(f"role={settings.role!r} takes no {stated[0]}=…: the training states it; leave it out")


_KINDS: Final = {name.removeprefix("explicit_"): kind for name, kind in kinds_of(Settings, _OTHERS).items()}


def _read(name: str, kind: Any, value: Any, *, is_text: bool = True) -> Any:
    # A token's value is a secret and stays out of messages, as does who asks in an address.
    is_address = name == "server_url" and isinstance(value, str)
    secret = name == "token" or (is_address and "@" in value)
    value = read_setting(name, value, kind, is_text=is_text, secret=secret)
    if name == "mirrors":
        _check_mirrors(value)
    return value.rstrip("/") if is_address else value


def _check_mirrors(names: Iterable[str]) -> None:
    """Look up each mirror and its requirements, without importing them.

    Raises:
        ValueError: nothing installed has this name, or its package is absent; the message says what to do.
    """
    for name in (entry.partition(":")[0] for entry in names):
        try:
            known = extensions("collage_agent.mirrors")
        except CatalogueError as error:
            raise ValueError(f"mirrors: {error}") from error
        if name not in known:
            raise ValueError(f"mirrors={name!r}: there are {', '.join(known)}")
        package = known[name].package
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"mirrors={name!r} needs {package}, which is not installed: pip install {package}")


def is_second_writers(stream_id: str) -> bool:
    """Whether the stream is that of a process beside the training.

    Such ids sort behind the trainings', which begin with digits, so a training's files are sent first.
    """
    return ROLE_ENDS in stream_id


def watch_defaults(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the environment puts in the place of defaults: COLLAGE_EVERY, _SAMPLE, _BUDGET ("none": no governor),
    _EXPECT and _ON_BREACH."""

    def checked(name: str, text: str) -> Any:
        return getattr(WatchOptions(**{name: _WATCH_ARGUMENTS[name](text)}), name)

    values = os.environ if environment is None else environment
    return _from_environment(values, {name: partial(checked, name) for name in _WATCH_ARGUMENTS})


def _from_environment(values: Mapping[str, str], readers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Values from the environment for these arguments; unusable ones are named in a log line and left out."""
    found: dict[str, Any] = {}
    for name, read in readers.items():
        text = values.get(VARIABLES[name], "").strip()
        try:
            found.update({name: read(text)} if text else {})
        except ValueError as error:
            _LOG.warning("environment variable %s ignored: %s", VARIABLES[name], error)
    return found


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
