"""Reading points of runs: journal, sealed parts and coarse levels joined. Only requested columns are decoded.

Several runs are read together: as many statements as one run takes, and one pass over their blobs. Read one by
one, a comparison of 20 runs of 10,000 points costs 1.5 times the CPU on SQLite.

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

__all__ = ["PointReading", "Sources", "read_points"]

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
    held = views.of(run_ids, _needed(wanted, selection))
    return PointReading(connection, held, wanted, selection, sources.archive, sources.columns).points()


@dataclass(frozen=True, eq=False)
class PointReading:
    """A question about points of several runs whose views are read: totals of `wanted`, None: all.

    columns: coarse columns of the model in memory; None: neither looked up nor kept.
    """

    connection: Connection
    views: Views
    wanted: Collection[str] | None
    selection: Selection
    archive: ArchiveReader
    columns: ColumnCache | None = None

    def points(self) -> dict[str, Points]:
        """The answer by run."""
        return self._layer_points() if self.selection.by_layer else self._model_points()

    def _model_points(self) -> dict[str, Points]:
        plans = self._plans([run_id for run_id, view in self.views.items() if view.replicas_beside_shards])
        for run_id, plan in plans.items():
            keys = len(self.views[run_id].statistics(self.wanted)) + 2 * len(self.selection.extremes_of)
            hold(_COPIES * 8 * keys * (plan.sealed_points + sum(map(len, plan.unsealed.values()))))
        tables: Tables = {run_id: [] for run_id in self.views}
        for level, chunks in _by_level(plans).items():
            for run_id, found in self._cached_model(plans, level, chunks).items():
                tables[run_id] += found
        for run_id, plan in plans.items():
            tables[run_id] += self._unsealed_model(self.views[run_id], plan)
        return self._joined(tables)

    def _layer_points(self) -> dict[str, Points]:
        """Totals by layer: only the requested statistics and layers of each blob are kept."""
        views, selection = self.views, self.selection
        chosen = chosen_layers(self.connection, views, selection.layers)
        positions = {run_id: np.array(list(held.values()), dtype=np.int64) for run_id, held in chosen.items()}
        plans = self._plans(views)
        for view in views.values():
            view.check_only_rank(selection.rank)
        waiting, sizes = {}, {}
        for run_id, view in views.items():
            waiting[run_id] = self._unsealed_layers(run_id, plans[run_id], positions[run_id])
            points = plans[run_id].sealed_points + waiting[run_id].points
            sizes[run_id] = 8 * max(len(view.statistics(self.wanted)), 1) * max(points, 1)
            size = sizes[run_id] * len(positions[run_id])
            hold(_COPIES * (size if selection.extremes_of else min(size, _MOST_BYTES)))

        def read(
            run_ids: Collection[str], some: Mapping[str, IntArray], *, neighbours: bool = False
        ) -> dict[str, Points]:
            """Totals of the layers at `some` positions, in the same order; their names are left out."""
            tables: Tables = {run_id: [] for run_id in run_ids}
            for level, chunks in _by_level({run_id: plans[run_id] for run_id in run_ids}).items():
                for run_id, more in self.sealed_layers(level, chunks, some, neighbours=neighbours).items():
                    tables[run_id] += more
            for run_id in run_ids:
                tables[run_id] += waiting[run_id].at(some[run_id])
            return self._joined(tables, {run_id: [""] * len(some[run_id]) for run_id in run_ids})

        most = _NEVER if selection.extremes_of else _MOST_BYTES
        large = [run_id for run_id in views if sizes[run_id] * len(positions[run_id]) > most]
        found = read([run_id for run_id in views if run_id not in large], positions)
        for run_id in large:
            columns = 8 * len(views[run_id].statistics(self.wanted)) * len(positions[run_id])
            hold(_COPIES * min(sizes[run_id] * len(positions[run_id]), columns * _most_points(selection)))

            def of_block(block: IntArray, run_id: str = run_id) -> Points:
                return read([run_id], {run_id: block}, neighbours=True)[run_id]

            found[run_id] = merged_in_blocks(of_block, positions[run_id], sizes[run_id], selection)
        return {run_id: replace(found[run_id], layers=list(chosen[run_id])) for run_id in views}

    def _plans(self, layerwise: Collection[str]) -> dict[str, ReadPlan]:
        """The data to read for each run; of those in `layerwise` the journal's layers, else its model vectors."""
        for view in self.views.values():
            view.check_rank(self.selection.rank)
        unread = [run_id for run_id, view in self.views.items() if view.chunk_infos is None]
        for run_id, infos in (read_chunk_infos(self.connection, unread) if unread else {}).items():
            self.views[run_id].chunk_infos = infos
        reports: dict[str, dict[int, list[Any]]] = {}
        for layers in (False, True):
            views = {run_id: view for run_id, view in self.views.items() if (run_id in layerwise) is layers}
            reports |= unsealed.read_unsealed(self.connection, views, self.selection, layers=layers)
        return {
            run_id: plan_read(view, reports[run_id], self.selection.of(run_id), view.chunk_infos or ())
            for run_id, view in self.views.items()
        }

    def _cached_model(self, plans: Mapping[str, ReadPlan], level: int, chunks: Chunks) -> Tables:
        """`sealed_model`, through the cache."""
        if self.columns is None or level == 1 or self.selection.rank is not None:
            return self.sealed_model(level, chunks)
        places = {owner: (owner, level, plans[owner[0]].infos[owner[1], level]) for owner in chunks}
        found: Tables = defaultdict(list)
        missing: dict[tuple[str, int], Sequence[int]] = {}
        for owner, numbers in chunks.items():
            view = self.views[owner[0]]
            totals = _keys([view], self.wanted, (), level)
            shown = [metric for metric in self.selection.extremes_of if minimum_key(metric) in view.entries]
            table = self.columns.get(places[owner], totals, shown)
            if table is None:
                missing[owner] = numbers
            else:
                found[owner[0]].append(table)
        for run_id, read in (self.sealed_model(level, missing) if missing else {}).items():
            found[run_id] += read
            for table in read:
                self.columns.put(places[run_id, table.attempt], table)
        return found

    def _joined(self, tables: Tables, layers: Mapping[str, Collection[str]] | None = None) -> dict[str, Points]:
        return {
            run_id: join(
                held,
                self.views[run_id].first_hidden_step,
                self.selection.of(run_id),
                self.views[run_id].world_sizes,
                None if layers is None else list(layers[run_id]),
            )
            for run_id, held in tables.items()
        }

    def _unsealed_model(self, view: RunView, plan: ReadPlan) -> Iterator[AttemptPoints]:
        keys = view.statistics(self.wanted)
        positions = np.array(list(view.layers.values()) if view.replicas_beside_shards else [], dtype=np.int64)

        def table_of(attempt: int, rows: Sequence[Any], contributors: Contributors) -> AttemptPoints:
            if not view.replicas_beside_shards:
                return unsealed.model_table(view, attempt, rows, keys, contributors)
            return model_of(unsealed.layer_table(view, attempt, rows, keys, positions, contributors))

        row_bytes = 8 * len(keys) * max(len(positions), 1)
        return unsealed.merged_tables(view, plan.unsealed, plan.contributors, self.selection, row_bytes, table_of)

    def _unsealed_layers(self, run_id: str, plan: ReadPlan, positions: IntArray) -> unsealed.LayerTables:
        view = self.views[run_id]
        keys = view.statistics(self.wanted)
        return unsealed.layer_tables(view, plan.unsealed, plan.contributors, keys, positions, self.selection)

    def sealed_model(self, level: int, chunks: Chunks) -> Tables:
        """Sealed points of the model at a level, by run; with `selection.rank` those of one rank."""
        rank, views = self.selection.rank, self._views_of(chunks)
        several = {
            (run_id, attempt): numbers
            for (run_id, attempt), numbers in chunks.items()
            if rank is not None and views[run_id].ranks(attempt) != {rank}
        }
        merged = {owner: numbers for owner, numbers in chunks.items() if owner not in several}
        keys = _keys(views.values(), self.wanted, self.selection.extremes_of, level)
        points = self._point_rows(views, level, merged)
        [values] = self._model_data(level, merged, points, keys, [ALL_RANKS])
        found = _point_tables(views, level, points, keys, values)
        for owner, numbers in several.items():
            found[owner[0]] += self._model_of_rank(views[owner[0]], owner[1], numbers, keys, rank or 0)
        return found

    def _model_data(
        self, level: int, chunks: Chunks, points: PointRows, keys: Sequence[str], ranks: Sequence[int]
    ) -> list[FloatArray]:
        """Totals [keys, points] of each of the ranks, out of files and of rows."""
        views = self._views_of(chunks)
        archived = {
            owner: held for owner, held in chunks.items() if held and owner[1] in views[owner[0]].archived_whole
        }
        files = self.archive.find_segments(self.connection, model_level(level), archived) if archived else []
        left = uncovered(chunks, points, files) if files else chunks
        found = []
        for rank in ranks:
            found.append(read_model_data(self.connection, level, left, points, _entries(views), keys, rank))
            self.archive.read_model_into(found[-1], files, points, keys, rank)
        return found

    def _model_of_rank(
        self, view: RunView, attempt: int, numbers: Sequence[int], keys: Sequence[str], rank: int
    ) -> list[AttemptPoints]:
        """Only the points to which the rank contributed; where it was the only one, the merged totals are its own.

        None where fine points are gone: coarse ones are of all ranks.
        """
        chunks = {(view.run_id, attempt): numbers}
        points = read_point_rows(self.connection, 1, chunks)
        values, merged = self._model_data(1, chunks, points, keys, [rank, ALL_RANKS])
        there = np.zeros(len(points.steps), dtype=bool)
        contributed = rank_contributed(self.connection, view.run_id, attempt, numbers, rank)
        unfinished = unfinished_steps(self.connection, view.run_id, attempt, numbers, rank)
        for (chunk, part), (present, only_one) in contributed.items():
            start = points.where[view.run_id, attempt, chunk, part]
            place = slice(start, start + len(present))
            there[place] = present
            if only_one and np.isnan(values[:, place]).all():
                # Sealed before another rank was known, its totals stand there as those of all.
                values[:, place] = merged[:, place]
        tables = []
        for table in _point_tables({view.run_id: view}, 1, points, keys, values)[view.run_id]:
            held = select_points(table, np.flatnonzero(there))
            ranks = np.zeros(len(held.steps), dtype=np.int64)
            ranks[np.unique(held.steps, return_index=True)[1]] = 1
            ranks[np.isin(held.steps, unfinished)] = 0
            tables.append(replace(held, ranks=ranks))
        return tables

    def sealed_layers(
        self, level: int, chunks: Chunks, positions: Mapping[str, IntArray], *, neighbours: bool = False
    ) -> Tables:
        """Sealed points by layer at a level, by run; `neighbours` as in `read_layer_data`."""
        views = self._views_of(chunks)
        keys = _keys(views.values(), self.wanted, self.selection.extremes_of, level)
        points = self._point_rows(views, level, chunks)
        archived = {owner: held for owner, held in chunks.items() if held and owner[1] in views[owner[0]].archived}
        files = self.archive.find_segments(self.connection, level, archived) if archived else []
        left = uncovered(chunks, points, files) if files else chunks
        values = read_layer_data(
            self.connection, level, left, points, _entries(views), keys, positions, neighbours=neighbours
        )
        if files:
            self.archive.read_into(values, files, points, keys, positions)
        return _point_tables(views, level, points, keys, values)

    def _views_of(self, chunks: Chunks) -> Views:
        return {run_id: self.views[run_id] for run_id, _ in chunks}

    def _point_rows(self, views: Views, level: int, chunks: Chunks) -> PointRows:
        """The points of these chunks, read once for the model as for its layers; kept on the first run's view."""
        held = next(iter(views.values())).point_rows if views else {}
        place = level, repr(chunks)
        if place not in held:
            held[place] = read_point_rows(self.connection, level, chunks)
        return held[place]


