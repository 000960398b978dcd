"""Reports that stand in no chunk yet, read from the journal and merged to points.

The journal of a run is bounded, so all of it is read at once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from sqlalchemy import Connection, Row

from collage_monitor.statistics import reduce_shards
from collage_monitor.statistics.merge import with_variance_product_roots
from collage_server.store.chunks.contributors import Contributors, Told, unknown_stream
from collage_server.store.chunks.tables import PointTable, taken
from collage_server.store.contract import FloatArray, IntArray, Selection, StreamRecord
from collage_server.store.journal.decode import decode_layers, decode_model, layer_replicas, model_replica
from collage_server.store.journal.reports import read_reports
from collage_server.store.reading.assemble import RowPlaces, group_steps, merge_rows, visible
from collage_server.store.reading.run_view import RunView

__all__ = [
    "ScalarRow",
    "UnsealedReports",
    "alone",
    "layer_table",
    "model_of",
    "model_table",
    "model_tables",
    "read_unsealed",
    "seen_rows",
    "told_parts",
    "unsealed_rows",
]


class ModelRow(NamedTuple):
    """A row of the journal with what `model_table` needs."""

    run_id: str
    stream_id: str
    seq: int
    step: int
    time: float
    parts: int
    statistic_count: int
    model: bytes


class LayerRow(NamedTuple):
    """A row of the journal with what `layer_table` needs."""

    run_id: str
    stream_id: str
    seq: int
    step: int
    time: float
    parts: int
    statistic_count: int
    layer_count: int
    statistics: bytes


class ScalarRow(NamedTuple):
    """A row of the journal with what was logged."""

    run_id: str
    stream_id: str
    seq: int
    step: int
    time: float
    scalars: str


_Kind = TypeVar("_Kind", ModelRow, LayerRow, ScalarRow)
UnsealedReports = Mapping[int, Sequence[Any]]
"""By attempt, rows of the journal that stand in no chunk, in order of their numbers."""


def read_unsealed(
    connection: Connection, views: Mapping[str, RunView], selection: Selection, *, layers: bool
) -> dict[str, dict[int, list[Any]]]:
    """Unsealed measured reports by run and attempt, for `layer_table` or for `model_table`."""
    kind, present = (LayerRow, "statistics") if layers else (ModelRow, "model")
    found: dict[str, dict[int, list[Any]]] = {run_id: defaultdict(list) for run_id in views}
    for stream, row in unsealed_rows(connection, views, kind, present, selection):  # type: ignore[type-var]
        found[stream.run_id][stream.attempt].append(row)
    for by_attempt in found.values():
        for rows in by_attempt.values():
            rows.sort(key=attrgetter("seq"))
    return found


def unsealed_rows(
    connection: Connection, views: Mapping[str, RunView], kind: type[_Kind], present: str, selection: Selection
) -> Iterator[tuple[StreamRecord, _Kind]]:
    """Rows that stand in no chunk yet, with their streams."""
    streams = {name: stream for view in views.values() for name, stream in view.streams.items()}
    for row in map(kind._make, read_reports(connection, list(views), kind._fields, present, selection)):
        stream = streams.get(row.stream_id)
        wanted = stream is not None and selection.rank in (None, stream.rank)
        if stream is not None and wanted and not views[row.run_id].sealed(row.stream_id, row.seq):
            yield stream, row


def model_table(
    view: RunView, attempt: int, rows: Sequence[Row[Any]], keys: Sequence[str], known: Contributors
) -> PointTable:
    """Rows of one attempt merged to the model's totals by step."""
    if alone(rows, known):
        return model_tables({view.run_id: view}, {(view.run_id, attempt): rows}, keys)[view.run_id, attempt]

    def replicas(stream_id: str) -> FloatArray:
        return np.array(model_replica(view.streams[stream_id]))

    rows = seen_rows(view, rows, known)
    totals = dict(zip(keys, decode_model(view.streams, rows, keys), strict=True))
    return _table(view, attempt, rows, totals, known, replicas)


def model_tables(
    views: Mapping[str, RunView],
    waiting: Mapping[tuple[str, int], Sequence[Row[Any]]],
    wanted: Collection[str] | None,
) -> dict[tuple[str, int], PointTable]:
    """The same of rows that stand `alone`, by run and attempt: all of them are decoded together."""
    alike: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for owner in waiting:
        alike[tuple(views[owner[0]].statistics(wanted))].append(owner)
    found = {}
    for keys, owners in alike.items():
        streams = {name: stream for run_id, _ in owners for name, stream in views[run_id].streams.items()}
        rows = [row for owner in owners for row in waiting[owner]]
        totals = dict(zip(keys, decode_model(streams, rows, keys), strict=True))
        whole = _table_of_one(0, rows, totals)
        start = 0
        for owner in owners:
            stop = start + len(waiting[owner])
            found[owner] = replace(taken(whole, slice(start, stop)), attempt=owner[1])
            start = stop
    return found


