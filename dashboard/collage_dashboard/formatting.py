"""Numbers as people read them: four significant digits, an en dash for undefined, non-finite values by name."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from collage_monitor.wire import Number, from_number

__all__ = ["UNDEFINED", "byte_count", "count", "finite", "interval", "number", "share_of_runs", "when"]

UNDEFINED = "–"


def number(value: Number | None, digits: int = 4) -> str:
    """A value with `digits` significant digits, thousands grouped; an exponent for very large and small ones."""
    if value is None:
        return UNDEFINED
    plain = from_number(value)
    if not math.isfinite(plain):
        return {math.inf: "∞", -math.inf: "−∞"}.get(plain, "NaN")
    if plain == 0:
        return "0"
    rounded = float(f"{plain:.{digits}g}")
    magnitude = math.floor(math.log10(abs(rounded)))
    if not -4 <= magnitude < 7:
        return f"{rounded:.{digits - 1}e}".replace("-", "−")
    text = f"{rounded:,.{max(digits - 1 - magnitude, 0)}f}"
    return text.replace("-", "−")


def count(value: Number | None) -> str:
    """A whole number with grouped thousands."""
    if value is None or not math.isfinite(from_number(value)):
        return number(value)
    return f"{round(from_number(value)):,}"


def byte_count(value: Number | None) -> str:
    """Bytes with a binary unit."""
    if value is None or not math.isfinite(from_number(value)):
        return number(value)
    size, unit = from_number(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{number(size, 3)} {unit}"


def interval(low: Number | None, high: Number | None, digits: int = 4) -> str:
    """A 95 % interval, or nothing where there is none."""
    return "" if low is None or high is None else f"{number(low, digits)} … {number(high, digits)}"


def finite(value: Number | None) -> float | None:
    """The value as a drawable float; undefined and non-finite ones are None, which a figure shows as a gap."""
    if value is None:
        return None
    plain = from_number(value)
    return plain if math.isfinite(plain) else None


def share_of_runs(shown: int, total: int) -> str:
    """'7 runs', or '7 of 9 runs' when some are left out."""
    noun = "run" if total == 1 else "runs"
    return f"{total} {noun}" if shown == total else f"{shown} of {total} {noun}"


def when(seconds: float | None) -> str:
    """A Unix time as date and minute in UTC."""
    return UNDEFINED if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