def _most_points(selection: Selection) -> int:
    """What the selection alone says of how many points there can be."""
    if selection.at is not None:
        return 1
    steps = _NEVER if selection.last_step is None else selection.last_step + 1 - (selection.first_step or 0)
    return min(selection.points or _NEVER, steps)


def _needed(wanted: Collection[str] | None, selection: Selection) -> list[str] | None:
    """Keys of the run's dictionary that may be read; None: all."""
    if wanted is None:
        return None
    return [*wanted, *_extreme_keys(selection.extremes_of)]


def _extreme_keys(metrics: Sequence[str]) -> list[str]:
    return [key for metric in metrics for key in (minimum_key(metric), maximum_key(metric))]


def _by_level(plans: Mapping[str, ReadPlan]) -> dict[int, Chunks]:
    levels: dict[int, dict[tuple[str, int], list[int]]] = defaultdict(dict)
    for run_id, plan in plans.items():
        for (attempt, level), chunks in plan.chunks.items():
            levels[level][run_id, attempt] = chunks
    return dict(levels)


def _entries(views: Views) -> dict[str, Mapping[str, int]]:
    return {run_id: view.entries for run_id, view in views.items()}


def _keys(
    views: Collection[RunView], wanted: Collection[str] | None, extremes_of: Sequence[str], level: int
) -> list[str]:
    """What to read: the wanted statistics, and at coarse levels the extremes of these metrics."""
    extremes = (minimum_key(""), maximum_key(""))
    keys = dict.fromkeys(
        key
        for view in views
        for key in view.entries
        if not key.startswith(extremes) and (is_known(key) if wanted is None else key in wanted)
    )
    if level > 1:
        shown = _extreme_keys(extremes_of)
        keys |= dict.fromkeys(key for key in shown if any(key in view.entries for view in views))
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
