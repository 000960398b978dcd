"""Reading points of runs: journal, sealed parts and coarse levels joined. Only asked columns are decoded.

Several runs are read together: as many statements as one run takes, and one pass over their blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from sqlalchemy import Connection

from collage_server.errors import Unprocessable
from collage_server.store.chunks.blocks import (
    Chunks,
    PointRows,
    maximum_key,
    minimum_key,
    read_layer_data,
    read_model_data,
    read_point_rows,
)
from collage_server.store.chunks.cache import ChunkCache
from collage_server.store.chunks.contributors import Contributors, rank_contributed
from collage_server.store.chunks.levels import has_layer_extremes
from collage_server.store.chunks.pieces import Piece, join, taken
from collage_server.store.contract import FloatArray, IntArray, LatestPoint, Points, Selection
from collage_server.store.reading import unsealed
from collage_server.store.reading.merging import merge_buckets
from collage_server.store.reading.plan import ReadPlan, plan_read
from collage_server.store.reading.run_view import UNBOUNDED, RunView, chosen_layers, is_known, read_views
from collage_server.store.reading.waiting import SLAB_BYTES, Slab, Waiting, read_waiting
from collage_server.store.runs.latest import newest_measured_step

__all__ = [
    "model_points_of",
    "read_latest",
    "read_layer_points",
    "read_model_points",
    "sealed_layers",
    "sealed_model",
]

Views = Mapping[str, RunView]
Pieces = dict[str, list[Piece]]


def read_model_points(
    connection: Connection,
    run_ids: Sequence[str],
    wanted: Collection[str] | None,
    selection: Selection,
    cache: ChunkCache,
    slab_bytes: int = SLAB_BYTES,
) -> dict[str, Points]:
    """The whole model's totals by run, from model vectors alone where replicas allow it."""
    views = read_views(connection, run_ids, _needed(wanted, selection))
    return model_points_of(connection, views, wanted, selection, cache, slab_bytes)


def model_points_of(
    connection: Connection,
    views: Views,
    wanted: Collection[str] | None,
    selection: Selection,
    cache: ChunkCache,
    slab_bytes: int = SLAB_BYTES,
) -> dict[str, Points]:
    """The same for runs that are looked at already."""
    mixed = [run for run, view in views.items() if view.mixed]
    plans = _plans(connection, views, selection, cache, slab_bytes, mixed)
    pieces: Pieces = {run_id: [] for run_id in views}
    for level, chunks in _by_level(plans).items():
        known = None if level == 1 or selection.rank is not None else cache
        for run_id, found in _known_model(
            connection, views, plans, level, chunks, wanted, selection, known
        ).items():
            pieces[run_id] += found
    for run_id, unsealed_pieces in _unsealed_model(views, plans, wanted).items():
        pieces[run_id] += unsealed_pieces
    return _joined(views, pieces, selection)


def _known_model(
    connection: Connection,
    views: Views,
    plans: Mapping[str, ReadPlan],
    level: int,
    chunks: Chunks,
    wanted: Collection[str] | None,
    selection: Selection,
    cache: ChunkCache | None,
) -> Pieces:
    """`sealed_model`, of what is not in memory."""
    chosen = {run_id: views[run_id] for run_id, _ in chunks}
    if cache is None:
        return sealed_model(connection, chosen, level, chunks, wanted, selection)
    places = {owner: (owner, level, plans[owner[0]].infos[owner[1], level]) for owner in chunks}
    found: Pieces = {run_id: [] for run_id in chosen}
    metric = selection.extremes_of
    missing: dict[tuple[str, int], Sequence[int]] = {}
    for owner, numbers in chunks.items():
        entries = views[owner[0]].entries
        totals = _keys({owner[0]: views[owner[0]]}, wanted, None, level)
        shown = metric if metric is not None and minimum_key(metric) in entries else None
        piece = cache.known(places[owner], totals, shown)
        if piece is None:
            missing[owner] = numbers
        else:
            found[owner[0]].append(piece)
    if missing:
        left = {run_id: views[run_id] for run_id, _ in missing}
        for run_id, read in sealed_model(connection, left, level, missing, wanted, selection).items():
            found[run_id] += read
            for piece in read:
                cache.keep(places[run_id, piece.attempt], piece)
    return found


