"""Totals by layer that are too many bytes for one table: some layers at a time, merged to the points wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from collage_monitor.statistics import merge_starts
from collage_server.store.chunks.contributors import Contributors
from collage_server.store.chunks.merge import AttemptPoints, merged
from collage_server.store.reading.plan import ReadPlan
from collage_server.store.reading.run_view import RunView
from collage_server.store.reading.unsealed import layer_table, merged_tables
from collage_server.store.records import IntArray, Points, Selection

__all__ = ["LayerTables", "is_large", "layer_bytes", "layer_tables", "read_in_blocks"]

_MOST_BYTES: Final = 2**26
"""Of one table [statistic][point][layer]."""
_BLOCK_BYTES: Final = 2**24


@dataclass(frozen=True)
class LayerTables:
    """Tables of the layers that some report brings; `positions` ascend."""

    tables: list[AttemptPoints]
    positions: IntArray

    def at(self, wanted: IntArray) -> list[AttemptPoints]:
        """The tables of the layers at these positions, in that order; NaN of those that none brings."""
        if np.array_equal(self.positions, wanted):
            return self.tables
        place = np.minimum(np.searchsorted(self.positions, wanted), max(len(self.positions) - 1, 0))
        targets = np.flatnonzero(self.positions[place] == wanted) if len(self.positions) else place[:0]
        found = []
        for table in self.tables:
            totals = {key: np.full((len(table.steps), len(wanted)), np.nan) for key in table.totals}
            for key, values in table.totals.items():
                totals[key][:, targets] = values[:, place[targets]]
            found.append(replace(table, totals=totals))
        return found


def layer_tables(
    view: RunView, plan: ReadPlan, keys: Sequence[str], positions: IntArray, selection: Selection
) -> LayerTables:
    """Unsealed totals by layer, of those of the layers at these positions that some report brings."""
    shapes = {(row.stream_id, row.layer_count) for rows in plan.unsealed.values() for row in rows}
    brought = [view.streams[stream_id].layers[:count] for stream_id, count in shapes]
    held = np.unique(np.concatenate(brought)) if brought else np.zeros(0, dtype=np.int64)
    held = np.intersect1d(held, positions, assume_unique=True)

    def table_of(attempt: int, rows: Sequence[Any], contributors: Contributors) -> AttemptPoints:
        return layer_table(view, attempt, rows, keys, held, contributors)

    row_bytes, point_bytes = (8 * len(keys) * len(some) for some in (held, positions))
    tables = merged_tables(
        view, plan.unsealed, plan.contributors, selection, row_bytes, table_of, point_bytes=point_bytes
    )
    return LayerTables(list(tables), held)


def layer_bytes(plan: ReadPlan, waiting: LayerTables, keys: Sequence[str]) -> int:
    """Bytes of one layer at all points and statistics."""
    sealed = sum(-(-info.point_count // level) for (_, level), infos in plan.infos.items() for info in infos)
    return 8 * max(len(keys), 1) * max(sealed + sum(len(table.steps) for table in waiting.tables), 1)


def is_large(size: int, selection: Selection) -> bool:
    """Whether a table of so many bytes is too large for one piece, and few points are wanted of it."""
    few = (selection.points is not None or selection.at is not None) and not selection.extremes_of
    return few and size > _MOST_BYTES


def read_in_blocks(
    read: Callable[[IntArray], Points], positions: IntArray, layer_bytes: int, selection: Selection
) -> Points:
    """The points of the layers at these positions, in that order, from `read` of layers that follow on each other.

    layer_bytes: what one layer takes of a table. Points are merged to `selection.points` at most.
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
