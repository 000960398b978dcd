"""Points of journal, sealed parts and coarse levels: joined without a seam, merged to coarser ones.

Pure; reading, sealing and exports all merge here, so that a coarse level equals what an answer would have merged.
The rules are `collage_monitor.statistics.merge`'s (`tests/server/store/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from collage_monitor.metrics import METRICS, split_key
from collage_monitor.statistics import finish, merge_starts, metric_keys, reduce_shards, reduce_steps
from collage_monitor.statistics.merge import with_variance_product_roots
from collage_server.store.chunks.blobs import maximum_key, minimum_key
from collage_server.store.records import FloatArray, IntArray, Points, Selection

__all__ = [
    "AttemptPoints",
    "POINT_COLUMNS",
    "coarsen",
    "has_layer_extremes",
    "join",
    "layer_extremes",
    "merged_in_blocks",
    "merged_to_one",
    "model_extremes",
    "model_of",
    "select_points",
]

POINT_COLUMNS: Final = ("first_steps", "steps", "times", "ranks", "counts")
"""Columns of points beside their totals."""
_BLOCK_BYTES: Final = 2**23
"""How much of the layers is merged at a time, if one table of all would be too large."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttemptPoints(Points):
    """Points of one attempt, also those that newer attempts hide."""

    attempt: int


_Points = TypeVar("_Points", bound=Points)


def join(
    tables: Sequence[AttemptPoints],
    bound: Callable[[int], int],
    selection: Selection,
    world_sizes: tuple[tuple[int, int], ...] = ((0, 1),),
    layers: Sequence[str] | None = None,
) -> Points:
    """All visible points of a run's tables in order of their steps; parts of one step are merged as shards.

    A point is visible before `bound(attempt)`; of attempts that share a step only the newest counts.
    """
    ordered = sorted((table for table in tables if len(table.steps)), key=lambda table: int(table.steps[0]))
    points = replace(_concatenated(ordered, layers), world_sizes=world_sizes)
    if not ordered:
        return points
    order = _visible_order(ordered, points.steps, bound, selection)
    as_it_stands = np.array_equal(order, np.arange(len(points.steps)))
    return _merge_equal_steps(points if as_it_stands else select_points(points, order))


def select_points(points: _Points, which: slice | IntArray) -> _Points:
    """Some of the points; with a slice, in the same memory."""
    counted: dict[str, Any] = {name: getattr(points, name)[which] for name in POINT_COLUMNS}
    totals = {key: values[which] for key, values in points.totals.items()}
    extremes = {key: (low[which], high[which]) for key, (low, high) in points.extremes.items()}
    return replace(points, **counted, totals=totals, extremes=extremes)


def _concatenated(tables: Sequence[AttemptPoints], layers: Sequence[str] | None) -> Points:
    """The tables one after the other; NaN where one lacks a total."""
    counted: dict[str, Any] = {
        name: _concatenate([getattr(p, name) for p in tables], name) for name in POINT_COLUMNS
    }
    shape = () if layers is None else (len(layers),)

    def column(values: Iterable[FloatArray | None]) -> FloatArray:
        parts = [
            np.full((len(table.steps), *shape), np.nan) if array is None else array
            for table, array in zip(tables, values, strict=True)
        ]
        return _concatenate(parts, "")

    keys = dict.fromkeys(key for table in tables for key in table.totals)
    totals = {key: column(table.totals.get(key) for table in tables) for key in keys}
    nothing = (None, None)
    metrics = dict.fromkeys(metric for table in tables for metric in table.extremes)
    pairs = {metric: [table.extremes.get(metric, nothing) for table in tables] for metric in metrics}
    return Points(
        **counted,
        totals=with_variance_product_roots(totals),
        extremes={key: (column(a for a, _ in both), column(b for _, b in both)) for key, both in pairs.items()},
        layers=list(layers or ()),
    )


def _concatenate(parts: list[NDArray[Any]], name: str) -> NDArray[Any]:
    if parts:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    return np.zeros(0, dtype=np.float64 if name == "times" else np.int64)


def _visible_order(
    tables: Sequence[AttemptPoints], steps: IntArray, bound: Callable[[int], int], selection: Selection
) -> IntArray:
    attempts = np.repeat([table.attempt for table in tables], [len(table.steps) for table in tables])
    limits = {int(attempt): bound(int(attempt)) for attempt in np.unique(attempts)}
    keep = np.ones(len(steps), dtype=bool)
    for attempt, limit in limits.items():
        keep &= (attempts != attempt) | (steps < limit)
    if selection.first_step is not None:
        keep &= steps >= selection.first_step
    if selection.last_step is not None:
        keep &= steps <= selection.last_step
    order = np.flatnonzero(keep)
    order = order[np.lexsort((attempts[order], steps[order]))]
    if len(limits) > 1 and len(order):
        ordered = steps[order]
        ends = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)
        newest = np.repeat(attempts[order][ends], np.diff(ends, prepend=-1))
        order = order[attempts[order] == newest]
    return order


