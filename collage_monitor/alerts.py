"""The alert catalogue: Prometheus rules, the runbook and the server's answers are made from it.

Conditions are PromQL over the gauges of `/metrics`. `$window` stands for the window, `$warm_up` for the number of
first steps at which a run is not judged. Other packages add alerts: entry-point group `collage_monitor.alerts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any, Final, Literal

from collage_monitor.errors import CatalogueError
from collage_monitor.extensions import extensions
from collage_monitor.strategies import STRATEGIES

__all__ = ["ALERTS", "Alert", "alert", "duration"]


@dataclass(frozen=True)
class Alert:
    """A condition on a run, and what to do about it.

    `expression` must hold for `for_seconds` without a break. `other_causes` are harmless or foreign explanations to
    rule out; `first_step` says what to look at or do first.
    """

    name: str
    expression: str
    window_seconds: float
    for_seconds: float
    warm_up_steps: int
    severity: Literal["info", "warning", "critical"]
    summary: str
    meaning: str
    other_causes: tuple[str, ...]
    first_step: str

    def condition(self, time_scale: float = 1.0) -> str:
        """The PromQL expression. `time_scale` shortens its window, for a test or a rehearsal in seconds."""
        window = duration(self.window_seconds * time_scale)
        return Template(self.expression).substitute(window=window, warm_up=self.warm_up_steps)


_WARM_UP_STEPS = 500
_STOCHASTIC = "|".join(name for name, entry in STRATEGIES.items() if entry.stochastic)

_ALERTS = (
    Alert(
        name="CollageEdqDrop",
        expression=(
            "collage_edq_ratio < 0.9 * quantile_over_time(0.9, collage_edq_ratio[$window])"
            " and collage_step > $warm_up"
        ),
        window_seconds=3600.0,
        for_seconds=300.0,
        warm_up_steps=_WARM_UP_STEPS,
        severity="warning",
        summary="the effective descent quality fell by more than a tenth within the hour",
        meaning=(
            "Less of the intended update reaches the weights than a short while ago. Either updates have become "
            "smaller than what the weights' format can hold, or a residual that carried them is gone."
        ),
        other_causes=(
            "the learning rate was lowered by its schedule: updates shrink, the gaps between weights do not",
            "the run resumed from a checkpoint that did not keep the residuals",
            "weights grew past a power of two, where the gap doubles",
        ),
        first_step=(
            "Open the run's layer × step heatmap of edq_ratio, sorted by worst. If all layers fell at once, "
            "suspect the schedule or a resume; if single layers did, the size of their weights. Then compare "
            "half_ulp_margin before and after."
        ),
    ),
    Alert(
        name="CollageEdqLow",
        expression="collage_edq_ratio < 0.9 and collage_step > $warm_up",
        window_seconds=0.0,
        for_seconds=600.0,
        warm_up_steps=_WARM_UP_STEPS,
        severity="warning",
        summary="less than nine tenths of the intended descent reaches the weights",
        meaning=(
            "Rounding takes more than a tenth of the descent. The run trains as if with a smaller learning rate, "
            "but not evenly: small updates are lost, large ones arrive."
        ),
        other_causes=(
            "a learning-rate warm-up longer than the alert's: early updates are small by intent",
            "few sampled elements: check whether the 95 % interval of edq_ratio reaches above 0.9",
        ),
        first_step=(
            "Look at lost_update_ratio and half_ulp_margin of the worst layers. If their updates are below half a "
            "gap, switch to a strategy that keeps more of the weights (light, plus or master-weights) at the next "
            "checkpoint."
        ),
    ),
    Alert(
        name="CollageUpdatesLost",
        expression=f'collage_lost_update_ratio{{strategy!~"{_STOCHASTIC}"}} > 0.5 and collage_step > $warm_up',
        window_seconds=0.0,
        for_seconds=600.0,
        warm_up_steps=_WARM_UP_STEPS,
        severity="warning",
        summary="more than half of the intended updates are rounded away",
        meaning=(
            "More than half of the weights that should have moved in this step did not. Stochastic strategies "
            "are left out: their updates arrive on average, so the share of one step misjudges them. For those, "
            "look at lost_window_ratio over the longest window that is watched."
        ),
        other_causes=(
            'the optimizer rounds stochastically without saying so: pass strategy="stochastic" to watch',
            "most updates are tiny and a few large ones carry the descent: edq_ratio then stays near 1",
        ),
        first_step=(
            "Compare edq_ratio. If it is low too, the descent itself is lost: change the strategy. If it is near "
            "1, watch state_decrement_ratio and the oracle before you decide."
        ),
    ),
)


def catalogue_of(own: Sequence[Alert], added: Mapping[str, Any]) -> dict[str, Alert]:
    """Alerts by name, those that other packages add (entry-point group `collage_monitor.alerts`) last.

    Raises:
        CatalogueError: what was added is no `Alert`, or its name is taken.
    """
    found = {entry.name: entry for entry in own}
    for name, entry in added.items():
        if not isinstance(entry, Alert):
            raise CatalogueError(f"collage_monitor.alerts {name!r} must be an Alert, not {type(entry).__name__}")
        if entry.name in found:
            raise CatalogueError(f"collage_monitor.alerts {name!r} adds {entry.name!r}, which is taken")
        found[entry.name] = entry
    return found


ALERTS: Final = catalogue_of(_ALERTS, extensions("collage_monitor.alerts"))


def duration(seconds: float) -> str:
    """Seconds as PromQL writes them, in the largest unit that gives a whole number: "1h", "90s", "1500ms"."""
    milliseconds = round(seconds * 1000)
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds % size == 0 and milliseconds:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


def alert(name: str) -> Alert:
    """The catalogue entry called `name`.

    Raises:
        CatalogueError: no such alert.
    """
    try:
        return ALERTS[name]
    except KeyError:
        raise CatalogueError(f"no alert is called {name!r}; choose one of {', '.join(ALERTS)}") from None
