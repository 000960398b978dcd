"""The evidence for a judgement, and how it is made from totals, in a training process and on a server.

Agent and server fill an `Evidence`, and `judge` reads it: the same numbers must give the same verdict in both
(`tests/diagnosis/test_same_words.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from collage_monitor.definitions import Array
from collage_monitor.diagnosis.since import History
from collage_monitor.metrics import STATE_RATIOS, split_key
from collage_monitor.statistics import Totals, finish_all, reduce_steps
from collage_monitor.wire import Attempt, Number, WatchInfo

__all__ = [
    "Evidence",
    "NOW_STEPS",
    "OF_LAYERS",
    "RECENT_SHARE",
    "RECENT_STEPS",
    "SilentRanks",
    "Values",
    "evidence_of",
    "finite",
    "labelled",
    "last_change",
    "longest_window",
    "recent_points",
    "silent_ranks",
    "state_ratios",
    "tracked_metrics",
]

Values = Mapping[str, Number | None]
"""Metrics by key. None, or what is not finite, is undefined."""

OF_LAYERS: Final = (
    "elements",
    "measured_ratio",
    "intended_norm",
    "edq_ratio",
    "lost_update_ratio",
    "update_error_ratio",
    "residual_dropped_ratio",
    "nonfinite_params",
)
"""What is read of each layer; over HTTP a question each."""
RECENT_STEPS: Final = 32
"""Measured steps that the recent past has at least."""
RECENT_SHARE: Final = 0.05
"""Share of the run's Σ u² that it has at least."""
NOW_STEPS: Final = 5
"""Measured steps that "now" has at least."""

_SILENT_STEPS: Final = 8
"""Measured steps without a rank after which it counts as silent: of fewer, its reports may be on their way."""


@dataclass(frozen=True)
class SilentRanks:
    """Since when not all ranks report. `held`: the share of the elements that the others hold; None: not known."""

    reporting: int
    expected: int
    since: int
    held: float | None


@dataclass(frozen=True)
class Evidence:
    """The evidence for a judgement: merged metrics of the recent past, and facts about the watch.

    model: the whole model's metrics by key; layers: those of each layer, empty if not read.
    first_step to last_step: the steps that they merge. silent: ranks that do not report any more.
    now: the model's metrics over the newest of these steps, empty if there are no others. history: metrics over the
    whole run. logged: names of logged losses that are not finite, with the first step of this. skipped: the steps
    that a loss scaler skipped.
    """

    model: Values
    layers: Mapping[str, Values] = field(default_factory=dict)
    watch: WatchInfo | None = None
    first_step: int | None = None
    last_step: int | None = None
    silent: SilentRanks | None = None
    now: Values = field(default_factory=dict)
    history: History = field(default_factory=History)
    logged: Mapping[str, int] = field(default_factory=dict)
    skipped: float = 0.0


def evidence_of(
    model: Totals,
    layers: Totals | None = None,
    names: Sequence[str] = (),
    **facts: Any,
) -> Evidence:
    """The evidence from totals of the recent past, in the training's own process or on a server.

        since = last_change(run.attempts, run.watch, steps[-1])
        taken = recent_points(steps, totals["measured_steps"], totals["intended_squared_sum"], since)
        recent = {key: values[-taken:] for key, values in totals.items()}
        evidence = evidence_of(recent, layers_of_the_same_steps, names, watch=run.watch, first_step=…, last_step=…)

    model: [points], shards merged; layers: [points', len(names)], or None where they are not at hand. Both merge
    over all of their points, and may be cut into points differently; the newest of the model's are "now".
    facts: the other fields of `Evidence`.
    """
    of_layers: dict[str, Values] = {}
    if layers:
        finished = _finished(layers)
        of_layers = {
            name: {key: _number(values[index]) for key, values in finished.items()}
            for index, name in enumerate(names)
        }
    return Evidence(_values(model), of_layers, now=_now(model, facts.get("watch")), **facts)


def _now(model: Totals, watch: WatchInfo | None) -> Values:
    """The metrics of the newest points that hold NOW_STEPS measured steps; nothing where they are all, or where
    each step measures other tensors."""
    counts = np.nan_to_num(model.get("measured_steps", np.zeros(0)))
    places = np.flatnonzero(np.cumsum(counts[::-1]) >= NOW_STEPS)
    taken = int(places[0]) + 1 if len(places) else len(counts)
    if taken >= len(counts) or (watch is not None and watch.intent == "whole-tensor"):
        return {}
    return _values({key: values[-taken:] for key, values in model.items()})


