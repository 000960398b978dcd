"""Pieces of a run (journal, sealed parts, coarse levels) joined without a seam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collage_monitor.statistics import reduce_shards
from collage_monitor.statistics.merge import with_variance_product_roots
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
    pieces = sorted((piece for piece in pieces if len(piece.steps)), key=lambda piece: int(piece.steps[0]))
    arrays = {name: _concatenate([getattr(piece, name) for piece in pieces], name) for name in _COUNTED}
    whole = _in_order(pieces, arrays["steps"], bound, selection)
    order = None if whole else _visible_order(pieces, arrays["steps"], bound, selection)
    tail = () if layers is None else (len(layers),)

    def picked(parts: list[FloatArray]) -> FloatArray:
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return joined if order is None else joined[order]

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
        **(arrays if order is None else {name: values[order] for name, values in arrays.items()}),
        world_size=world_size,
        totals=with_variance_product_roots(totals),
        extremes=extremes,
        layers=list(layers or ()),
    )
    return points if whole else _merge_equal_steps(points)


def _concatenate(parts: list[NDArray[Any]], name: str) -> NDArray[Any]:
    if parts:
        return np.concatenate(parts)
    return np.zeros(0, dtype=np.float64 if name == "times" else np.int64)


def _in_order(pieces: Sequence[Piece], steps: IntArray, bound: Callable[[int], int], selection: Selection) -> bool:
    """Whether the pieces, one after the other, are what is asked for already: nothing hidden, no step twice."""
    if not pieces:
        return True
    first, last = selection.first_step or 0, selection.last_step
    inside = int(steps[0]) >= first and (last is None or int(steps[-1]) <= last)
    one = {piece.attempt for piece in pieces} == {pieces[0].attempt} and int(steps[-1]) < bound(pieces[0].attempt)
    return inside and one and bool(np.all(steps[1:] > steps[:-1]))


def _visible_order(
    pieces: Sequence[Piece], steps: IntArray, bound: Callable[[int], int], selection: Selection
) -> IntArray:
    attempts = np.repeat([piece.attempt for piece in pieces], [len(piece.steps) for piece in pieces])
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
