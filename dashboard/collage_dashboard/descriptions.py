"""What a key is called, its unit and its help, from the catalogue: pages and figures never say their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from collage_monitor.metrics import METRICS, SCALARS, split_key

__all__ = ["AXIS_TITLES", "Description", "STATE", "describe", "metric_choices", "state_key"]

AXIS_TITLES: Final = {"step": "step", "tokens": "tokens", "time": "seconds since the first report"}
STATE: Final = "state_decrement_ratio"
"""The metric that must agree before anything speaks well of a run; labelled by optimizer state."""
_PREFERRED_STATE: Final = f"{STATE}/exp_avg_sq"


@dataclass(frozen=True)
class Description:
    """A key as a reader sees it. `ideal` is the value of a run that loses nothing, None where there is none."""

    key: str
    title: str
    unit: str
    help: str
    formula: str = ""
    ideal: float | None = None
    scalar: bool = False

    @property
    def axis_title(self) -> str:
        """Title with its unit, for an axis."""
        return f"{self.title} ({self.unit})" if self.unit not in {"", "1", self.title.lower()} else self.title


def describe(key: str) -> Description:
    """The description of a metric's or scalar's key; a name that no catalogue has is a scalar of the user's own."""
    name, label = split_key(key)
    if name in METRICS:
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
    keys = {key for key in metrics if split_key(key)[0] in order}
    measured = sorted(keys, key=lambda key: (order[split_key(key)[0]], key))
    groups = (("Measured", measured), ("Logged", sorted(set(scalars))))
    return [
        {"group": group, "items": [{"value": key, "label": describe(key).title} for key in members]}
        for group, members in groups
        if members
    ]


def state_key(keys: Iterable[str]) -> str:
    """The state decrement to show first: that of exp_avg_sq, else of the first state that the run has."""
    labelled = sorted(key for key in keys if split_key(key)[0] == STATE and split_key(key)[1])
    return _PREFERRED_STATE if _PREFERRED_STATE in labelled or not labelled else labelled[0]
