"""Reports that are not sealed into chunks yet: read from the journal and merged to points.

The journal of a run is bounded, so all of it is read at once. The merged points are not bounded by that: a short
report may hold few of its stream's layers and statistics, while a point has room for all of them. Where that is too
much, steps are merged as they are read.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from sqlalchemy import Connection, Row, select, tuple_

from collage_monitor.statistics import Totals
from collage_monitor.statistics.merge import with_variance_product_roots
from collage_server.memory_budget import held_rows
from collage_server.store import schema
from collage_server.store.chunks.contributors import Contributors, StepReports
from collage_server.store.chunks.point_merging import AttemptPoints, merged_to_one
from collage_server.store.reading.report_merging import (
    RowOrigins,
    decode_layers,
    decode_model,
    group_steps,
    layer_replicas,
    merge_rows,
    model_replica,
    visible,
)
from collage_server.store.reading.run_view import RunView
from collage_server.store.records import UNBOUNDED, FloatArray, IntArray, Selection, StreamRecord
from collage_server.store.row_checks import REPORT_PARTS, or_damaged, require_report

__all__ = [
    "LayerTables",
    "ScalarRow",
    "UnsealedReports",
    "count_step_reports",
    "layer_table",
    "layer_tables",
    "merged_tables",
    "model_table",
    "read_reports",
    "read_unsealed",
    "unsealed_rows",
    "visible_rows",
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
    """A row of the journal with its logged values."""

    run_id: str
    stream_id: str
    seq: int
    step: int
    time: float
    scalars: str


_MOST_BYTES: Final = 2**25
"""Of totals of single steps that stand in memory; of more, where few points are wanted, steps are merged first."""
_BYTES_AT_ONCE: Final = 2**23
_ROW_BYTES: Final = 512
"""What a row takes beside its totals."""
_ROWS_AT_ONCE: Final = 64
"""That PostgreSQL's driver fetches: it would take a whole answer into memory."""
_Kind = TypeVar("_Kind", ModelRow, LayerRow, ScalarRow)
UnsealedReports = Mapping[int, Sequence[Any]]
"""Journal rows that are not sealed yet, by attempt, in order of `seq`."""


def read_unsealed(
    connection: Connection, views: Mapping[str, RunView], selection: Selection, *, layers: bool
) -> dict[str, dict[int, list[Any]]]:
    """Unsealed measured reports by run and attempt, for `layer_table` or for `model_table`."""
    kind, present = (LayerRow, "statistics") if layers else (ModelRow, "model")
    known = {run_id: _selected(view, kind, selection) for run_id, view in views.items() if kind in view.unsealed}
    unread = {run_id: view for run_id, view in views.items() if run_id not in known}
    found: dict[str, dict[int, list[Any]]] = {run_id: defaultdict(list) for run_id in unread}
    for stream, row in unsealed_rows(connection, unread, kind, present, selection):  # type: ignore[type-var]
        found[stream.run_id][stream.attempt].append(row)
    for by_attempt in found.values():
        for rows in by_attempt.values():
            rows.sort(key=attrgetter("seq"))
    whole = selection.first_step is selection.last_step is selection.rank is None and selection.at is None
    if whole and len(views) == 1:
        for run_id, view in unread.items():
            view.unsealed[kind] = found[run_id]
    return found | known


def _selected(view: RunView, kind: type, selection: Selection) -> dict[int, list[Any]]:
    """The selected ones among the reports that the view has read already."""
    selection = selection.of(view.run_id)
    first, rank = selection.first_step or 0, selection.rank
    last = UNBOUNDED if selection.last_step is None else selection.last_step
    found: dict[int, list[Any]] = defaultdict(list)
    for attempt, rows in view.unsealed[kind].items():
        for row in rows:
            if first <= row.step <= last and rank in (None, view.streams[row.stream_id].rank):
                found[attempt].append(row)
    return found


