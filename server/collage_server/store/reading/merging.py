"""A long queue merged while it is read, where an answer puts its points into buckets anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from collage_server.store.buckets import bucket_width
from collage_server.store.chunks.levels import merged
from collage_server.store.chunks.pieces import Piece, chained, taken
from collage_server.store.contract import IntArray

__all__ = ["merge_buckets"]


def merge_buckets(
    pieces: Iterable[Piece],
    steps: IntArray,
    after: int,
    counts_with: Callable[[Sequence[Piece]], IntArray],
    points: int,
) -> Iterator[Piece]:
    """Pieces of single points, oldest first, with whole buckets merged: what the answer would do, bit for bit.

    `steps` are those of all the pieces, known beforehand. Up to the step `after` there are other points, too:
    there nothing is merged; `counts_with` joins them with what is given, and tells what each point merges.
    """
    early: list[Piece] = []
    late: list[Piece] = []
    width = place = 0
    for piece in pieces:
        cut = int(np.searchsorted(piece.steps, after, side="right"))
        if cut:
            early.append(taken(piece, slice(0, cut)))
            yield early[-1]
        if cut == len(piece.steps):
            continue
        if not width:
            counts = counts_with(early)
            single = np.ones(len(np.unique(steps[steps > after])), dtype=np.int64)
            width, place = bucket_width(np.append(counts, single), points), int(counts.sum())
        late.append(taken(piece, slice(cut, None)))
        if sum(len(held.steps) for held in late) >= 2 * width:
            whole = chained(late)
            size = width * ((place + len(whole.steps)) // width) - place
            yield from _merged(taken(whole, slice(0, size)), width, -place % width)
            late, place = [taken(whole, slice(size, None))], place + size
    if late:
        whole = chained(late)
        size = max(width * ((place + len(whole.steps)) // width) - place, 0)
        yield from _merged(taken(whole, slice(0, size)), width, -place % width)
        yield taken(whole, slice(size, None))


def _merged(piece: Piece, width: int, first: int) -> Iterator[Piece]:
    """Points that end with a bucket; the first bucket that is whole begins at `first`."""
    if first:
        yield taken(piece, slice(0, first))
    if first < len(piece.steps):
        yield merged(taken(piece, slice(first, None)), np.arange(0, len(piece.steps) - first, width, dtype=np.intp))
