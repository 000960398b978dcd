"""Reading points of runs: journal, sealed parts and coarse levels joined. Only requested columns are decoded.

Several runs are read together: as many statements as one run takes, and one pass over their blobs.

`snapshot.py` calls it for every question. An answer is the same before and after sealing, archiving or a cache,
which is fixed (`tests/server/store/laws.py`); how it is read is free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection

from collage_server.memory_budget import hold
from collage_server.store.archive.archive_reader import ArchiveReader, uncovered
from collage_server.store.archive.segments import model_level
from collage_server.store.chunks.blobs import (
    ALL_RANKS,
    ChunkInfo,
    Chunks,
    PointRows,
    maximum_key,
    minimum_key,
    read_chunk_infos,
    read_layer_data,
    read_model_data,
    read_point_rows,
)
from collage_server.store.chunks.column_cache import ColumnCache
from collage_server.store.chunks.contributors import Contributors, rank_contributed, unfinished_steps
from collage_server.store.chunks.point_merging import (
    AttemptPoints,
    has_layer_extremes,
    join,
    merged_in_blocks,
    model_of,
    select_points,
)
from collage_server.store.reading import unsealed
from collage_server.store.reading.read_plan import ReadPlan, plan_read
from collage_server.store.reading.run_view import RunView, RunViews, chosen_layers, is_known
from collage_server.store.records import FloatArray, IntArray, Points, Selection

__all__ = [
    "Sources",
    "points_of_views",
    "read_points",
    "sealed_layers",
    "sealed_model",
]

_COPIES: Final = 3
"""Of a table that stand side by side while it is read, joined and merged."""
_MOST_BYTES: Final = 2**24
"""Of one table [statistic][point][layer]; what is larger is read a block of layers at a time."""
_NEVER: Final = 2**62
Views = Mapping[str, RunView]
Tables = dict[str, list[AttemptPoints]]


@dataclass(frozen=True, eq=False)
class Sources:
    """What points are read from beside the database: coarse columns in memory, layers in archived files."""

    columns: ColumnCache
    archive: ArchiveReader


def read_points(
    connection: Connection,
    views: RunViews,
    run_ids: Sequence[str],
    wanted: Collection[str] | None,
    selection: Selection,
    sources: Sources,
) -> dict[str, Points]:
    """Totals by run: only those of `wanted` (None: all), of the model or by layer as the selection says."""
    if selection.by_layer and not all(map(has_layer_extremes, selection.extremes_of)):
        selection = replace(selection, points=None, extremes_of=())
    return points_of_views(connection, views.of(run_ids, _needed(wanted, selection)), wanted, selection, sources)


def points_of_views(
    connection: Connection,
    views: Views,
    wanted: Collection[str] | None,
    selection: Selection,
    sources: Sources,
) -> dict[str, Points]:
    """As `read_points`, for runs whose views are read already."""
    if selection.by_layer:
        return _layer_points(connection, views, wanted, selection, sources.archive)
    layerwise = [run for run, view in views.items() if view.replicas_beside_shards]
    plans = _plans(connection, views, selection, layerwise)
    for run_id, plan in plans.items():
        keys = len(views[run_id].statistics(wanted)) + 2 * len(selection.extremes_of)
        hold(_COPIES * 8 * keys * (plan.sealed_points + sum(map(len, plan.unsealed.values()))))
    tables: Tables = {run_id: [] for run_id in views}
    for level, chunks in _by_level(plans).items():
        kept_columns = None if level == 1 or selection.rank is not None else sources.columns
        for run_id, found in _cached_model(
            connection, views, plans, level, chunks, wanted, selection, kept_columns, sources.archive
        ).items():
            tables[run_id] += found
    for run_id, plan in plans.items():
        tables[run_id] += _unsealed_model(views[run_id], plan, wanted, selection)
    return _joined(views, tables, selection)


def _layer_points(
    connection: Connection,
    views: Views,
    wanted: Collection[str] | None,
    selection: Selection,
    archive: ArchiveReader,
) -> dict[str, Points]:
    """Totals by layer: only the requested statistics and layers of each blob are kept."""
    chosen = chosen_layers(connection, views, selection.layers)
    positions = {run_id: np.array(list(held.values()), dtype=np.int64) for run_id, held in chosen.items()}
    plans = _plans(connection, views, selection, views)
    if selection.rank is not None:
        for view in views.values():
            view.check_only_rank(selection.rank)

    waiting, sizes = {}, {}
    for run_id, view in views.items():
        keys, plan = view.statistics(wanted), plans[run_id]
        waiting[run_id] = unsealed.layer_tables(
            view, plan.unsealed, plan.contributors, keys, positions[run_id], selection
        )
        sizes[run_id] = 8 * max(len(keys), 1) * max(plan.sealed_points + waiting[run_id].points, 1)
        size = sizes[run_id] * len(positions[run_id])
        hold(_COPIES * (size if selection.extremes_of else min(size, _MOST_BYTES)))

    def read(
        run_ids: Collection[str], some: Mapping[str, IntArray], *, neighbours: bool = False
    ) -> dict[str, Points]:
        """Totals of the layers at `some` positions, in the same order; their names are left out."""
        held = {run_id: views[run_id] for run_id in run_ids}
        tables: Tables = {run_id: [] for run_id in held}
        for level, chunks in _by_level({run_id: plans[run_id] for run_id in held}).items():
            of_level = {run_id: views[run_id] for run_id, _ in chunks}
            found = sealed_layers(
                connection,
                archive,
                of_level,
                level,
                chunks,
                wanted,
                some,
                selection.extremes_of,
                neighbours=neighbours,
            )
            for run_id, more in found.items():
                tables[run_id] += more
        for run_id in held:
            tables[run_id] += waiting[run_id].at(some[run_id])
        return _joined(held, tables, selection, {run_id: [""] * len(some[run_id]) for run_id in held})

    most = _NEVER if selection.extremes_of else _MOST_BYTES
    large = [run_id for run_id in views if sizes[run_id] * len(positions[run_id]) > most]
    found = read([run_id for run_id in views if run_id not in large], positions)
    for run_id in large:
        columns = 8 * len(views[run_id].statistics(wanted)) * len(positions[run_id])
        hold(_COPIES * min(sizes[run_id] * len(positions[run_id]), columns * _most_points(selection)))

        def of_block(block: IntArray, run_id: str = run_id) -> Points:
            return read([run_id], {run_id: block}, neighbours=True)[run_id]

        found[run_id] = merged_in_blocks(of_block, positions[run_id], sizes[run_id], selection)
    return {run_id: replace(found[run_id], layers=list(chosen[run_id])) for run_id in views}


def _most_points(selection: Selection) -> int:
    """What the selection alone says of how many points there can be."""
    if selection.at is not None:
        return 1
    steps = _NEVER if selection.last_step is None else selection.last_step + 1 - (selection.first_step or 0)
    return min(selection.points or _NEVER, steps)


def _cached_model(
    connection: Connection,
    views: Views,
    plans: Mapping[str, ReadPlan],
    level: int,
    chunks: Chunks,
    wanted: Collection[str] | None,
    selection: Selection,
    cache: ColumnCache | None,
    archive: ArchiveReader,
) -> Tables:
    """`sealed_model`, through the cache."""
    chosen = {run_id: views[run_id] for run_id, _ in chunks}
    if cache is None:
        return sealed_model(connection, archive, chosen, level, chunks, wanted, selection)
    places = {owner: (owner, level, plans[owner[0]].infos[owner[1], level]) for owner in chunks}
    found: Tables = {run_id: [] for run_id in chosen}
    missing: dict[tuple[str, int], Sequence[int]] = {}
    for owner, numbers in chunks.items():
        entries = views[owner[0]].entries
        totals = _keys({owner[0]: views[owner[0]]}, wanted, (), level)
        shown = [metric for metric in selection.extremes_of if minimum_key(metric) in entries]
        table = cache.get(places[owner], totals, shown)
        if table is None:
            missing[owner] = numbers
        else:
            found[owner[0]].append(table)
    if missing:
        left = {run_id: views[run_id] for run_id, _ in missing}
        for run_id, read in sealed_model(connection, archive, left, level, missing, wanted, selection).items():
            found[run_id] += read
            for table in read:
                cache.put(places[run_id, table.attempt], table)
    return found


def _joined(
    views: Views, tables: Tables, selection: Selection, layers: Mapping[str, Collection[str]] | None = None
) -> dict[str, Points]:
    return {
        run_id: join(
            tables[run_id],
            view.first_hidden_step,
            selection.of(run_id),
            view.world_sizes,
            None if layers is None else list(layers[run_id]),
        )
        for run_id, view in views.items()
    }


def _needed(wanted: Collection[str] | None, selection: Selection) -> list[str] | None:
    """Keys of the run's dictionary that may be read; None: all."""
    if wanted is None:
        return None
    return [*wanted, *_extreme_keys(selection.extremes_of)]


