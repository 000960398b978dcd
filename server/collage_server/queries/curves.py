"""Metrics and logged scalars over runs, merged to the requested number of points; and the values shown beside them.

Pure: points in, answers out; `api/curves.py` and `export/` call it. Merging and finishing follow the catalogue's
rules; the form of an answer is `wire.Series`' (`tests/server/test_series.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from collage_monitor import wire
from collage_monitor.statistics import finish_all, finished, finished_interval, merge_starts, reduce_steps
from collage_monitor.wire import Number
from collage_server.queries.run_answers import said_of
from collage_server.store.records import FloatArray, IntArray, Points, RunRecord, ScalarPoints

__all__ = [
    "AxisName",
    "CLIP_RATIO",
    "MEAN_OF_LAST",
    "Positions",
    "StackedPoints",
    "UNCLIPPED",
    "clip_ratio",
    "compared_run",
    "concatenated",
    "merged_metrics",
    "metric_series",
    "run_summary",
    "scalar_series",
]


@dataclass(frozen=True, eq=False)
class StackedPoints:
    """Points of runs that have the same statistics, one run after the other; `places` has each run's slice.

    They are finished together: run by run, 50 runs of 10,000 points cost 1.6 times the CPU of the whole question.
    """

    run_ids: list[str]
    world_sizes: list[tuple[tuple[int, int], ...]]
    places: list[slice]
    points: Points


def _stack_by_statistics(points: Mapping[str, Points], metric: str | None = None) -> list[StackedPoints]:
    """The runs in groups of equal statistics; extremes are kept of `metric` alone."""
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for run_id, held in points.items():
        groups[(metric in held.extremes, *held.totals)].append(run_id)
    return [_joined(run_ids, [points[run_id] for run_id in run_ids], metric) for run_ids in groups.values()]


def _joined(run_ids: list[str], members: Sequence[Points], metric: str | None) -> StackedPoints:
    ends = np.cumsum([len(held.steps) for held in members]).tolist()
    places = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    sizes = [held.world_sizes for held in members]
    return StackedPoints(run_ids, sizes, places, concatenated(members, metric))


def concatenated(members: Sequence[Points], metric: str | None = None) -> Points:
    """Points one after the other. Missing totals are NaN; extremes are kept only for `metric`."""
    if len(members) == 1:
        return members[0]
    names = ("first_steps", "steps", "times", "ranks", "counts")
    joined: dict[str, Any] = {name: np.concatenate([getattr(held, name) for held in members]) for name in names}
    gaps = [np.full(len(held.steps), np.nan) for held in members]
    totals = {
        key: np.concatenate([held.totals.get(key, gap) for held, gap in zip(members, gaps, strict=True)])
        for key in dict.fromkeys(key for held in members for key in held.totals)
    }
    extremes = {}
    if metric is not None and metric in members[0].extremes:
        pairs = [held.extremes[metric] for held in members]
        extremes[metric] = (np.concatenate([low for low, _ in pairs]), np.concatenate([high for _, high in pairs]))
    return replace(members[0], **joined, totals=totals, extremes=extremes)


AxisName = Literal["step", "tokens", "time"]
_Number = TypeVar("_Number", np.float64, np.int64, np.bool_)


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of steps on the chosen axis: the step itself, seconds since `first_time`, or logged tokens."""

    axis: AxisName
    first_time: float = 0.0
    tokens: ScalarPoints | None = None

    def of(self, steps: IntArray, times: FloatArray) -> FloatArray | IntArray:
        """Places of points; NaN where no tokens were logged at or before the step."""
        if self.axis == "step":
            return steps
        if self.axis == "time":
            return times - self.first_time
        if self.tokens is None or not len(self.tokens.steps):
            return np.full(len(steps), np.nan)
        index = np.searchsorted(self.tokens.steps, steps, side="right") - 1
        return np.where(index >= 0, self.tokens.values[np.maximum(index, 0)], np.nan)


