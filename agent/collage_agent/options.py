"""The options of `watch`: one frozen value object, checked where it is made, and the one table of defaults."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from collage_monitor.strategies import STRATEGIES

__all__ = ["DEFAULTS", "Exclude", "WatchOptions", "default", "is_default", "plain"]

_Value = TypeVar("_Value")


class _Default:
    """Marks a value that nobody gave."""


def default(value: _Value) -> _Value:
    """A value that equals `value`, and that `is_default` tells from the same value given by a caller."""
    kind = type(value)
    marked: _Value = type("default", (_Default, kind), {})(value)
    return marked


def is_default(value: object) -> bool:
    """Whether the value was marked by `default`, so that nobody gave it."""
    return isinstance(value, _Default)


def plain(value: _Value) -> _Value:
    """The value without the mark."""
    if not isinstance(value, _Default):
        return value
    unmarked: _Value = type(value).__mro__[2](value)
    return unmarked


DEFAULTS: Final[dict[str, Any]] = {
    "every": default(10),
    "sample": default(4096),
    "layers": None,
    "strategy": None,
    "oracle": False,
    "windows": (),
    "budget": default(0.01),
    "first_step": None,
}
"""Of `watch`. Only the marked ones give way to COLLAGE_EVERY, COLLAGE_SAMPLE and COLLAGE_BUDGET."""

MOST_WINDOWS: Final = 4


class Exclude:
    """Layers to leave out: every parameter whose name matches one of the regular expressions."""

    __slots__ = ("patterns",)

    def __init__(self, *patterns: str) -> None:
        if not patterns:
            raise ValueError("Exclude() excludes nothing; pass at least one regular expression")
        self.patterns = _compiled(patterns)

    def __repr__(self) -> str:
        return f"Exclude({', '.join(repr(pattern.pattern) for pattern in self.patterns)})"


@dataclass(frozen=True)
class WatchOptions:
    """How a model is watched; see `watch` for the meaning of each field.

    Raises:
        ValueError, TypeError: a value that cannot be used; the message names it and what to pass instead.
    """

    every: int = DEFAULTS["every"]
    sample: int | Literal["all"] = DEFAULTS["sample"]
    layers: str | Sequence[str] | Exclude | None = DEFAULTS["layers"]
    strategy: str | None = DEFAULTS["strategy"]
    oracle: bool = DEFAULTS["oracle"]
    windows: tuple[int, ...] = DEFAULTS["windows"]
    budget: float | None = DEFAULTS["budget"]
    first_step: int | None = DEFAULTS["first_step"]

    def __post_init__(self) -> None:
        for name in DEFAULTS:
            object.__setattr__(self, name, plain(getattr(self, name)))
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


def _compiled(patterns: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    try:
        return tuple(re.compile(pattern) for pattern in patterns)
    except (re.error, TypeError) as error:
        raise ValueError(f"layers={patterns!r}: not a regular expression ({error})") from None


def _window_lengths(windows: tuple[int, ...]) -> None:
    for length in windows:
        _whole_number("windows", length, at_least=2, otherwise=" for each window, in steps")
    if len(set(windows)) != len(windows) or len(windows) > MOST_WINDOWS:
        raise ValueError(f"windows={windows!r}; pass at most {MOST_WINDOWS} different lengths, such as (8, 64)")


def _whole_number(name: str, value: object, *, at_least: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}; pass a whole number of at least {at_least}{otherwise}")
    if value < at_least:
        raise ValueError(f"{name}={value}; pass at least {at_least}{otherwise}")