def _extreme_keys(metrics: Sequence[str]) -> list[str]:
    return [key for metric in metrics for key in (minimum_key(metric), maximum_key(metric))]


def _plans(
    connection: Connection,
    views: Views,
    selection: Selection,
    layerwise: Collection[str],
) -> dict[str, ReadPlan]:
    """The data to read for each run; for those in `layerwise` the journal's layers, otherwise its model vectors."""
    for view in views.values():
        view.check_rank(selection.rank)
    infos = _chunk_infos(connection, views)
    plain = {run_id: view for run_id, view in views.items() if run_id not in layerwise}
    others = {run_id: view for run_id, view in views.items() if run_id in layerwise}
    reports = unsealed.read_unsealed(connection, plain, selection, layers=False)
    reports |= unsealed.read_unsealed(connection, others, selection, layers=True)
    return {
        run_id: plan_read(view, reports[run_id], selection.of(run_id), infos[run_id])
        for run_id, view in views.items()
    }


def _chunk_infos(connection: Connection, views: Views) -> dict[str, Sequence[ChunkInfo]]:
    """The chunks of each run, read once per view."""
    unread = [run_id for run_id, view in views.items() if view.chunk_infos is None]
    for run_id, infos in (read_chunk_infos(connection, unread) if unread else {}).items():
        views[run_id].chunk_infos = infos
    return {run_id: view.chunk_infos or () for run_id, view in views.items()}


