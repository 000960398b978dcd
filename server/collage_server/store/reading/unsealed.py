"""Points that still stand in the journal, as pieces."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import Row

from collage_monitor.statistics import reduce_shards
from collage_monitor.statistics.merge import with_variance_product_roots
from collage_server.store.chunks.contributors import Contributors
from collage_server.store.chunks.pieces import Piece, taken
from collage_server.store.contract import FloatArray, IntArray
from collage_server.store.journal.decode import decode_layers, decode_model, layer_replicas, model_replica
from collage_server.store.reading.assemble import Places, group_steps, merge_rows, visible
from collage_server.store.reading.run_view import RunView

__all__ = [
    "alone",
    "layer_piece",
    "model_of",
    "model_piece",
    "model_pieces",
    "seen_rows",
]


def model_piece(
    view: RunView, attempt: int, rows: Sequence[Row[Any]], keys: Sequence[str], known: Contributors, shards: int = 0
) -> Piece:
    """Rows of one attempt merged to the model's totals by step; `shards` as in `merge_rows`."""
    if alone(rows, known):
        return model_pieces({view.run_id: view}, {(view.run_id, attempt): rows}, keys)[view.run_id, attempt]

    def replicas(stream_id: str) -> FloatArray:
        return np.array(model_replica(view.streams[stream_id]))

    rows = seen_rows(view, rows, known)
    totals = dict(zip(keys, decode_model(view.streams, rows, keys), strict=True))
    return _piece(view, attempt, rows, totals, known, replicas, shards)


def model_pieces(
    views: Mapping[str, RunView],
    waiting: Mapping[tuple[str, int], Sequence[Row[Any]]],
    wanted: Collection[str] | None,
) -> dict[tuple[str, int], Piece]:
    """The same of rows that stand `alone`, by run and attempt: all of them are decoded together."""
    alike: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for owner in waiting:
        alike[tuple(views[owner[0]].statistics(wanted))].append(owner)
    found = {}
    for keys, owners in alike.items():
        streams = {name: stream for run_id, _ in owners for name, stream in views[run_id].streams.items()}
        rows = [row for owner in owners for row in waiting[owner]]
        totals = dict(zip(keys, decode_model(streams, rows, keys), strict=True))
        whole = _piece_of_one(0, rows, totals)
        start = 0
        for owner in owners:
            stop = start + len(waiting[owner])
            found[owner] = replace(taken(whole, slice(start, stop)), attempt=owner[1])
            start = stop
    return found


def layer_piece(
    view: RunView,
    attempt: int,
    rows: Sequence[Row[Any]],
    keys: Sequence[str],
    positions: IntArray,
    known: Contributors,
    shards: int = 0,
) -> Piece:
    """Rows of one attempt merged to totals by step and layer; `shards` as in `merge_rows`."""
    if alone(rows, known):
        blocks = decode_layers(view.streams, rows, keys, positions)
        return _piece_of_one(attempt, rows, dict(zip(keys, blocks, strict=True)))
    cache: dict[str, FloatArray] = {}

    def replicas(stream_id: str) -> FloatArray:
        if stream_id not in cache:
            cache[stream_id] = layer_replicas(view.streams[stream_id], positions)
        return cache[stream_id]

    rows = seen_rows(view, rows, known)
    blocks = decode_layers(view.streams, rows, keys, positions)
    return _piece(view, attempt, rows, dict(zip(keys, blocks, strict=True)), known, replicas, shards)


def alone(rows: Sequence[Row[Any]], known: Contributors) -> bool:
    """Whether one stream reported every step once, and nothing of it is sealed: nothing is to be merged."""
    alike = len({row.stream_id for row in rows}) == 1
    return alike and not known and all(a.step < b.step for a, b in itertools.pairwise(rows))


def _piece_of_one(attempt: int, rows: Sequence[Row[Any]], totals: dict[str, FloatArray]) -> Piece:
    steps = np.array([row.step for row in rows], dtype=np.int64)
    times = np.array([row.time for row in rows], dtype=np.float64)
    ones = np.ones(len(rows), dtype=np.int64)
    return Piece(attempt, steps, steps, times, ones, ones, with_variance_product_roots(totals))


def model_of(piece: Piece) -> Piece:
    """The model's totals from those of its layers: needed where one rank holds shards beside replicas."""
    return Piece(
        piece.attempt,
        piece.first_steps,
        piece.steps,
        piece.times,
        piece.ranks,
        piece.counts,
        reduce_shards(piece.totals, axis=1),
    )


def seen_rows(view: RunView, rows: Sequence[Row[Any]], known: Contributors) -> list[Row[Any]]:
    """Without second processes of a rank: where one stands in a sealed part of the step, no other one is added.

    Several reports of one process about one step are shards of it, and each of them comes once.
    """
    rows = [row for row in rows if not (view.is_contested(row.stream_id) and _is_known(view, row, known))]
    seen = visible(_places(view, rows), {})
    return [row for row, kept in zip(rows, seen.tolist(), strict=True) if kept]


def _is_known(view: RunView, row: Row[Any], known: Contributors) -> bool:
    """Whether the row's rank stands in a sealed part of its step."""
    return view.streams[row.stream_id].rank in known.get(row.step, ())


def _places(view: RunView, rows: Sequence[Row[Any]]) -> Places:
    return Places.of([(view.streams[row.stream_id], row.step, row.time) for row in rows])


def _piece(
    view: RunView,
    attempt: int,
    rows: Sequence[Row[Any]],
    totals: dict[str, FloatArray],
    known: Contributors,
    replicas_of: Callable[[str], FloatArray],
    shards: int,
) -> Piece:
    grouped = group_steps(_places(view, rows))
    replicas = None
    if view.replicated and rows:
        replicas = np.stack([replicas_of(row.stream_id) for row in rows])
        _leave_out_replicas(view, attempt, rows, totals, known, replicas, replicas_of)
    merged = merge_rows(grouped, totals, replicas, shards)
    return Piece(
        attempt=attempt,
        first_steps=grouped.steps,
        steps=grouped.steps,
        times=grouped.times,
        ranks=grouped.ranks - _counted_already(view, rows, grouped.steps, known),
        counts=np.ones(len(grouped.steps), dtype=np.int64),
        totals=merged,
    )


def _counted_already(view: RunView, rows: Sequence[Row[Any]], steps: IntArray, known: Contributors) -> IntArray:
    """How many of the ranks at each of these steps stand in sealed parts of it, too."""
    again = {(row.step, view.streams[row.stream_id].rank) for row in rows if _is_known(view, row, known)}
    return np.bincount(np.searchsorted(steps, [step for step, _ in again]), minlength=len(steps))


def _leave_out_replicas(
    view: RunView,
    attempt: int,
    rows: Sequence[Row[Any]],
    totals: Mapping[str, FloatArray],
    known: Contributors,
    replicas: FloatArray,
    replicas_of: Callable[[str], FloatArray],
) -> None:
    """Blank, in late rows, what a sealed part has from another replica already: what is sealed stays."""
    stream_of = {stream.rank: stream.stream_id for stream in view.streams.values() if stream.attempt == attempt}
    for index, row in enumerate(rows):
        ranks = [rank for rank in known.get(row.step, ()) if rank in stream_of]
        if not ranks:
            continue
        lowest = np.fmin.reduce([replicas_of(stream_of[rank]) for rank in ranks], axis=0)
        for values in totals.values():
            values[index] = np.where((replicas[index] != lowest) & ~np.isnan(lowest), np.nan, values[index])