def unsealed_rows(
    connection: Connection, views: Mapping[str, RunView], kind: type[_Kind], present: str, selection: Selection
) -> Iterator[tuple[StreamRecord, _Kind]]:
    """Journal rows that are not sealed yet, with their streams."""
    streams = {name: stream for view in views.values() for name, stream in view.streams.items()}
    found = read_reports(connection, list(views), ["checks", *REPORT_PARTS[present]], present, selection)
    for checks, *values in held_rows((tuple(row), len(row[-1]) + _ROW_BYTES) for row in found):
        row = kind._make(values)
        stream = streams.get(row.stream_id)
        wanted = stream is not None and selection.rank in (None, stream.rank)
        if stream is not None and wanted and not views[row.run_id].is_sealed(row.stream_id, row.seq):
            require_report(checks, present, row)
            yield stream, row


@dataclass(frozen=True)
class LayerTables:
    """Tables of the layers that some report brings; `positions` ascend."""

    tables: list[AttemptPoints]
    positions: IntArray

    @property
    def points(self) -> int:
        """How many points they hold."""
        return sum(map(len, [table.steps for table in self.tables]))

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
    view: RunView,
    reports: UnsealedReports,
    contributors: Mapping[int, Contributors],
    keys: Sequence[str],
    positions: IntArray,
    selection: Selection,
) -> LayerTables:
    """Unsealed totals by layer, of those of the layers at these positions that some report brings."""
    shapes = {(row.stream_id, row.layer_count) for rows in reports.values() for row in rows}
    brought = [view.streams[stream_id].layers[:count] for stream_id, count in shapes]
    held = np.unique(np.concatenate(brought)) if brought else np.zeros(0, dtype=np.int64)
    held = np.intersect1d(held, positions, assume_unique=True)

    def table_of(attempt: int, rows: Sequence[Any], contributors: Contributors) -> AttemptPoints:
        return layer_table(view, attempt, rows, keys, held, contributors)

    row_bytes, point_bytes = (8 * len(keys) * len(some) for some in (held, positions))
    tables = merged_tables(view, reports, contributors, selection, row_bytes, table_of, point_bytes=point_bytes)
    return LayerTables(list(tables), held)