def _by_level(plans: Mapping[str, ReadPlan]) -> dict[int, Chunks]:
    levels: dict[int, dict[tuple[str, int], list[int]]] = defaultdict(dict)
    for run_id, plan in plans.items():
        for (attempt, level), chunks in plan.chunks.items():
            levels[level][run_id, attempt] = chunks
    return dict(levels)


def _unsealed_model(
    view: RunView, plan: ReadPlan, wanted: Collection[str] | None, selection: Selection
) -> Iterator[AttemptPoints]:
    keys = view.statistics(wanted)
    positions = np.array(list(view.layers.values()) if view.replicas_beside_shards else [], dtype=np.int64)

    def table_of(attempt: int, rows: Sequence[Any], contributors: Contributors) -> AttemptPoints:
        if not view.replicas_beside_shards:
            return unsealed.model_table(view, attempt, rows, keys, contributors)
        return model_of(unsealed.layer_table(view, attempt, rows, keys, positions, contributors))

    row_bytes = 8 * len(keys) * max(len(positions), 1)
    return unsealed.merged_tables(view, plan.unsealed, plan.contributors, selection, row_bytes, table_of)


def sealed_model(
    connection: Connection,
    archive: ArchiveReader,
    views: Views,
    level: int,
    chunks: Chunks,
    wanted: Collection[str] | None,
    selection: Selection,
) -> Tables:
    """Sealed points of the model at a level, by run; with `selection.rank` those of one rank."""
    rank = selection.rank
    several = {
        (run_id, attempt): numbers
        for (run_id, attempt), numbers in chunks.items()
        if rank is not None and views[run_id].ranks(attempt) != {rank}
    }
    merged = {owner: numbers for owner, numbers in chunks.items() if owner not in several}
    keys = _keys(views, wanted, selection.extremes_of, level)
    points = _point_rows(connection, views, level, merged)
    [values] = _model_data(connection, archive, views, level, merged, points, keys, [ALL_RANKS])
    found = _point_tables(views, level, points, keys, values)
    for owner, numbers in several.items():
        found[owner[0]] += _model_of_rank(connection, archive, views[owner[0]], {owner: numbers}, keys, rank or 0)
    return found


def _model_data(
    connection: Connection,
    archive: ArchiveReader,
    views: Views,
    level: int,
    chunks: Chunks,
    points: PointRows,
    keys: Sequence[str],
    ranks: Sequence[int],
) -> list[FloatArray]:
    """Totals [keys, points] of each of the ranks, out of files and of rows."""
    archived = {
        owner: held for owner, held in chunks.items() if held and owner[1] in views[owner[0]].archived_whole
    }
    files = archive.find_segments(connection, model_level(level), archived) if archived else []
    left = uncovered(chunks, points, files) if files else chunks
    found = []
    for rank in ranks:
        found.append(read_model_data(connection, level, left, points, _entries(views), keys, rank))
        archive.read_model_into(found[-1], files, points, keys, rank)
    return found


