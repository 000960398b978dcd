"""Numbers in words and cells, the same on every page."""

from __future__ import annotations

from collections.abc import Iterable

from collage_monitor.seeds import Estimate

__all__ = ["UNDEFINED", "estimate", "listed", "number", "quoted", "share"]

UNDEFINED = "–"


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits; a dash where it is undefined."""
    return UNDEFINED if value is None else f"{value:.{digits}g}"


def share(value: float | None) -> str:
    """A share in percent."""
    return UNDEFINED if value is None else f"{100 * value:.3g} %"


def estimate(found: Estimate | None, form: str = ".4f") -> str:
    """A mean and its 95 % interval, '0.0123 [0.0100, 0.0146]'."""
    if found is None:
        return UNDEFINED
    if found.low is None or found.high is None:
        return f"{found.value:{form}}"
    return f"{found.value:{form}} [{found.low:{form}}, {found.high:{form}}]"


def listed(names: Iterable[str]) -> str:
    """'a, b and c'."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def quoted(names: Iterable[str]) -> str:
    """'`a`, `b` and `c`': names that may hold commas."""
    return listed(f"`{name}`" for name in names)