def read_layer_points(
    connection: Connection,
    run_ids: Sequence[str],
    wanted: Collection[str],
    selection: Selection,
    cache: ChunkCache,
    layers: Sequence[str] | None = None,
    slab_bytes: int = SLAB_BYTES,
) -> dict[str, Points]:
    """Totals by layer: of each block only the asked statistics and layers are kept.

    Several runs are read together only with `layers` given.
    """
    if selection.extremes_of is not None and not has_layer_extremes(selection.extremes_of):
        selection = replace(selection, points=None, extremes_of=None)
    views = read_views(connection, run_ids, _needed(wanted, selection))
    chosen = chosen_layers(connection, views, layers)
    positions = {run_id: np.array(list(held.values()), dtype=np.int64) for run_id, held in chosen.items()}
    plans = _plans(connection, views, selection, cache, slab_bytes, views)
    if selection.rank is not None:
        _check_one_rank(views, selection.rank)
    pieces: Pieces = {run_id: [] for run_id in views}
    for level, chunks in _by_level(plans).items():
        held = {run_id: views[run_id] for run_id, _ in chunks}
        found = sealed_layers(connection, held, level, chunks, wanted, positions, selection.extremes_of)
        for run_id, more in found.items():
            pieces[run_id] += more
    names = list(next(iter(chosen.values())))
    for run_id, plan in plans.items():
        view = views[run_id]
        for attempt, waiting in sorted(plan.waiting.items()):
            known = plan.known.get(attempt, {})
            slabs = _unsealed_layers(view, attempt, waiting, known, wanted, positions[run_id])
            if selection.buckets and waiting.rows is None and view.bound(attempt) == UNBOUNDED:
                slabs = _in_buckets(view, slabs, waiting.steps, pieces[run_id], selection, names)
            pieces[run_id] += slabs
    return _joined(views, pieces, selection, names)


def _in_buckets(
    view: RunView,
    pieces: Iterable[Piece],
    steps: IntArray,
    others: Sequence[Piece],
    selection: Selection,
    names: Sequence[str],
) -> Iterable[Piece]:
    """`merge_buckets` beside `others`, which are all that is older."""

    def counts_with(more: Sequence[Piece]) -> IntArray:
        return _joined({view.run_id: view}, {view.run_id: [*others, *more]}, selection, names)[view.run_id].counts

    after = max((int(piece.steps.max()) for piece in others if len(piece.steps)), default=-1)
    return list(merge_buckets(pieces, steps, after, counts_with, selection.points or 1))


def _joined(
    views: Views, pieces: Pieces, selection: Selection, layers: Sequence[str] | None = None
) -> dict[str, Points]:
    sizes = {run_id: view.world_size for run_id, view in views.items()}
    return join(pieces, lambda run_id, attempt: views[run_id].bound(attempt), selection, sizes, layers)


def _needed(wanted: Collection[str] | None, selection: Selection) -> list[str] | None:
    """Keys of the run's dictionary that may be read; None: all."""
    metric = selection.extremes_of
    if wanted is None:
        return None
    return [*wanted, *((minimum_key(metric), maximum_key(metric)) if metric is not None else ())]


def _plans(
    connection: Connection,
    views: Views,
    selection: Selection,
    cache: ChunkCache,
    slab_bytes: int,
    mixed: Collection[str],
) -> dict[str, ReadPlan]:
    """What is read of each run; of those in `mixed` the journal's layers, else its model vectors."""
    for view in views.values():
        view.check_rank(selection.rank)
    infos = cache.directories.read(connection, {run_id: view.sealed_ranges for run_id, view in views.items()})
    plain = {run_id: view for run_id, view in views.items() if run_id not in mixed}
    others = {run_id: view for run_id, view in views.items() if run_id in mixed}
    waiting = read_waiting(connection, plain, selection, slab_bytes, layers=False)
    waiting |= read_waiting(connection, others, selection, slab_bytes, layers=True)
    return {run_id: plan_read(view, waiting[run_id], selection, infos[run_id]) for run_id, view in views.items()}