def _merge_equal_steps(points: Points) -> Points:
    """Merge parts of one step as shards: late ranks have parts of their own."""
    if np.all(points.steps[1:] > points.steps[:-1]):
        return points
    steps, index = np.unique(points.steps, return_inverse=True)
    slots = np.arange(len(index)) - np.searchsorted(points.steps, steps)[index]
    starts = np.flatnonzero(slots == 0)

    def padded(values: FloatArray) -> FloatArray:
        table = np.full((int(slots.max()) + 1, len(steps), *values.shape[1:]), np.nan)
        table[slots, index] = values
        return table

    twice = np.diff(np.append(starts, len(index))) > 1

    def alone(extreme: FloatArray) -> FloatArray:
        # NaN where parts were merged: these are single steps, whose value is the extreme.
        kept = extreme[starts]
        kept[twice] = np.nan
        return kept

    totals = reduce_shards({key: padded(values) for key, values in points.totals.items()}, axis=0)
    for key in totals.keys() & points.totals.keys():
        # A point of several steps holds no root of the merged variances: one that nobody shares stays.
        if split_key(key)[0] == "variance_product_root":
            of_points = twice.reshape(-1, *[1] * (totals[key].ndim - 1))
            totals[key] = np.where(of_points, totals[key], points.totals[key][starts])
    return replace(
        points,
        first_steps=np.minimum.reduceat(points.first_steps, starts),
        steps=steps,
        times=np.maximum.reduceat(points.times, starts),
        ranks=np.add.reduceat(points.ranks, starts),
        counts=np.maximum.reduceat(points.counts, starts),
        totals=totals,
        extremes={key: (alone(low), alone(high)) for key, (low, high) in points.extremes.items()},
    )


_SHOWN_BY_LAYER: Final = frozenset(name for name, entry in METRICS.items() if entry.exposed or entry.interval)


def model_extremes(statistics: Sequence[str]) -> list[str]:
    """Metrics of the model whose extremes are kept: all that these statistics can make."""
    return metric_keys(statistics)


def layer_extremes(statistics: Sequence[str]) -> list[str]:
    """Metrics by layer whose extremes are kept: those on display; others are read at level 1."""
    return [key for key in metric_keys(statistics) if has_layer_extremes(key)]


def has_layer_extremes(key: str) -> bool:
    """Whether coarse points of layers keep this metric's extremes, as those of the model do of every metric."""
    return split_key(key)[0] in _SHOWN_BY_LAYER


def coarsen(table: Points, level: int, points: int, metrics: Sequence[str]) -> tuple[Points, dict[str, FloatArray]]:
    """A whole chunk at a coarser level: each point merges `level` of the chunk's `points` measured ones.

    A late point in between makes the last one larger. Beside it everything to store: totals and extremes by entry.
    """
    starts = np.arange(0, points, level, dtype=np.intp)
    coarse = merged(table, starts)
    stored = dict(coarse.totals)
    with np.errstate(divide="ignore", invalid="ignore"):
        for key in metrics:
            single = finish(key, table.totals)
            stored[minimum_key(key)] = np.fmin.reduceat(single, starts, axis=0)
            stored[maximum_key(key)] = np.fmax.reduceat(single, starts, axis=0)
    return coarse, stored


def merged_to_one(tables: Iterable[AttemptPoints]) -> AttemptPoints:
    """All points of tables with the same totals, one table after the other, merged over their steps to one point.

    Only one table is held at a time.
    """
    whole: AttemptPoints | None = None
    for table in tables:
        whole = merged(table if whole is None else _followed_by(whole, table), np.zeros(1, dtype=np.intp))
    if whole is None:
        raise ValueError("there is no table to merge")
    return whole


def _followed_by(first: AttemptPoints, second: AttemptPoints) -> AttemptPoints:
    counted: dict[str, Any] = {
        name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in POINT_COLUMNS
    }
    totals = {key: np.concatenate([values, second.totals[key]]) for key, values in first.totals.items()}
    return replace(first, **counted, totals=totals)


def merged(table: _Points, starts: NDArray[np.intp]) -> _Points:
    """Points merged over their steps: each from one of `starts` to the next."""
    ends = np.append(starts[1:], len(table.steps)) - 1
    return replace(
        table,
        first_steps=table.first_steps[starts],
        steps=table.steps[ends],
        times=table.times[ends],
        ranks=np.minimum.reduceat(table.ranks, starts),
        counts=np.add.reduceat(table.counts, starts),
        totals=reduce_steps(table.totals, axis=0, starts=starts),
    )


def merged_in_blocks(
    read: Callable[[IntArray], Points], positions: IntArray, layer_bytes: int, selection: Selection
) -> Points:
    """The points of the layers at these positions, in that order, from `read` of layers that follow on each other.

    layer_bytes: the size of one layer in a table. Points are merged to `selection.points` at most.
    """
    width = max(_BLOCK_BYTES // layer_bytes, 1)
    order = np.argsort(positions, kind="stable")
    ordered = positions[order]
    parts: list[Points] = []
    for first in range(int(ordered[0]), int(ordered[-1]) + 1, width):
        chosen = ordered[np.searchsorted(ordered, first) : np.searchsorted(ordered, first + width)]
        if len(chosen):
            block = np.arange(first, min(first + width, int(ordered[-1]) + 1))
            parts.append(_of_layers(_merged(read(block), selection), chosen - first))
    return _of_layers(_beside(parts), np.argsort(order, kind="stable"))


def _merged(points: Points, selection: Selection) -> Points:
    if selection.points is None or not len(points.steps):
        return points
    return merged(points, merge_starts(points.counts, selection.points))


def _of_layers(points: Points, columns: IntArray) -> Points:
    return replace(points, totals={key: values[:, columns] for key, values in points.totals.items()})


def _beside(parts: Sequence[Points]) -> Points:
    totals = {key: np.concatenate([part.totals[key] for part in parts], axis=1) for key in parts[0].totals}
    return replace(parts[0], totals=totals)


def model_of(table: AttemptPoints) -> AttemptPoints:
    """The model's totals from those of its layers: needed where one rank holds shards beside replicas."""
    return replace(table, totals=reduce_shards(table.totals, axis=1))