def merged_tables(
    view: RunView,
    reports: UnsealedReports,
    contributors: Mapping[int, Contributors],
    selection: Selection,
    row_bytes: int,
    table_of: Callable[[int, Sequence[Row[Any]], Contributors], AttemptPoints],
    *,
    point_bytes: int = 0,
) -> Iterator[AttemptPoints]:
    """The tables that `table_of` makes of (attempt, rows, contributors), `row_bytes` a row.

    Together they hold a point a step; but not much more than the points wanted, if all steps' are too many bytes,
    as they are or with `point_bytes` each, which they take later.
    """
    count = sum(map(len, reports.values()))
    wanted = None if selection.extremes_of else selection.points
    level = 1
    if wanted is not None and count * max(row_bytes, point_bytes) > _MOST_BYTES:
        steps = sum(len({row.step for row in rows}) for rows in reports.values())
        level = max(steps // wanted, 1)
    for attempt, rows in sorted(reports.items()):
        held = contributors.get(attempt, {})
        # Join late reports to the sealed part of their step.
        end = max(held, default=-1)
        late = rows if level == 1 else [row for row in rows if row.step <= end]
        if late or level == 1:
            yield table_of(attempt, late, held)
        if level > 1:
            fresh = [row for row in rows if end < row.step < view.first_hidden_step(attempt)]
            yield from _merged_points(attempt, fresh, level, row_bytes, table_of)


def _merged_points(
    attempt: int,
    rows: Sequence[Row[Any]],
    level: int,
    row_bytes: int,
    table_of: Callable[[int, Sequence[Row[Any]], Contributors], AttemptPoints],
) -> Iterator[AttemptPoints]:
    """Tables of one point each, made of `level` steps, of so few of them at a time that they take little memory."""
    ordered = sorted(rows, key=attrgetter("step"))
    steps = [list(members) for _, members in itertools.groupby(ordered, attrgetter("step"))]
    width = max(_BYTES_AT_ONCE // max(row_bytes * max(map(len, steps), default=1), 1), 1)
    for start in range(0, len(steps), level):
        end = min(start + level, len(steps))
        blocks = (steps[place : min(place + width, end)] for place in range(start, end, width))
        yield merged_to_one(table_of(attempt, list(itertools.chain(*block)), {}) for block in blocks)


def model_table(
    view: RunView, attempt: int, rows: Sequence[Row[Any]], keys: Sequence[str], contributors: Contributors
) -> AttemptPoints:
    """Rows of one attempt merged to the model's totals by step."""
    if _needs_no_merge(rows, contributors):
        return _table_of_one(attempt, rows, decode_model(view.streams, rows, keys))

    def replicas(stream_id: str) -> FloatArray:
        return np.array(model_replica(view.streams[stream_id]))

    rows = visible_rows(view, rows, contributors)
    return _table(view, attempt, rows, decode_model(view.streams, rows, keys), contributors, replicas)


def layer_table(
    view: RunView,
    attempt: int,
    rows: Sequence[Row[Any]],
    keys: Sequence[str],
    positions: IntArray,
    contributors: Contributors,
) -> AttemptPoints:
    """Rows of one attempt merged to totals by step and layer.

    Some layers at a time, where rows are merged and all would be many bytes: each row has room for every layer.
    """
    width = max(_BYTES_AT_ONCE // max(8 * len(keys) * len(rows), 1), 1)
    if _needs_no_merge(rows, contributors):
        return _table_of_one(attempt, rows, decode_layers(view.streams, rows, keys, positions))
    if len(positions) <= width:
        return _merged_layers(view, attempt, rows, keys, positions, contributors)
    tables = [
        _merged_layers(view, attempt, rows, keys, positions[start : start + width], contributors)
        for start in range(0, len(positions), width)
    ]
    joined = {key: np.concatenate([table.totals[key] for table in tables], axis=1) for key in tables[0].totals}
    return replace(tables[0], totals=joined)


def _merged_layers(
    view: RunView,
    attempt: int,
    rows: Sequence[Row[Any]],
    keys: Sequence[str],
    positions: IntArray,
    contributors: Contributors,
) -> AttemptPoints:
    cache: dict[str, FloatArray] = {}

    def replicas(stream_id: str) -> FloatArray:
        if stream_id not in cache:
            cache[stream_id] = layer_replicas(view.streams[stream_id], positions)
        return cache[stream_id]

    rows = visible_rows(view, rows, contributors)
    totals = decode_layers(view.streams, rows, keys, positions)
    return _table(view, attempt, rows, totals, contributors, replicas)


def _needs_no_merge(rows: Sequence[Row[Any]], contributors: Contributors) -> bool:
    """Whether the rows need no merging: one stream, one report a step, nothing of these steps sealed before.

    Merged nevertheless, a heatmap of 600 such reports costs 1.5 times the CPU of the whole question.
    """
    one_stream = len({row.stream_id for row in rows}) == 1
    return one_stream and not contributors and all(a.step < b.step for a, b in itertools.pairwise(rows))


def _table_of_one(attempt: int, rows: Sequence[Row[Any]], totals: Totals) -> AttemptPoints:
    steps = np.array([row.step for row in rows], dtype=np.int64)
    times = np.array([row.time for row in rows], dtype=np.float64)
    ranks = np.array([row.parts == 1 for row in rows], dtype=np.int64)
    ones = np.ones(len(rows), dtype=np.int64)
    return AttemptPoints(
        attempt=attempt,
        first_steps=steps,
        steps=steps,
        times=times,
        ranks=ranks,
        counts=ones,
        totals=with_variance_product_roots(totals),
    )


def visible_rows(view: RunView, rows: Sequence[Row[Any]], contributors: Contributors) -> list[Row[Any]]:
    """The rows, at most one process a rank at each step: once one process of a rank is sealed at a step, others are
    left out.

    Several reports of one process about one step are shards of it, and all are kept.
    """
    rows = [row for row in rows if not (contributors and _another_is_sealed(view, row, contributors))]
    seen = visible(_origins(view, rows), {})
    return [row for row, kept in zip(rows, seen.tolist(), strict=True) if kept]


def _another_is_sealed(view: RunView, row: Row[Any], contributors: Contributors) -> bool:
    """Whether another process of the row's rank has already been sealed at its step."""
    if not view.is_contested(row.stream_id):
        return False
    own = view.streams[row.stream_id]
    others = (number for number in contributors.get(row.step, ()) if number != own.number)
    return any(view.ranks_by_stream.get(number) == own.rank for number in others)


def _origins(view: RunView, rows: Sequence[Row[Any]]) -> RowOrigins:
    return RowOrigins.of([(view.streams[row.stream_id], row.step, row.time) for row in rows])


def count_step_reports(view: RunView, rows: Sequence[Row[Any]]) -> dict[tuple[int, int], StepReports]:
    """How many reports of a step these rows are, by (step, stream)."""
    found: dict[tuple[int, int], StepReports] = {}
    for row in rows:
        key, count = (row.step, view.streams[row.stream_id].number), StepReports(1, row.parts)
        found[key] = found[key].plus(count) if key in found else count
    return found


def _table(
    view: RunView,
    attempt: int,
    rows: Sequence[Row[Any]],
    totals: Totals,
    contributors: Contributors,
    replicas_of: Callable[[str], FloatArray],
) -> AttemptPoints:
    grouped = group_steps(_origins(view, rows))
    replicas = None
    if view.replicated and rows:
        replicas = np.stack([replicas_of(row.stream_id) for row in rows])
        _exclude_replicas(view, rows, totals, contributors, replicas, replicas_of)
    return AttemptPoints(
        attempt=attempt,
        first_steps=grouped.steps,
        steps=grouped.steps,
        times=grouped.times,
        ranks=grouped.ranks - _uncounted_ranks(view, rows, grouped.steps, contributors),
        counts=np.ones(len(grouped.steps), dtype=np.int64),
        totals=merge_rows(grouped, totals, replicas),
    )


def _uncounted_ranks(
    view: RunView, rows: Sequence[Row[Any]], steps: IntArray, contributors: Contributors
) -> IntArray:
    """At each step, how many ranks are not to be counted: reports are missing, or they were sealed whole before."""
    if not contributors and all(row.parts == 1 for row in rows):
        return np.zeros(len(steps), dtype=np.int64)
    left = []
    for (step, stream), count in count_step_reports(view, rows).items():
        before = contributors.get(step, {}).get(stream)
        after = count if before is None else before.plus(count)
        if not after.whole or (before is not None and before.whole):
            left.append(step)
    return np.bincount(np.searchsorted(steps, np.array(left, dtype=np.int64)), minlength=len(steps))


def _exclude_replicas(
    view: RunView,
    rows: Sequence[Row[Any]],
    totals: Totals,
    contributors: Contributors,
    replicas: FloatArray,
    replicas_of: Callable[[str], FloatArray],
) -> None:
    """Set to NaN, in late rows, what another replica has already contributed to a sealed part."""
    names = {stream.number: stream.stream_id for stream in view.streams.values()}
    for index, row in enumerate(rows):
        sealed = [names[number] for number in contributors.get(row.step, ())]
        if not sealed:
            continue
        lowest = np.fmin.reduce([replicas_of(name) for name in sealed], axis=0)
        for values in totals.values():
            values[index] = np.where((replicas[index] != lowest) & ~np.isnan(lowest), np.nan, values[index])


def read_reports(
    connection: Connection, run_ids: Sequence[str], columns: Sequence[str], present: str, selection: Selection
) -> Iterator[Row[Any]]:
    """The journal's rows of these runs in which column `present` is not null, in no particular order."""
    if not run_ids:
        return
    table = schema.report
    statement = (
        select(*(table.c[name] for name in columns))
        .where(table.c.run_id.in_(run_ids), table.c[present].is_not(None))
        .execution_options(blobs=True, yield_per=_ROWS_AT_ONCE)
    )
    if selection.at is not None:
        places = [(run_id, selection.at[run_id]) for run_id in run_ids]
        statement = statement.where(or_damaged(tuple_(table.c.run_id, table.c.step).in_(places)))
    if selection.first_step is not None:
        statement = statement.where(or_damaged(table.c.step >= selection.first_step))
    if selection.last_step is not None:
        statement = statement.where(or_damaged(table.c.step <= selection.last_step))
    yield from connection.execute(statement)