def _by_level(plans: Mapping[str, ReadPlan]) -> dict[int, Chunks]:
    levels: dict[int, dict[tuple[str, int], list[int]]] = defaultdict(dict)
    for run_id, plan in plans.items():
        for (attempt, level), chunks in plan.chunks.items():
            levels[level][run_id, attempt] = chunks
    return dict(levels)


def _unsealed_model(views: Views, plans: Mapping[str, ReadPlan], wanted: Collection[str] | None) -> Pieces:
    found: Pieces = {run_id: [] for run_id in views}
    alone = {}
    for run_id, plan in plans.items():
        view = views[run_id]
        for attempt, waiting in plan.waiting.items():
            known = plan.known.get(attempt, {})
            if waiting.rows is not None and unsealed.alone(waiting.rows, known) and not view.mixed:
                alone[run_id, attempt] = waiting.rows
                continue
            keys = view.statistics(wanted)
            for slab in waiting.slabs(view, known):
                found[run_id].append(_model_piece(view, attempt, slab, keys, known))
    for (run_id, _), piece in unsealed.model_pieces(views, alone, wanted).items():
        found[run_id].append(piece)
    return found


def _model_piece(view: RunView, attempt: int, slab: Slab, keys: Sequence[str], known: Contributors) -> Piece:
    if not view.mixed:
        return unsealed.model_piece(view, attempt, slab.rows, keys, known, slab.shards)
    positions = np.array(list(view.layers.values()), dtype=np.int64)
    return unsealed.model_of(unsealed.layer_piece(view, attempt, slab.rows, keys, positions, known, slab.shards))


def _unsealed_layers(
    view: RunView, attempt: int, waiting: Waiting, known: Contributors, wanted: Collection[str], positions: IntArray
) -> Iterable[Piece]:
    keys = view.statistics(wanted)
    for slab in waiting.slabs(view, known):
        yield unsealed.layer_piece(view, attempt, slab.rows, keys, positions, known, slab.shards)


def _check_one_rank(views: Views, rank: int) -> None:
    """Layers are kept with all ranks merged; one rank alone is known where there is no other."""
    for run_id, view in views.items():
        ranks = {record.rank for record in view.streams.values()}
        if ranks - {rank}:
            raise Unprocessable(
                f"run {run_id!r} has {len(ranks)} ranks: its layers are kept with all ranks merged, single ranks "
                "as totals of their whole model; leave rank out, or leave layer, pattern and module_type out",
                field="rank",
            )


def sealed_model(
    connection: Connection,
    views: Views,
    level: int,
    chunks: Chunks,
    wanted: Collection[str] | None,
    selection: Selection,
) -> Pieces:
    """Sealed points of the model at a level, by run; with `selection.rank` those of one rank."""
    rank = selection.rank
    several = {
        (run_id, attempt): numbers
        for (run_id, attempt), numbers in chunks.items()
        if rank is not None and views[run_id].ranks(attempt) != {rank}
    }
    merged = {owner: numbers for owner, numbers in chunks.items() if owner not in several}
    keys = _keys(views, wanted, selection.extremes_of, level)
    points = read_point_rows(connection, level, merged)
    values = read_model_data(connection, level, merged, points, _entries(views), keys)
    found = _pieces(views, level, points, keys, values)
    for owner, numbers in several.items():
        found[owner[0]] += _of_one_rank(connection, views[owner[0]], {owner: numbers}, keys, rank or 0)
    return found