def metric_series(
    metric: str,
    points: Mapping[str, Points],
    count: int,
    positions: Mapping[str, Positions],
    layer: str | None = None,
) -> Iterator[tuple[str, wire.Series]]:
    """The metric of each run, from points with one-dimensional totals; minimum and maximum are of single steps.

    Runs that reported the same statistics are finished in one pass; lists are made run by run, so that a caller
    can free one run's before the next is made.
    """
    for group in _stack_by_statistics(points, metric):
        yield from _series_of(metric, group, count, positions, layer)


def _series_of(
    metric: str, group: StackedPoints, count: int, positions: Mapping[str, Positions], layer: str | None
) -> Iterator[tuple[str, wire.Series]]:
    points, size = group.points, len(group.points.steps)
    starts_of = [merge_starts(points.counts[place], count) for place in group.places]
    starts = np.concatenate([at + place.start for at, place in zip(starts_of, group.places, strict=True)])
    last = np.cumsum([len(at) for at in starts_of]).tolist()
    low, high = _extremes(metric, points, starts)
    merged = points.totals if len(starts) == size else reduce_steps(points.totals, axis=0, starts=starts)
    bounds = finished_interval(metric, merged)
    ends = _ends(starts, size)
    steps, times = points.steps[ends], points.times[ends]
    columns: dict[str, NDArray[Any]] = {
        "first_steps": points.first_steps[starts],
        "steps": steps,
        "values": finished(metric, merged, (len(starts),)),
        "minimum": low,
        "maximum": high,
        "ranks": _reduce(np.minimum, points.ranks, starts),  # with a partial step inside, a merged point is partial
        "expected_ranks": _expected(group, starts),
    }
    if bounds is not None:
        columns |= {"low": bounds[0], "high": bounds[1]}
    whole = {name for name, column in columns.items() if np.isfinite(column).all()}
    for run_id, sizes, a, b in zip(group.run_ids, group.world_sizes, [0, *last], last, strict=False):
        own: dict[str, Any] = {
            name: column[a:b].tolist() if name in whole else wire.undefined_to_none(column[a:b])
            for name, column in columns.items()
        }
        axis = positions[run_id].axis
        placed = (
            own["steps"] if axis == "step" else wire.undefined_to_none(positions[run_id].of(steps[a:b], times[a:b]))
        )
        known: dict[str, Any] = {"run_id": run_id, "metric": metric, "layer": layer, "world_size": sizes[-1][1]}
        yield run_id, wire.Series(axis=axis, positions=placed, **known, **own)


def _expected(group: StackedPoints, starts: NDArray[np.intp]) -> IntArray:
    """How many ranks each merged point waits for: the most at one of its partial steps, else the fewest."""
    wanted = []
    for place, sizes in zip(group.places, group.world_sizes, strict=True):
        first_steps, ranks = np.array(sizes, dtype=np.int64).T
        attempt = np.searchsorted(first_steps, group.points.steps[place], side="right") - 1
        wanted.append(ranks[np.maximum(attempt, 0)])
    expected = np.concatenate(wanted)
    lacking = _reduce(np.maximum, np.where(group.points.ranks < expected, expected, 0), starts)
    return np.where(lacking > 0, lacking, _reduce(np.minimum, expected, starts))


def scalar_series(run_id: str, name: str, points: ScalarPoints, count: int, positions: Positions) -> wire.Series:
    """A logged scalar: mean, minimum and maximum in each merged point. A logged NaN stays NaN."""
    starts = merge_starts(np.ones(len(points.steps), dtype=np.int64), count)
    ends = _ends(starts, len(points.steps))
    sizes = np.diff(np.append(starts, len(points.steps)))
    with np.errstate(invalid="ignore", over="ignore"):
        means = _reduce(np.add, points.values, starts) / sizes
    return wire.Series(
        run_id=run_id,
        metric=name,
        layer=None,
        axis=positions.axis,
        first_steps=points.steps[starts].tolist(),
        steps=points.steps[ends].tolist(),
        positions=wire.undefined_to_none(positions.of(points.steps[ends], points.times[ends])),
        values=_logged(means),
        minimum=_logged(_reduce(np.fmin, points.values, starts)),
        maximum=_logged(_reduce(np.fmax, points.values, starts)),
    )


