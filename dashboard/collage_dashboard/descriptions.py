"""How keys read on every page: titles, units and help from the catalogue alone, intervals, and times.

How a number reads is `collage_monitor.number_text`'s, which the terminal reads, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from collage_monitor import wire
from collage_monitor.diagnosis.words import sentence
from collage_monitor.metrics import METRICS, SCALARS, is_metric, preferred_state, split_key
from collage_monitor.number_text import UNDEFINED, value_text
from collage_monitor.wire import Number

__all__ = [
    "AXIS_TITLES",
    "Description",
    "EVENTS",
    "STATE",
    "describe",
    "in_few_words",
    "interval",
    "iso",
    "metric_choices",
    "short_name",
    "state_key",
    "when",
]

AXIS_TITLES: Final = {"step": "step", "tokens": "tokens", "time": "seconds since the first report"}
EVENTS: Final = {
    "attempt": "Attempt",
    "conversion": "Weights converted",
    "expectation": "Expectation broken",
    "kept_otherwise": "Kept otherwise",
    "resume_loss": "Lost at a resume",
    "continuation": "Compared with what was saved",
    "rank_twice": "Rank reported twice",
    "gap": "Reports lost",
    "reports_dropped": "Reports dropped",
    "skipped_steps": "Steps skipped",
    "replica_mismatch": "Replicas differ",
    "unknown_statistics": "Statistics left out",
    "restored": "Data restored",
    "retention": "Retention",
    "alert": "Alert fires",
    "alert_resolved": "Alert ended",
    "note": "Note",
}
"""What events of a run are called, by kind."""
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


def interval(key: str, low: Number | None, high: Number | None) -> str:
    """A 95 % interval of a metric or scalar, or nothing where there is none."""
    return "" if low is None or high is None else f"{value_text(key, low)} … {value_text(key, high)}"


def short_name(name: str, most: int = 48) -> str:
    """A name without its middle, if it has more than so many characters: names differ at their ends."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"


def iso(seconds: float) -> str:
    """A Unix time as HTML's `time` has it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def when(seconds: float | None) -> str:
    """A Unix time as date and minute in UTC."""
    return UNDEFINED if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
