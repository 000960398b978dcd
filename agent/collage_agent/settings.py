"""What a run is told: arguments of `init` over the environment over defaults, as one frozen value.

An argument that makes no sense raises ValueError; an environment variable that makes no sense is named in one log
line and its default is used, so that a stray variable never stops a training job.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast, get_args
from urllib.parse import urlsplit

import msgspec

from collage_agent.options import WatchOptions
from collage_monitor.local import DEFAULT_SERVER_URL, data_folder, read_token
from collage_monitor.wire import LIMITS

__all__ = ["DeliveryLimits", "Mode", "Resume", "Settings", "is_loopback", "read_settings", "watch_defaults"]

Mode = Literal["online", "offline", "disabled"]
Resume = Literal["allow", "must", "never"]
_Value = TypeVar("_Value")

_LOG = logging.getLogger("collage_agent")
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
_TEXT_CHARACTERS: Final = 65_536
DEFAULT_PROJECT: Final = "default"


@dataclass(frozen=True)
class DeliveryLimits:
    """How much the delivering side may hold, and how long it may wait."""

    queue_items: int = 2_000
    queue_bytes: int = 64 * 2**20
    batch_reports: int = 500
    batch_bytes: int = 4 * 2**20
    spool_bytes: int = 2**30
    linger_seconds: float = 0.5
    """Reports wait this long for company, so that fast loops make few requests."""
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
        return self.server_url or DEFAULT_SERVER_URL

    @property
    def token(self) -> str | None:
        """The given token, else for a server on this machine the one in the data folder, which may come later."""
        return self.explicit_token or (read_token(self.folder) if is_loopback(self.address) else None)


def read_settings(
    environment: Mapping[str, str] | None = None,
    *,
    project: str | None,
    name: str | None,
    run_id: str | None,
    resume: str,
    group: str | None,
    tags: Iterable[str],
    notes: str,
    seed: int | None,
    config: object,
    server_url: str | None,
    token: str | None,
    mode: str,
    folder: str | Path | None,
) -> Settings:
    """Settings from arguments and environment. `mode` "online" is the default, so COLLAGE_MODE overrides it.

    Raises:
        ValueError: an argument cannot be used; the message names it, its value and what is expected.
    """
    values = os.environ if environment is None else environment
    return Settings(
        project=_project(project) or _from(values, "PROJECT", _required_project, DEFAULT_PROJECT),
        name=_name("name", name) or _from(values, "RUN_NAME", _required_name, None),
        run_id=_identifier("run_id", run_id) if run_id is not None else _from(values, "RUN_ID", _given_id, None),
        resume=_one_of("resume", resume, Resume),
        group=_name("group", group) or _from(values, "RUN_GROUP", _required_name, None),
        tags=_tags(tags) or _from(values, "TAGS", _split_tags, ()),
        notes=_notes(notes),
        seed=_seed(seed),
        config=_config(config),
        server_url=_url("server_url", server_url) if server_url else _from(values, "SERVER_URL", _given_url, None),
        explicit_token=_token(token) if token else _from(values, "TOKEN", _token, None),
        mode=_mode(values, mode),
        folder=data_folder(folder, values),
    )


def watch_defaults(environment: Mapping[str, str] | None = None) -> WatchOptions:
    """Defaults of `watch` after COLLAGE_EVERY, COLLAGE_SAMPLE and COLLAGE_BUDGET ("none": no governor)."""
    values = os.environ if environment is None else environment
    plain = WatchOptions()
    return WatchOptions(
        every=_from(values, "EVERY", lambda text: WatchOptions(every=int(text)).every, plain.every),
        sample=_from(values, "SAMPLE", _sample, plain.sample),
        budget=_from(values, "BUDGET", _budget, plain.budget),
    )


def is_loopback(url: str) -> bool:
    """Whether a URL points to this machine."""
    host = urlsplit(url).hostname or ""
    return host in {"localhost", "::1"} or host.startswith("127.")


def _from(values: Mapping[str, str], name: str, read: Callable[[str], _Value], default: _Value) -> _Value:
    text = values.get(f"COLLAGE_{name}", "").strip()
    if not text:
        return default
    try:
        return read(text)
    except ValueError as error:
        _LOG.warning("environment variable COLLAGE_%s ignored: %s", name, error)
        return default


def _mode(values: Mapping[str, str], mode: str) -> Mode:
    chosen = _one_of("mode", mode, Mode)
    return chosen if chosen != "online" else _from(values, "MODE", lambda text: _one_of("mode", text, Mode), chosen)


def _one_of(what: str, value: str, choices: Any) -> Any:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{what}={value!r}: choose one of {', '.join(map(repr, allowed))}")
    return value


def _name(what: str, value: object) -> str | None:
    if value is None:
        return None
    longest = LIMITS["name_characters"]
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        raise ValueError(f"{what}={value!r}: pass a text of 1 to {longest} characters")
    return value


def _project(value: object) -> str | None:
    project = _name("project", value)
    if project is not None and ("/" in project or project in {".", ".."}):
        raise ValueError(f"project={project!r}: it is one part of the server's addresses, leave slashes out")
    return project


def _required_project(text: str) -> str:
    return cast(str, _project(text))


def _required_name(text: str) -> str:
    return cast(str, _name("value", text))


def _identifier(what: str, value: object) -> str:
    if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
        raise ValueError(
            f"{what}={value!r}: pass 1 to 64 letters, digits, '_', '.', ':' or '-', the first a letter or digit"
        )
    return value


def _given_id(text: str) -> str:
    return _identifier("run_id", text)


def _url(what: str, value: object) -> str:
    parts = urlsplit(value) if isinstance(value, str) else urlsplit("")
    if parts.username is not None or parts.password is not None:
        # Addresses are printed, secrets are not.
        raise ValueError(f"{what}: leave user and password out of the address, and pass token=")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{what}={value!r}: pass an address such as {DEFAULT_SERVER_URL}")
    return cast(str, value).rstrip("/")


def _given_url(text: str) -> str:
    return _url("server_url", text)


def _token(value: object) -> str:
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or " " in value:
        # The value itself is a secret and stays out of messages.
        raise ValueError("token: pass the printable ASCII text that the server gave out, without spaces")
    return value


def _tags(value: Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError(f"tags={value!r}: pass a list of texts, [{value!r}]")
    tags = tuple(cast(str, _name("tags", tag)) for tag in value)
    if len(tags) > LIMITS["tags_per_run"]:
        raise ValueError(f"tags: {len(tags)} of them, at most {LIMITS['tags_per_run']} are kept")
    return tags


def _split_tags(text: str) -> tuple[str, ...]:
    return _tags(tag.strip() for tag in text.split(",") if tag.strip())


def _notes(value: object) -> str:
    if not isinstance(value, str) or len(value) > _TEXT_CHARACTERS:
        raise ValueError(f"notes: pass a text of at most {_TEXT_CHARACTERS} characters")
    return value


def _seed(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"seed={value!r}: pass a 64-bit integer or None")
    return int(value)


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


def _sample(text: str) -> int | Literal["all"]:
    return WatchOptions(sample="all" if text == "all" else int(text)).sample


def _budget(text: str) -> float | None:
    return WatchOptions(budget=None if text.lower() == "none" else float(text)).budget
