"""Pieces of a run (journal, sealed parts, coarse levels) joined without a seam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collage_monitor.statistics import reduce_shards
from collage_server.store.contract import FloatArray, IntArray, Points, Selection

__all__ = ["Piece", "join"]

_COUNTED = ("first_steps", "steps", "times", "ranks", "counts")


@dataclass(frozen=True, eq=False)
class Piece:
    """Points of one attempt, as `Points` has them."""

    attempt: int
    first_steps: IntArray
    steps: IntArray
    times: FloatArray
    ranks: IntArray
    counts: IntArray
    totals: dict[str, FloatArray]
    extremes: dict[str, tuple[FloatArray, FloatArray]] = field(default_factory=dict)


def join(
    pieces: Sequence[Piece],
    bound: Callable[[int], int],
    selection: Selection,
    world_size: int,
    layers: Sequence[str] | None = None,
) -> Points:
    """All visible points of the pieces in order of their steps; parts of one step are merged as shards.

    A point is visible before `bound(attempt)`; of attempts that share a step only the newest counts.
    """
    pieces = [piece for piece in pieces if len(piece.steps)]
    arrays = {name: _concatenate([getattr(piece, name) for piece in pieces], name) for name in _COUNTED}
    attempts = np.concatenate([np.full(len(piece.steps), piece.attempt) for piece in pieces] or [np.zeros(0, int)])
    order = _visible_order(attempts, arrays["steps"], bound, selection)
    whole = len(order) == len(attempts) and bool(np.all(order[1:] > order[:-1]))
    tail = () if layers is None else (len(layers),)

    def picked(parts: list[FloatArray]) -> FloatArray:
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return joined if whole else joined[order]

    missing = [np.full((len(piece.steps), *tail), np.nan) for piece in pieces]
    totals = {
        key: picked([piece.totals.get(key, gap) for piece, gap in zip(pieces, missing, strict=True)])
        for key in dict.fromkeys(key for piece in pieces for key in piece.totals)
    }
    extremes = {
        key: (
            picked([piece.extremes.get(key, (gap, gap))[0] for piece, gap in zip(pieces, missing, strict=True)]),
            picked([piece.extremes.get(key, (gap, gap))[1] for piece, gap in zip(pieces, missing, strict=True)]),
        )
        for key in dict.fromkeys(key for piece in pieces for key in piece.extremes)
    }
    points = Points(
        **{name: values[order] for name, values in arrays.items()},
        world_size=world_size,
        totals=totals,
        extremes=extremes,
        layers=list(layers or ()),
    )
    return _merge_equal_steps(points)


def _concatenate(parts: list[NDArray[Any]], name: str) -> NDArray[Any]:
    if parts:
        return np.concatenate(parts)
    return np.zeros(0, dtype=np.float64 if name == "times" else np.int64)


def _visible_order(
    attempts: IntArray, steps: IntArray, bound: Callable[[int], int], selection: Selection
) -> IntArray:
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
    """Late ranks stand in parts of their own: the parts of one step are shards."""
    steps, index = np.unique(points.steps, return_inverse=True)
    if len(steps) == len(points.steps):
        return points
    slots = np.arange(len(index)) - np.searchsorted(points.steps, steps)[index]
    starts = np.flatnonzero(slots == 0)

    def padded(values: FloatArray) -> FloatArray:
        table = np.full((int(slots.max()) + 1, len(steps), *values.shape[1:]), np.nan)
        table[slots, index] = values
        return table

    return Points(
        first_steps=np.minimum.reduceat(points.first_steps, starts),
        steps=steps,
        times=np.maximum.reduceat(points.times, starts),
        ranks=np.add.reduceat(points.ranks, starts),
        counts=np.maximum.reduceat(points.counts, starts),
        world_size=points.world_size,
        totals=reduce_shards({key: padded(values) for key, values in points.totals.items()}, axis=0),
        layers=points.layers,
    )
