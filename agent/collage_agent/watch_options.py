"""The options of `watch`: names, types and defaults, checked where they are made.

`watch`, the integrations and the environment's variables all give these. Adding one is a decision about the user's
interface: `docs/` and the API pages list them (`tests/agent/test_watch.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack, cast, get_args

from collage_agent.expectations import Expectations, OnBreach
from collage_monitor.spelling import similar
from collage_monitor.statistics.casts import FORMATS, is_copy
from collage_monitor.strategies import STRATEGIES

__all__ = ["Exclude", "WatchArguments", "WatchOptions", "checked_options", "checks_names", "shows_options"]

_MOST_WINDOWS: Final = 4
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Exclude:
    """Layers to leave out: every parameter whose name matches one of the regular expressions."""

    __slots__ = ("patterns",)

    def __init__(self, *patterns: str) -> None:
        if not patterns:
            raise ValueError("Exclude() excludes nothing; pass at least one regular expression")
        self.patterns = _compiled(patterns)

    def __repr__(self) -> str:
        return f"Exclude({', '.join(repr(pattern.pattern) for pattern in self.patterns)})"


class WatchArguments(TypedDict, total=False):
    """The fields of `WatchOptions`, as those are typed who pass some of them on."""

    every: int
    sample: int | Literal["all"]
    layers: str | Sequence[str] | Exclude | None
    strategy: str | None
    oracle: bool
    windows: Sequence[int]
    budget: float | None
    first_step: int | None
    casts: Sequence[str]
    expect: str | Mapping[str, Any] | Expectations | None
    on_breach: OnBreach


@dataclass(frozen=True)
class WatchOptions:
    """How a model is watched; see `collage_agent.watch` for the meaning of each field.

    Raises:
        ValueError, TypeError: a value that cannot be used; the message names it and what to pass instead.
    """

    every: int = 10
    sample: int | Literal["all"] = 4096
    layers: str | Sequence[str] | Exclude | None = None
    strategy: str | None = None
    oracle: bool = False
    windows: Sequence[int] = ()
    budget: float | None = 0.01
    first_step: int | None = None
    casts: Sequence[str] = ("bf16",)
    expect: str | Mapping[str, Any] | Expectations | None = None
    on_breach: OnBreach = "warn"

    def __post_init__(self) -> None:
        for name in ("windows", "casts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "expect", Expectations.of(self.expect))
        if self.on_breach not in get_args(OnBreach):
            raise ValueError(f"on_breach={self.on_breach!r}; choose one of {', '.join(get_args(OnBreach))}")
        _whole_number("every", self.every, at_least=1)
        if self.sample == "all":
            object.__setattr__(self, "budget", None)
        else:
            _whole_number("sample", self.sample, at_least=64, otherwise=", or 'all'")
        if self.first_step is not None:
            _whole_number("first_step", self.first_step, at_least=1)
        if self.budget is not None and not 0 < self.budget < 1:
            raise ValueError(f"budget={self.budget!r}; pass a share between 0 and 1, or None for no governor")
        _window_lengths(self.windows)
        _formats(self.casts)
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r}; choose one of {', '.join(STRATEGIES)}, or None")
        self.selects("")

    def selects(self, name: str) -> bool:
        """Whether the layer called `name` is watched (`re.search`)."""
        if self.layers is None:
            return True
        if isinstance(self.layers, Exclude):
            return not any(pattern.search(name) for pattern in self.layers.patterns)
        patterns = (self.layers,) if isinstance(self.layers, str) else tuple(self.layers)
        return any(pattern.search(name) for pattern in _compiled(patterns))


def shows_options(function: _Function) -> _Function:
    """Give `help` and editors the options and defaults behind a function's **options."""
    signature = inspect.signature(function)
    named = [entry for entry in signature.parameters.values() if entry.kind is not entry.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=option.type
        )
        for option in dataclasses.fields(WatchOptions)
    ]
    vars(function)["__signature__"] = signature.replace(parameters=[*named, *options])
    return function


def checks_names(function: _Function) -> _Function:
    """Let a function refuse arguments that it has not, and name the one that was meant (TypeError)."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options.keys() - signature.parameters.keys():
            hint = similar(name, signature.parameters)
            known = hint or f"there are {', '.join(signature.parameters)}"
            raise TypeError(f"unknown argument {name!r}; {known}")
        return function(*args, **options)

    return cast(_Function, checked)


@checks_names
@shows_options
def checked_options(**options: Unpack[WatchArguments]) -> WatchOptions:
    """The options that are passed on to `watch`.

    Raises:
        ValueError, TypeError: an option that cannot be used, or that there is none of this name.
    """
    return WatchOptions(**options)


def _compiled(patterns: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    try:
        return tuple(re.compile(pattern) for pattern in patterns)
    except (re.error, TypeError) as error:
        raise ValueError(f"layers={patterns!r}: not a regular expression ({error})") from None


def _window_lengths(windows: Sequence[int]) -> None:
    for length in windows:
        _whole_number("windows", length, at_least=2, otherwise=" for each window, in steps")
    if len(set(windows)) != len(windows) or len(windows) > _MOST_WINDOWS:
        raise ValueError(f"windows={windows!r}; pass at most {_MOST_WINDOWS} different lengths, such as (8, 64)")


def _formats(casts: Sequence[str]) -> None:
    unknown = [name for name in casts if not is_copy(name)]
    if unknown or len(set(casts)) < len(casts):
        detail = f": {unknown[0]!r} is no format known here" if unknown else ""
        known = ", ".join(FORMATS)
        raise ValueError(
            f"casts={casts!r}{detail}; pass different ones of {known}, or routes through formats without scales, "
            "such as 'bf16>fp8_block128'"
        )


def _whole_number(name: str, value: object, *, at_least: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}; pass a whole number of at least {at_least}{otherwise}")
    if value < at_least:
        raise ValueError(f"{name}={value}; pass at least {at_least}{otherwise}")
