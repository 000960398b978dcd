"""How keys and numbers read on every page: titles, units and help from the catalogue alone, and one form a number.

Shares stand in percent with one decimal, EDQ and what else is 1 in a run that loses nothing with three decimals,
other numbers with four significant digits; thousands are grouped. An undefined number is an en dash; infinite
numbers and NaN are named. `assets/dashAgGridFunctions.js` writes the same in tables that sort.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from collage_monitor import wire
from collage_monitor.diagnosis.words import percent, sentence
from collage_monitor.metrics import HISTOGRAM_OCTAVES, METRICS, SCALARS, is_metric, preferred_state, split_key
from collage_monitor.wire import Number, from_number

__all__ = [
    "AXIS_TITLES",
    "Description",
    "STATE",
    "UNDEFINED",
    "byte_count",
    "count",
    "describe",
    "finite",
    "in_few_words",
    "interval",
    "iso",
    "metric_choices",
    "number",
    "share_text",
    "state_key",
    "value_text",
    "when",
]

AXIS_TITLES: Final = {"step": "step", "tokens": "tokens", "time": "seconds since the first report"}
STATE: Final = "state_decrement_ratio"
"""The metric that must agree before anything speaks well of a run; labelled by optimizer state."""
_USUAL_STATE: Final = f"{STATE}/exp_avg_sq"


@dataclass(frozen=True)
class Description:
    """The title, unit and help of a key. `ideal` is the value of a run that loses nothing, None where there is
    none."""

    key: str
    title: str
    unit: str
    help: str
    formula: str = ""
    ideal: float | None = None
    scalar: bool = False

    @property
    def axis_title(self) -> str:
        """Title with its unit, for an axis; a share's stands beside each of its numbers."""
        return (
            f"{self.title} ({self.unit})"
            if self.unit not in {"", "1", "share", self.title.lower().rpartition(" ")[2]}
            else self.title
        )

    @property
    def drawn_scale(self) -> float:
        """What a figure multiplies values by: shares are drawn in percent."""
        return 100.0 if self.unit == "share" else 1.0

    @property
    def tick_suffix(self) -> str:
        """What stands behind the numbers of an axis."""
        return " %" if self.unit == "share" else ""


def describe(key: str) -> Description:
    """The description of a metric's or scalar's key; a name in no catalogue is the user's own scalar."""
    name, label = split_key(key)
    if name in METRICS and (label is None or is_metric(key)):
        entry = METRICS[name]
        title = f"{entry.title}, {label}" if label else entry.title
        return Description(key, title, entry.unit, entry.help, entry.formula, entry.ideal)
    if key in SCALARS:
        scalar = SCALARS[key]
        return Description(key, scalar.title, scalar.unit, scalar.help, scalar=True)
    return Description(key, key, "", "Logged by the training loop.", scalar=True)


def metric_choices(metrics: Iterable[str], scalars: Iterable[str] = ()) -> list[dict[str, object]]:
    """Choices for a select: measured metrics in the order of the catalogue, then logged scalars, in two groups."""
    order = {name: place for place, name in enumerate(METRICS)}
    keys = {key for key in metrics if not describe(key).scalar}
    measured = sorted(keys, key=lambda key: (order[split_key(key)[0]], key))
    groups = (("Measured", measured), ("Logged", sorted(set(scalars))))
    return [
        {"group": group, "items": [{"value": key, "label": describe(key).title} for key in members]}
        for group, members in groups
        if members
    ]


def in_few_words(overview: wire.Overview | None) -> str:
    """At most six words about a run: 'Loses 57.6 % of its updates'."""
    return sentence(overview.short).rstrip(".") if overview is not None else "Not evaluated yet"


def state_key(keys: Iterable[str]) -> str:
    """The state decrement to show first (`preferred_state`); that of exp_avg_sq where there is none."""
    return preferred_state(keys) or _USUAL_STATE


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


def value_text(key: str, value: Number | None, digits: int = 4) -> str:
    """The value of a metric or scalar as all pages write it; `digits` are those of a unit without its own form."""
    plain, description = finite(value), describe(key)
    if plain is None:
        return number(value)
    if description.unit == "share":
        return share_text(plain)
    if description.unit == "ratio" and description.ideal == 1.0 and 0 < abs(plain) < 1e4:
        return f"{plain:,.3f}".replace("-", "−")
    if description.unit in {"elements", "steps"} and plain.is_integer():
        return count(plain)
    if description.key == "half_ulp_margin" and not _LEAST_MARGIN < plain < _MOST_MARGIN:
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


def interval(key: str, low: Number | None, high: Number | None) -> str:
    """A 95 % interval of a metric or scalar, or nothing where there is none."""
    return "" if low is None or high is None else f"{value_text(key, low)} … {value_text(key, high)}"


def finite(value: Number | None) -> float | None:
    """The value as a drawable float; undefined and non-finite ones are None, which a figure shows as a gap."""
    if value is None:
        return None
    plain = from_number(value)
    return plain if math.isfinite(plain) else None


def iso(seconds: float) -> str:
    """A Unix time as HTML's `time` has it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def when(seconds: float | None) -> str:
    """A Unix time as date and minute in UTC."""
    return UNDEFINED if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
