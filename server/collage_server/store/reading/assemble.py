"""From journal rows to points: which rows are visible, and their ranks merged as shards, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from collage_monitor.statistics import Totals, reduce_shards
from collage_server.store.records import FloatArray, IntArray, StreamRecord

__all__ = ["RowOrigins", "RowsByStep", "group_steps", "merge_rows", "visible"]

_MOST_PADDING: Final = 4
"""Side by side, so many times the rows at most: one step of many reports would give every other step their room."""


@dataclass(frozen=True, eq=False)
class RowOrigins:
    """Stream number, attempt, rank, step and time of rows: one entry a row in each array."""

    streams: IntArray
    attempts: IntArray
    ranks: IntArray
    steps: IntArray
    times: FloatArray

    @classmethod
    def of(cls, rows: Sequence[tuple[StreamRecord, int, float]]) -> RowOrigins:
        """RowOrigins of rows given as (stream, step, time)."""
        return cls(
            streams=np.array([stream.number for stream, _, _ in rows], dtype=np.int64),
            attempts=np.array([stream.attempt for stream, _, _ in rows], dtype=np.int64),
            ranks=np.array([stream.rank for stream, _, _ in rows], dtype=np.int64),
            steps=np.array([step for _, step, _ in rows], dtype=np.int64),
            times=np.array([time for _, _, time in rows], dtype=np.float64),
        )

    def __getitem__(self, chosen: NDArray[np.bool_] | IntArray) -> RowOrigins:
        return RowOrigins(
            self.streams[chosen], self.attempts[chosen], self.ranks[chosen], self.steps[chosen], self.times[chosen]
        )


def visible(origins: RowOrigins, first_hidden_steps: Mapping[int, int]) -> NDArray[np.bool_]:
    """Which rows are seen.

    An attempt hides older ones at and after its first step (`first_hidden_steps`: attempt → that step), and
    wherever both have points. Of two processes on one rank of one attempt only the older one is seen: they are
    never merged.
    """
    if not len(origins.steps):
        return np.zeros(0, dtype=bool)
    numbers, which = np.unique(origins.attempts, return_inverse=True)
    limits = np.array(
        [first_hidden_steps.get(int(number), np.iinfo(np.int64).max) for number in numbers], dtype=np.int64
    )
    seen: NDArray[np.bool_] = origins.steps < limits[which]
    _, step = np.unique(origins.steps, return_inverse=True)
    newest = np.full(step.max() + 1, -1, dtype=np.int64)
    np.maximum.at(newest, step[seen], origins.attempts[seen])
    seen &= origins.attempts == newest[step]
    ranks, rank = np.unique(origins.ranks, return_inverse=True)
    cell = step * len(ranks) + rank
    oldest = np.full((step.max() + 1) * len(ranks), np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(oldest, cell[seen], origins.streams[seen])
    seen &= origins.streams == oldest[cell]
    return seen


@dataclass(frozen=True, eq=False)
class RowsByStep:
    """Rows grouped by step: row i is shard `slots[i]` of point `points[i]`."""

    steps: IntArray
    times: FloatArray
    ranks: IntArray
    points: IntArray
    slots: IntArray

    @property
    def shards(self) -> int:
        """The most rows that one step has."""
        return int(self.slots.max(initial=-1)) + 1

    def by_size(self) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_], RowsByStep]]:
        """Which steps, which rows, and these alone: the steps that have about as many rows as each other."""
        sizes = np.bincount(self.points, minlength=len(self.steps))
        classes = np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
        for size in np.unique(classes).tolist():
            steps = classes == size
            rows = steps[self.points]
            place = np.cumsum(steps) - 1
            yield (
                steps,
                rows,
                RowsByStep(
                    self.steps[steps],
                    self.times[steps],
                    self.ranks[steps],
                    place[self.points[rows]],
                    self.slots[rows],
                ),
            )


def group_steps(origins: RowOrigins) -> RowsByStep:
    """Group visible rows by step, oldest step first, in a step by stream; a point's time is the latest of its rows.

    Sums then have the same order, whatever the order in which reports came.
    """
    steps, points = np.unique(origins.steps, return_inverse=True)
    order = np.lexsort((origins.streams, points))
    starts = np.searchsorted(points[order], np.arange(len(steps)))
    slots = np.empty(len(points), dtype=np.int64)
    slots[order] = np.arange(len(points)) - starts[points[order]]
    times = np.full(len(steps), -np.inf)
    np.maximum.at(times, points, origins.times)
    reported = np.unique(np.stack([points, origins.ranks]), axis=1)[0]
    return RowsByStep(steps, times, np.bincount(reported, minlength=len(steps)).astype(np.int64), points, slots)


def merge_rows(grouped: RowsByStep, totals: Totals, replicas: FloatArray | None) -> dict[str, FloatArray]:
    """Totals by point from totals by row [rows, …], rows of one step merged as shards.

    `replicas` ([rows, …], NaN: this row does not hold the layer) leaves, of replicated tensors, only the lowest
    replica that reported; None when every row is a shard of its own.
    """
    if not grouped.shards:
        return {key: values[:0] for key, values in totals.items()}
    if grouped.shards * len(grouped.steps) <= _MOST_PADDING * len(grouped.points):
        return _merge_padded(grouped, totals, replicas)
    found: dict[str, FloatArray] = {}
    for steps, rows, some in grouped.by_size():
        own = {key: values[rows] for key, values in totals.items()}
        for key, values in _merge_padded(some, own, None if replicas is None else replicas[rows]).items():
            found.setdefault(key, np.full((len(steps), *values.shape[1:]), np.nan))[steps] = values
    return found


def _merge_padded(grouped: RowsByStep, totals: Totals, replicas: FloatArray | None) -> dict[str, FloatArray]:
    """The same, each step with room for as many rows as the largest has."""
    padded = {key: _pad(grouped, values) for key, values in totals.items()}
    if replicas is not None and grouped.shards > 1:
        numbers = _pad(grouped, np.where(_reported(totals), replicas, np.nan))
        lowest = np.fmin.reduce(numbers, axis=0)
        foreign = ~(numbers == lowest)
        for values in padded.values():
            values[foreign] = np.nan
    return reduce_shards(padded, axis=0)


def _pad(grouped: RowsByStep, values: FloatArray) -> FloatArray:
    padded = np.full((grouped.shards, len(grouped.steps), *values.shape[1:]), np.nan)
    padded[grouped.slots, grouped.points] = values
    return padded


def _reported(totals: Totals) -> NDArray[np.bool_]:
    any_reported: NDArray[np.bool_] = np.logical_or.reduce([~np.isnan(values) for values in totals.values()])
    return any_reported
