"""A metric or a logged scalar over a run, merged into buckets of measured points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from collage_monitor import wire
from collage_monitor.statistics import reduce_steps
from collage_monitor.wire import Number
from collage_server.queries.finished import finished, finished_interval, values
from collage_server.queries.side_by_side import SideBySide, alike
from collage_server.store.buckets import bucket_starts
from collage_server.store.contract import FloatArray, IntArray, Points, ScalarPoints

__all__ = ["Axis", "Positions", "metric_series", "scalar_series"]

Axis = Literal["step", "tokens", "time"]
_Number = TypeVar("_Number", np.float64, np.int64, np.bool_)


@dataclass(frozen=True, eq=False)
class Positions:
    """Where steps stand on the asked axis: on themselves, on seconds since `first_time`, or on logged tokens."""

    axis: Axis
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

    Runs that reported the same statistics are finished in one pass; lists are made run by run, so that one who is
    done with a run gives its memory to the next.
    """
    for group in alike(points, metric):
        yield from _series_of(metric, group, count, positions, layer)


def _series_of(
    metric: str, group: SideBySide, count: int, positions: Mapping[str, Positions], layer: str | None
) -> Iterator[tuple[str, wire.Series]]:
    points, size = group.points, len(group.points.steps)
    starts_of = _starts_of(group.split(points.counts), count)
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
        "ranks": _reduce(np.minimum, points.ranks, starts),  # with a partial step inside, a bucket is partial
    }
    if bounds is not None:
        columns |= {"low": bounds[0], "high": bounds[1]}
    whole = {name for name, column in columns.items() if np.isfinite(column).all()}
    shared: dict[bytes, list[Any]] = {}
    for run_id, world_size, a, b in zip(group.run_ids, group.world_sizes, [0, *last], last, strict=False):
        own: dict[str, Any] = {
            name: _listed(column[a:b], shared) if name in whole else values(column[a:b])
            for name, column in columns.items()
        }
        axis = positions[run_id].axis
        placed = own["steps"] if axis == "step" else values(positions[run_id].of(steps[a:b], times[a:b]))
        known: dict[str, Any] = {"run_id": run_id, "metric": metric, "layer": layer, "world_size": world_size}
        yield run_id, wire.Series(axis=axis, positions=placed, **known, **own)


def _starts_of(counts: list[NDArray[np.int64]], count: int) -> list[NDArray[np.intp]]:
    """First indices of each run's buckets, found once where runs have the same points."""
    found: dict[bytes, NDArray[np.intp]] = {}
    keys = [own.tobytes() for own in counts]
    for key, own in zip(keys, counts, strict=True):
        if key not in found:
            found[key] = bucket_starts(own, count)
    return [found[key] for key in keys]


def _listed(array: NDArray[Any], shared: dict[bytes, list[Any]]) -> list[Any]:
    """Finite values; those of whole numbers are made once where runs have the same, as those of a sweep have."""
    key = array.tobytes() if array.dtype.kind == "i" else b""
    made = shared.get(key)
    if made is None:
        made = array.tolist()
        if key:
            shared[key] = made
    return made


def scalar_series(run_id: str, name: str, points: ScalarPoints, count: int, positions: Positions) -> wire.Series:
    """A logged scalar: mean, minimum and maximum in each bucket. A logged NaN stays NaN, it is not undefined."""
    starts = bucket_starts(np.ones(len(points.steps), dtype=np.int64), count)
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
        positions=values(positions.of(points.steps[ends], points.times[ends])),
        values=_logged(means),
        minimum=_logged(_reduce(np.fmin, points.values, starts)),
        maximum=_logged(_reduce(np.fmax, points.values, starts)),
    )


def _extremes(metric: str, points: Points, starts: NDArray[np.intp]) -> tuple[FloatArray, FloatArray]:
    """The metric's minimum and maximum over the single steps of each bucket; undefined where nobody knows them."""
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
