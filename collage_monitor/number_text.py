"""How numbers read on every page and in the terminal: one form a metric, by its entry in the catalogue.

Shares stand in percent with one decimal, EDQ and what else is 1 in a run that loses nothing with three decimals,
other numbers with four significant digits; thousands are grouped. An undefined number is an en dash; infinite
numbers and NaN are named. The dashboard's `assets/dashAgGridFunctions.js` writes the same in tables that sort.
"""

from __future__ import annotations

import math
from typing import Final

from collage_monitor.diagnosis import finite, percent
from collage_monitor.metrics import HISTOGRAM_OCTAVES, METRICS, SCALARS, is_metric, split_key
from collage_monitor.wire import Number, from_number

__all__ = ["UNDEFINED", "count", "number", "share_text", "value_text"]

UNDEFINED: Final = "–"


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


def value_text(key: str, value: Number | None, digits: int = 4) -> str:
    """The value of a metric or scalar, as it is written everywhere; `digits` of a unit without its own form."""
    plain, name = finite(value), split_key(key)[0]
    if plain is None:
        return number(value)
    metric = METRICS[name] if name in METRICS and (name == key or is_metric(key)) else None
    unit = metric.unit if metric else SCALARS[key].unit if key in SCALARS else ""
    if unit == "share":
        return share_text(plain)
    if unit == "ratio" and metric and metric.ideal == 1.0 and 0 < abs(plain) < 1e4:
        return f"{plain:,.3f}".replace("-", "−")
    if unit in {"elements", "steps"} and plain.is_integer():
        return count(plain)
    if key == "half_ulp_margin" and not _LEAST_MARGIN < plain < _MOST_MARGIN:
        return f"{_LEAST_MARGIN} or less".replace("-", "−") if plain < 0 else f"{_MOST_MARGIN} or more"
    if key == "bytes_per_parameter" and 0.01 <= abs(plain) < 100:
        return f"{plain:.3g}".replace("-", "−")
    return number(plain, digits)


_LEAST_MARGIN, _MOST_MARGIN = HISTOGRAM_OCTAVES[0] + 1, HISTOGRAM_OCTAVES[-1] + 2
"""Octaves: what lies beyond the histogram is known no more exactly."""


def share_text(share: float) -> str:
    """A part of a whole in percent: '33.2 %', '< 0.01 %'."""
    return percent(share) if share >= 0 else f"−{percent(-share)}"


def count(value: Number | None) -> str:
    """A whole number with grouped thousands."""
    if value is None or not math.isfinite(from_number(value)):
        return number(value)
    return f"{round(from_number(value)):,}"
