"""Two numbers over several runs: each run's value at its end, and whether one goes with the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from collage_monitor import wire
from collage_monitor.statistics import reduce_steps
from collage_server.queries.finished import finished, json_number
from collage_server.store.records import FloatArray, Points, RunRecord, ScalarPoints

__all__ = ["RunValue", "correlation", "last_metric", "last_scalar"]

_FEWEST_RUNS = 3


@dataclass(frozen=True)
class RunValue:
    """One run's number; None where it was never reported, NaN where it is undefined."""

    value: float | None
    logged: bool = False

    @property
    def lack(self) -> Literal["not reported", "undefined", "not finite"] | None:
        """Why the run cannot be counted; a logged NaN is a value that is not finite, none that is undefined."""
        if self.value is None:
            return "not reported"
        if math.isnan(self.value) and not self.logged:
            return "undefined"
        return None if math.isfinite(self.value) else "not finite"

    @property
    def shown(self) -> wire.Number | None:
        """The number for JSON."""
        if self.value is None:
            return None
        return wire.to_number(self.value) if self.logged else json_number(self.value)


def last_metric(key: str, points: Points, window: float) -> RunValue:
    """The metric merged over the last `window` of the measured steps; at least the last point is taken."""
    size = len(points.steps)
    if not size or not points.totals:
        return RunValue(None)
    later = np.cumsum(points.counts[::-1])[::-1] - points.counts
    chosen = later < window * points.counts.sum()
    merged = reduce_steps({name: array[chosen] for name, array in points.totals.items()}, axis=0)
    return RunValue(float(finished(key, merged, ())))


def last_scalar(points: ScalarPoints, window: float) -> RunValue:
    """Mean of the last `window` of the logged values, of one at least."""
    if not len(points.values):
        return RunValue(None)
    count = max(math.ceil(window * len(points.values) - 1e-9), 1)
    with np.errstate(invalid="ignore", over="ignore"):
        return RunValue(float(points.values[-count:].mean()), logged=True)


def correlation(
    keys: tuple[str, str], window: float, runs: Sequence[tuple[RunRecord, RunValue, RunValue]]
) -> wire.Correlation:
    """Every run's place, the coefficients over those that have both numbers, and what the others lack."""
    missing = [
        wire.MissingValue(run_id=record.run_id, key=key, reason=value.lack)
        for record, *values in runs
        for key, value in zip(keys, values, strict=True)
        if value.lack is not None
    ]
    both = [(x.value, y.value) for _, x, y in runs if x.lack is None and y.lack is None]
    table = np.array(both, dtype=np.float64).reshape(-1, 2).T
    return wire.Correlation(
        x=keys[0],
        y=keys[1],
        window=window,
        n=len(both),
        pearson=_pearson(table[0], table[1]),
        spearman=_pearson(_mean_ranks(table[0]), _mean_ranks(table[1])),
        runs=[
            wire.CorrelatedRun(
                run_id=record.run_id, name=record.name, strategy=record.strategy, x=x.shown, y=y.shown
            )
            for record, x, y in runs
        ],
        missing=missing,
    )


def _pearson(x: FloatArray, y: FloatArray) -> float | None:
    """Pearson's coefficient in [−1, 1]; None below three runs and where one of the two is constant."""
    if len(x) < _FEWEST_RUNS:
        return None
    x, y = _centred(x), _centred(y)
    size = float(np.sqrt(x @ x) * np.sqrt(y @ y))
    return None if not size else float(np.clip(x @ y / size, -1.0, 1.0))


def _centred(values: FloatArray) -> FloatArray:
    """Deviations from the mean, scaled so that neither they nor their squares overflow or vanish."""
    shifted: FloatArray = 0.5 * values - 0.5 * values[0]
    largest = np.abs(shifted).max()
    if largest:
        shifted /= largest
    return shifted - shifted.mean() if largest else shifted


def _mean_ranks(values: FloatArray) -> FloatArray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: FloatArray = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
    return ranks