def _extremes(metric: str, points: Points, starts: NDArray[np.intp]) -> tuple[FloatArray, FloatArray]:
    """The metric's minimum and maximum over the single steps of each merged point; NaN where unknown."""
    merged = finished(metric, points.totals, (len(points.steps),))
    single = points.counts == 1
    if single.all():
        return _reduce(np.fmin, merged, starts), _reduce(np.fmax, merged, starts)
    gone = np.full(len(merged), np.nan)
    low, high = (np.where(single, merged, kept) for kept in points.extremes.get(metric, (gone, gone)))
    unknown = _reduce(np.logical_or, np.isnan(low) & ~np.isnan(merged), starts)
    return (
        np.where(unknown, np.nan, _reduce(np.fmin, low, starts)),
        np.where(unknown, np.nan, _reduce(np.fmax, high, starts)),
    )


def _logged(array: FloatArray) -> list[Number | None]:
    return [wire.to_number(value) for value in array.tolist()]


def _ends(starts: NDArray[np.intp], size: int) -> NDArray[np.intp]:
    return np.append(starts[1:], size)[: len(starts)] - 1


def _reduce(ufunc: np.ufunc, array: NDArray[_Number], starts: NDArray[np.intp]) -> NDArray[_Number]:
    reduced: NDArray[_Number] = ufunc.reduceat(array, starts) if len(starts) else array[:0]
    return reduced


MEAN_OF_LAST: Final = 20


def run_summary(
    record: RunRecord, state: str, merged: dict[str, Number | None], newest: Mapping[str, FloatArray]
) -> wire.RunSummary:
    """The run in a comparison; `merged`: its metrics over all measured steps, `newest`: its last logged values."""
    means = {name: _mean(values) for name, values in newest.items()}
    return said_of(wire.RunSummary, record, state=state, merged=merged, mean_scalars=means)


def compared_run(summary: wire.RunSummary, series: wire.Series) -> wire.ComparedRun:
    """The run with its curve."""
    return wire.ComparedRun(series=series, **structs.asdict(summary))


def merged_metrics(points: Mapping[str, Points]) -> dict[str, dict[str, Number | None]]:
    """By run, every metric that the model's totals can make, merged over all of its points."""
    found: dict[str, dict[str, Number | None]] = {run_id: {} for run_id in points}
    measured = {run_id: held for run_id, held in points.items() if len(held.steps)}
    for group in _stack_by_statistics(measured):
        starts = np.array([place.start for place in group.places], dtype=np.intp)
        with np.errstate(divide="ignore", invalid="ignore"):
            table = finish_all(reduce_steps(group.points.totals, axis=0, starts=starts))
        for key, array in table.items():
            for run_id, value in zip(group.run_ids, array.tolist(), strict=True):
                found[run_id][key] = wire.defined(value)
    return found


def _mean(values: FloatArray) -> Number:
    with np.errstate(invalid="ignore", over="ignore"):
        return wire.to_number(float(values[-MEAN_OF_LAST:].mean()))


CLIP_RATIO: Final = "clip_ratio"
UNCLIPPED: Final = "grad_norm_unclipped"


def clip_ratio(measured: Points, unclipped: ScalarPoints) -> ScalarPoints:
    """grad_norm / grad_norm_unclipped at the single measured steps that logged it; undefined ones are left out.

    `measured` holds the statistics of `grad_norm`, one step a point; merged points are left out.
    """
    if not measured.totals or not len(unclipped.steps):
        return ScalarPoints.empty()
    norms = finished("grad_norm", measured.totals, (len(measured.steps),))
    single = np.flatnonzero(measured.counts == 1)
    _, mine, logged = np.intersect1d(measured.steps[single], unclipped.steps, return_indices=True)
    mine = single[mine]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = norms[mine] / unclipped.values[logged]
    known = np.isfinite(ratios)
    return ScalarPoints(measured.steps[mine][known], measured.times[mine][known], ratios[known])