def layer_table(
    view: RunView,
    attempt: int,
    rows: Sequence[Row[Any]],
    keys: Sequence[str],
    positions: IntArray,
    known: Contributors,
) -> PointTable:
    """Rows of one attempt merged to totals by step and layer."""
    if alone(rows, known):
        blocks = decode_layers(view.streams, rows, keys, positions)
        return _table_of_one(attempt, rows, dict(zip(keys, blocks, strict=True)))
    cache: dict[str, FloatArray] = {}

    def replicas(stream_id: str) -> FloatArray:
        if stream_id not in cache:
            cache[stream_id] = layer_replicas(view.streams[stream_id], positions)
        return cache[stream_id]

    rows = seen_rows(view, rows, known)
    blocks = decode_layers(view.streams, rows, keys, positions)
    return _table(view, attempt, rows, dict(zip(keys, blocks, strict=True)), known, replicas)


def alone(rows: Sequence[Row[Any]], known: Contributors) -> bool:
    """Whether one stream reported every step once, and nothing of it is sealed: nothing is to be merged."""
    alike = len({row.stream_id for row in rows}) == 1
    return alike and not known and all(a.step < b.step for a, b in itertools.pairwise(rows))


def _table_of_one(attempt: int, rows: Sequence[Row[Any]], totals: dict[str, FloatArray]) -> PointTable:
    steps = np.array([row.step for row in rows], dtype=np.int64)
    times = np.array([row.time for row in rows], dtype=np.float64)
    ranks = np.array([row.parts == 1 for row in rows], dtype=np.int64)
    ones = np.ones(len(rows), dtype=np.int64)
    return PointTable(attempt, steps, steps, times, ranks, ones, with_variance_product_roots(totals))


def model_of(table: PointTable) -> PointTable:
    """The model's totals from those of its layers: needed where one rank holds shards beside replicas."""
    return replace(table, totals=reduce_shards(table.totals, axis=1))


def seen_rows(view: RunView, rows: Sequence[Row[Any]], known: Contributors) -> list[Row[Any]]:
    """Without second processes of a rank: where one stands in a sealed part of the step, no other one is added.

    Several reports of one process about one step are shards of it, and each of them comes once.
    """
    rows = [row for row in rows if not (known and _another_is_known(view, row, known))]
    seen = visible(_places(view, rows), {})
    return [row for row, kept in zip(rows, seen.tolist(), strict=True) if kept]


def _another_is_known(view: RunView, row: Row[Any], known: Contributors) -> bool:
    """Whether another process of the row's rank stands in a sealed part of its step."""
    if not view.is_contested(row.stream_id):
        return False
    own = view.streams[row.stream_id]
    others = (number for number in known.get(row.step, ()) if number != own.stream)
    return any(
        number == unknown_stream(own.rank) or view.ranks_by_stream.get(number) == own.rank for number in others
    )


def _places(view: RunView, rows: Sequence[Row[Any]]) -> RowPlaces:
    return RowPlaces.of([(view.streams[row.stream_id], row.step, row.time) for row in rows])


def told_parts(view: RunView, rows: Sequence[Row[Any]]) -> dict[tuple[int, int], Told]:
    """How many parts these rows tell, by (step, stream)."""
    found: dict[tuple[int, int], Told] = {}
    for row in rows:
        place, told = (row.step, view.streams[row.stream_id].stream), Told(1, row.parts)
        found[place] = found[place].joined(told) if place in found else told
    return found


def _table(
    view: RunView,
    attempt: int,
    rows: Sequence[Row[Any]],
    totals: dict[str, FloatArray],
    known: Contributors,
    replicas_of: Callable[[str], FloatArray],
) -> PointTable:
    grouped = group_steps(_places(view, rows))
    replicas = None
    if view.replicated and rows:
        replicas = np.stack([replicas_of(row.stream_id) for row in rows])
        _leave_out_replicas(view, attempt, rows, totals, known, replicas, replicas_of)
    return PointTable(
        attempt=attempt,
        first_steps=grouped.steps,
        steps=grouped.steps,
        times=grouped.times,
        ranks=grouped.ranks - _not_counted(view, rows, grouped.steps, known),
        counts=np.ones(len(grouped.steps), dtype=np.int64),
        totals=merge_rows(grouped, totals, replicas),
    )


def _not_counted(view: RunView, rows: Sequence[Row[Any]], steps: IntArray, known: Contributors) -> IntArray:
    """How many of the ranks at each of these steps have parts to come, or were whole in sealed parts already."""
    if not known and all(row.parts == 1 for row in rows):
        return np.zeros(len(steps), dtype=np.int64)
    left = []
    for (step, stream), told in told_parts(view, rows).items():
        before = known.get(step, {}).get(stream)
        after = told if before is None else before.joined(told)
        if not after.whole or (before is not None and before.whole):
            left.append(step)
    return np.bincount(np.searchsorted(steps, np.array(left, dtype=np.int64)), minlength=len(steps))


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
    names = {stream.stream: stream.stream_id for stream in view.streams.values()}
    names |= {unknown_stream(s.rank): s.stream_id for s in view.streams.values() if s.attempt == attempt}
    for index, row in enumerate(rows):
        sealed = [names[number] for number in known.get(row.step, ())]
        if not sealed:
            continue
        lowest = np.fmin.reduce([replicas_of(name) for name in sealed], axis=0)
        for values in totals.values():
            values[index] = np.where((replicas[index] != lowest) & ~np.isnan(lowest), np.nan, values[index])