def _values(totals: Totals) -> dict[str, float | None]:
    return {key: _number(value) for key, value in _finished(totals).items()}


def _finished(totals: Totals) -> dict[str, Array]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return finish_all(reduce_steps(totals, axis=0)) if totals else {}


def _number(value: Array) -> float | None:
    return None if math.isnan(value) else float(value)


def last_change(attempts: Sequence[Attempt], watch: WatchInfo | None, last_step: int) -> int:
    """The step with which the recent past begins at the earliest: the last launch that measures, or change of how
    weights and states are kept; 0 if none is known.

    attempts: the training's, oldest first. last_step: the newest measured step; a change that no measured step
    follows yet has no evidence, and the one before it counts.
    """
    launches = [entry.measured_from for entry in attempts if entry.measured_from is not None]
    # A launch hides older ones' steps from its first on: one that began later is hidden with all its steps.
    launched = next((step for step in reversed(launches) if step <= last_step), 0)
    changed = watch.kept_since if watch is not None else None
    if watch is not None and changed is None and watch.conversion is not None:
        changed = watch.conversion.step + 1
    return launched if changed is None or changed > last_step else max(launched, changed)


def recent_points(steps: Sequence[int], measured: Sequence[float], squares: Sequence[float], since: int) -> int:
    """How many points at the end are the recent past: they hold RECENT_STEPS measured steps and RECENT_SHARE of
    Σ u² since the last change, or are all there are since then.

    steps, measured, squares: last step, measured steps and Σ u² of each point of the whole run, oldest first.
    since: `last_change` of the run. At the end of a learning-rate schedule the last steps are tiny compared with
    the rest, and do not represent it.
    """
    present = bisect_left(steps, since)
    whole = sum(squares[present:])
    taken, count, carried = 0, 0.0, 0.0
    while taken < len(steps) - present and (count < RECENT_STEPS or carried < RECENT_SHARE * whole):
        taken += 1
        count, carried = count + measured[-taken], carried + squares[-taken]
    return taken


def silent_ranks(
    first_steps: Sequence[int],
    measured: Sequence[float],
    ranks: Sequence[int],
    expected: Sequence[int],
    elements: Sequence[float],
    whole: float = 0.0,
    *,
    is_over: bool = False,
) -> SilentRanks | None:
    """Ranks that have not reported since some step, from the points of the whole run, oldest first; None if all
    report.

    measured, ranks, expected, elements: of each point its measured steps, how many ranks reported and should have,
    and the elements of a step. whole: the model's elements where no point has all ranks; 0: not known.
    is_over: no more reports of the run will come.
    """
    begin = len(ranks)
    while begin and ranks[begin - 1] < expected[begin - 1]:
        begin -= 1
    least = min(_SILENT_STEPS, sum(measured)) if is_over else _SILENT_STEPS
    if begin == len(ranks) or sum(measured[begin:]) < least:
        return None
    before = elements[begin - 1] if begin else whole
    there = max(elements[begin:])
    held = min(there / before, 1.0) if before > 0 and math.isfinite(there) else None
    return SilentRanks(max(ranks[begin:]), max(expected[begin:]), first_steps[begin], held)


def longest_window(metrics: Values, name: str) -> tuple[int, float] | None:
    """(steps, value) of the longest window in which the metric `name` is defined; None: nowhere."""
    found = [(int(label), value) for label, value in labelled(metrics, name).items() if label.isdigit()]
    return max(found, default=None)


def state_ratios(metrics: Values) -> dict[str, float]:
    """The defined decrements of averages, then increments of sums, by their keys."""
    return {f"{name}/{label}": value for name in STATE_RATIOS for label, value in labelled(metrics, name).items()}


def tracked_metrics(statistics: Iterable[str]) -> list[str]:
    """The metrics that say since when something holds: EDQ, the share lost, and the states' ratios, as far as these
    statistics make any."""
    labels = [split_key(key) for key in statistics]
    states = (
        f"{ratio}/{label}"
        for ratio in STATE_RATIOS
        for name, label in labels
        if name == ratio.replace("_ratio", "_observed_sum")
    )
    return ["edq_ratio", "lost_update_ratio", *states]


def labelled(metrics: Values, name: str) -> dict[str, float]:
    """The defined values of a labelled metric, by label."""
    found = {}
    for key, value in metrics.items():
        own, label = split_key(key)
        number = finite(value)
        if own == name and label and number is not None:
            found[label] = number
    return found


def finite(value: Number | None) -> float | None:
    """The number; None where it is undefined or not finite."""
    number = float("nan") if value is None else float(value)
    return number if abs(number) < float("inf") else None
