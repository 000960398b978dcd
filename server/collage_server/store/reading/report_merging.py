"""From journal rows to points: which rows are visible, and how their ranks are merged as shards, step by step.

`unsealed.py`, logged scalars and the comparison of replicas merge by it. Merging follows the catalogue's rules, and
which launch hides which is fixed by `docs/reference/resume.md`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Row

from collage_monitor.statistics import Totals, reduce_shards
from collage_monitor.totals_table import Axis, Table
from collage_server.store.records import FloatArray, IntArray, StreamRecord

__all__ = [
    "RowOrigins",
    "RowsByStep",
    "Streams",
    "decode_layers",
    "decode_model",
    "group_steps",
    "layer_replicas",
    "merge_rows",
    "model_replica",
    "visible",
]

Streams = Mapping[str, StreamRecord]
_DECODED_AT_ONCE: Final = 2**22
"""Bytes of totals by layer, side by side: all at once they would stand in memory twice."""

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
    wherever both have points; second writers, who count downwards, only there. If two processes report as one rank
    of an attempt, only the older one is seen: they are never merged.
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
    ages = np.abs(origins.attempts)
    np.maximum.at(newest, step[seen], ages[seen])
    seen &= ages == newest[step]
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
    """Group visible rows by step, oldest first, and within a step by stream; a point's time is the latest of its
    rows.

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


def decode_model(streams: Streams, rows: Sequence[Row[Any]], keys: Sequence[str]) -> Table[FloatArray]:
    """Model totals [rows] by key; NaN where a row's stream does not declare the key."""
    values = np.full((len(keys), len(rows)), np.nan)
    declared: dict[tuple[str, ...], list[IntArray]] = defaultdict(list)
    for (stream_id, count), members in _rows_by_shape(rows, "statistic_count"):
        declared[streams[stream_id].statistics[:count]].append(members)
    for statistics, parts in declared.items():
        members = np.concatenate(parts)
        data = b"".join(rows[i].model for i in members.tolist())
        totals = np.frombuffer(data, dtype="<f8").reshape(len(members), len(statistics))
        for target, source in _columns(keys, statistics):
            values[target, members] = totals[:, source]
    return Table(Axis(keys), None, values)


def decode_layers(
    streams: Streams, rows: Sequence[Row[Any]], keys: Sequence[str], positions: IntArray
) -> Table[FloatArray]:
    """Layer totals [rows, layers] by key, of the layers at these positions of the run's dictionary."""
    values = np.full((len(keys), len(rows), len(positions)), np.nan)
    order = np.argsort(positions)
    ordered = positions[order]
    for (stream_id, statistic_count, layer_count), members in _rows_by_shape(
        rows, "statistic_count", "layer_count"
    ):
        stream = streams[stream_id]
        held = stream.layers[:layer_count]
        place = np.minimum(np.searchsorted(ordered, held), max(len(ordered) - 1, 0))
        sources = np.flatnonzero(ordered[place] == held) if len(ordered) else place[:0]
        if not len(sources):
            continue
        targets = order[place[sources]]
        columns = _columns(keys, stream.statistics[:statistic_count])
        width = max(_DECODED_AT_ONCE // max(8 * statistic_count * layer_count, 1), 1)
        for start in range(0, len(members), width):
            some = members[start : start + width]
            data = b"".join(rows[i].statistics for i in some.tolist())
            totals = np.frombuffer(data, dtype="<f8").reshape(len(some), statistic_count, layer_count)
            for target, source in columns:
                values[target, some[:, None], targets[None, :]] = totals[:, source][:, sources]
    return Table(Axis(keys), None, values)


def model_replica(stream: StreamRecord) -> float:
    """The replica number of all the stream's layers, where it is one number."""
    return float(stream.replicas[0]) if len(stream.replicas) else 0.0


def layer_replicas(stream: StreamRecord, positions: IntArray) -> FloatArray:
    """Replica numbers of the layers at these positions; NaN where the stream does not hold the layer."""
    placed = np.full(max(int(stream.layers.max(initial=-1)), int(positions.max(initial=-1))) + 1, np.nan)
    placed[stream.layers] = stream.replicas
    return placed[positions]


def _rows_by_shape(rows: Sequence[Row[Any]], *shape: str) -> list[tuple[tuple[Any, ...], IntArray]]:
    """Indices of rows that can be decoded together: same stream, same counts."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[(row.stream_id, *(getattr(row, name) for name in shape))].append(index)
    return [(key, np.array(members, dtype=np.int64)) for key, members in groups.items()]


def _columns(keys: Sequence[str], declared: Sequence[str]) -> list[tuple[int, int]]:
    sources = {key: index for index, key in enumerate(declared)}
    return [(target, sources[key]) for target, key in enumerate(keys) if key in sources]