def _model_of_rank(
    connection: Connection, archive: ArchiveReader, view: RunView, chunks: Chunks, keys: Sequence[str], rank: int
) -> list[AttemptPoints]:
    """Only the points to which the rank contributed; where it was the only one, the merged totals are its own.

    None where fine points are gone: coarse ones are of all ranks.
    """
    [(_, attempt)] = chunks
    views = {view.run_id: view}
    points = read_point_rows(connection, 1, chunks)
    values, merged = _model_data(connection, archive, views, 1, chunks, points, keys, [rank, ALL_RANKS])
    there = np.zeros(len(points.steps), dtype=bool)
    numbers = chunks[view.run_id, attempt]
    contributed = rank_contributed(connection, view.run_id, attempt, numbers, rank)
    unfinished = unfinished_steps(connection, view.run_id, attempt, numbers, rank)
    for (chunk, part), (present, only_one) in contributed.items():
        start = points.where[view.run_id, attempt, chunk, part]
        place = slice(start, start + len(present))
        there[place] = present
        if only_one and np.isnan(values[:, place]).all():
            # It was sealed before another rank was known, so its totals are stored as those of all ranks.
            values[:, place] = merged[:, place]
    tables = []
    for table in _point_tables(views, 1, points, keys, values)[view.run_id]:
        held = select_points(table, np.flatnonzero(there))
        ranks = np.zeros(len(held.steps), dtype=np.int64)
        ranks[np.unique(held.steps, return_index=True)[1]] = 1
        ranks[np.isin(held.steps, unfinished)] = 0
        tables.append(replace(held, ranks=ranks))
    return tables


def sealed_layers(
    connection: Connection,
    archive: ArchiveReader,
    views: Views,
    level: int,
    chunks: Chunks,
    wanted: Collection[str] | None,
    positions: Mapping[str, IntArray],
    extremes_of: Sequence[str] = (),
    *,
    neighbours: bool = False,
) -> Tables:
    """Sealed points by layer at a level, by run; `neighbours` as in `read_layer_data`."""
    keys = _keys(views, wanted, extremes_of, level)
    points = _point_rows(connection, views, level, chunks)
    entries = _entries(views)
    archived = {owner: held for owner, held in chunks.items() if held and owner[1] in views[owner[0]].archived}
    files = archive.find_segments(connection, level, archived) if archived else []
    left = uncovered(chunks, points, files) if files else chunks
    values = read_layer_data(connection, level, left, points, entries, keys, positions, neighbours=neighbours)
    if files:
        archive.read_into(values, files, points, keys, positions)
    return _point_tables(views, level, points, keys, values)


def _point_rows(connection: Connection, views: Views, level: int, chunks: Chunks) -> PointRows:
    """The points of these chunks; of one run they are read once, for the model as for its layers."""
    if len(views) != 1:
        return read_point_rows(connection, level, chunks)
    [view] = views.values()
    place = level, repr(chunks)
    if place not in view.point_rows:
        view.point_rows[place] = read_point_rows(connection, level, chunks)
    return view.point_rows[place]


def _entries(views: Views) -> dict[str, Mapping[str, int]]:
    return {run_id: view.entries for run_id, view in views.items()}


def _keys(views: Views, wanted: Collection[str] | None, extremes_of: Sequence[str], level: int) -> list[str]:
    """What to read: the wanted statistics, and at coarse levels the extremes of these metrics."""
    extremes = (minimum_key(""), maximum_key(""))
    keys = dict.fromkeys(
        key
        for view in views.values()
        for key in view.entries
        if not key.startswith(extremes) and (is_known(key) if wanted is None else key in wanted)
    )
    if level > 1:
        shown = _extreme_keys(extremes_of)
        keys |= dict.fromkeys(key for key in shown if any(key in view.entries for view in views.values()))
    return list(keys)


def _point_tables(views: Views, level: int, points: PointRows, keys: Sequence[str], values: FloatArray) -> Tables:
    """The points of each attempt of each run, with what its dictionary knows."""
    tables: Tables = {run_id: [] for run_id in views}
    low, high = minimum_key(""), maximum_key("")
    for (run_id, attempt), place in points.owners.items():
        known = views[run_id].entries
        held = {key: row[place] for key, row in zip(keys, values, strict=True) if key in known}
        extremes = {
            key.removeprefix(low): (array, held[maximum_key(key.removeprefix(low))])
            for key, array in held.items()
            if key.startswith(low)
        }
        table = AttemptPoints(
            attempt=attempt,
            first_steps=points.first_steps[place],
            steps=points.steps[place],
            times=points.times[place],
            ranks=points.ranks[place],
            counts=points.counts[place],
            totals={key: array for key, array in held.items() if not key.startswith((low, high))},
            extremes=extremes,
        )
        tables[run_id].append(table)
    return tables
