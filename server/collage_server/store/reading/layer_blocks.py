"""Totals by layer that are too many bytes for one table: some layers at a time, merged to the points wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from collage_monitor.statistics import merge_starts
from collage_server.store.chunks.merge import merged
from collage_server.store.records import IntArray, Points, Selection

__all__ = ["read_in_blocks"]

_BLOCK_BYTES: Final = 2**24


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