def _of_one_rank(
    connection: Connection, view: RunView, chunks: Chunks, keys: Sequence[str], rank: int
) -> list[Piece]:
    """Only the points to which the rank contributed; where it was the only one, the merged totals are its own.

    None where single points are gone: coarse ones are of all ranks.
    """
    [(_, attempt)] = chunks
    views = {view.run_id: view}
    points = read_point_rows(connection, 1, chunks)
    values = read_model_data(connection, 1, chunks, points, _entries(views), keys, rank)
    merged = read_model_data(connection, 1, chunks, points, _entries(views), keys)
    there = np.zeros(len(points.steps), dtype=bool)
    contributed = rank_contributed(connection, view.run_id, attempt, chunks[view.run_id, attempt], rank)
    for (chunk, part), (present, alone) in contributed.items():
        start = points.where[view.run_id, attempt, chunk, part]
        place = slice(start, start + len(present))
        there[place] = present
        if alone and not view.replicated:
            values[:, place] = merged[:, place]
    pieces = []
    for piece in _pieces(views, 1, points, keys, values)[view.run_id]:
        held = taken(piece, np.flatnonzero(there))
        ranks = np.zeros(len(held.steps), dtype=np.int64)
        ranks[np.unique(held.steps, return_index=True)[1]] = 1
        pieces.append(replace(held, ranks=ranks))
    return pieces


def sealed_layers(
    connection: Connection,
    views: Views,
    level: int,
    chunks: Chunks,
    wanted: Collection[str],
    positions: Mapping[str, IntArray],
    metric: str | None = None,
    *,
    neighbours: bool = False,
) -> Pieces:
    """Sealed points by layer at a level, by run; `neighbours` as in `read_layer_data`."""
    keys = _keys(views, wanted, metric, level)
    points = read_point_rows(connection, level, chunks)
    entries = _entries(views)
    values = read_layer_data(connection, level, chunks, points, entries, keys, positions, neighbours=neighbours)
    return _pieces(views, level, points, keys, values)


def _entries(views: Views) -> dict[str, Mapping[str, int]]:
    return {run_id: view.entries for run_id, view in views.items()}


def _keys(views: Views, wanted: Collection[str] | None, metric: str | None, level: int) -> list[str]:
    """What to read: the wanted statistics, and at coarse levels the extremes of the metric."""
    extremes = (minimum_key(""), maximum_key(""))
    keys = dict.fromkeys(
        key
        for view in views.values()
        for key in view.entries
        if not key.startswith(extremes) and (is_known(key) if wanted is None else key in wanted)
    )
    if level > 1 and metric is not None:
        both = (minimum_key(metric), maximum_key(metric))
        keys |= dict.fromkeys(key for key in both if any(key in view.entries for view in views.values()))
    return list(keys)


def _pieces(views: Views, level: int, points: PointRows, keys: Sequence[str], values: FloatArray) -> Pieces:
    """The points of each attempt of each run, with what its dictionary knows."""
    pieces: Pieces = {run_id: [] for run_id in views}
    low, high = minimum_key(""), maximum_key("")
    for (run_id, attempt), place in points.owners.items():
        known = views[run_id].entries
        held = {key: row[place] for key, row in zip(keys, values, strict=True) if key in known}
        extremes = {
            key.removeprefix(low): (array, held[maximum_key(key.removeprefix(low))])
            for key, array in held.items()
            if key.startswith(low)
        }
        piece = Piece(
            attempt=attempt,
            first_steps=points.first_steps[place],
            steps=points.steps[place],
            times=points.times[place],
            ranks=points.ranks[place],
            counts=points.counts[place],
            totals={key: array for key, array in held.items() if not key.startswith((low, high))},
            extremes=extremes,
        )
        pieces[run_id].append(piece)
    return pieces


def read_latest(
    connection: Connection,
    run_id: str,
    stale_after_seconds: float,
    cache: ChunkCache,
    slab_bytes: int = SLAB_BYTES,
) -> LatestPoint | None:
    """The newest measured step that every live rank has reached, with the model's totals."""
    view = RunView(connection, run_id)
    step = newest_measured_step(connection, run_id, view.bounds, stale_after_seconds)
    if step is None:
        found = read_model_points(connection, [run_id], ("measured_steps",), Selection(), cache, slab_bytes)
        steps = found[run_id].steps
        if not len(steps):
            return None
        step = int(steps[-1])
    at = Selection(first_step=step, last_step=step)
    points = read_model_points(connection, [run_id], None, at, cache, slab_bytes)[run_id]
    if not len(points.steps):
        return None
    return LatestPoint(step, float(points.times[0]), {key: values[0] for key, values in points.totals.items()})
