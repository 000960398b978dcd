"""Logged scalars: sealed parts and journal joined, by name.

An attempt that measures hides all that older ones logged from there on. An attempt's values under a name hide older
attempts' values of that name, from its first one on; this follows from the values themselves.

The snapshot and sealing read and pack them here. The packed form is fixed, because chunks hold it
(`tests/server/store/sealing.py`).
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, Row, TextClause, select, text, tuple_

from collage_server.memory_budget import held_rows
from collage_server.store import schema
from collage_server.store.archive.archive_reader import ArchiveReader
from collage_server.store.archive.parquet import LoggedSeries
from collage_server.store.reading.report_merging import RowOrigins, group_steps, visible
from collage_server.store.reading.run_view import RunView
from collage_server.store.reading.unsealed import ScalarRow, unsealed_rows
from collage_server.store.records import (
    UNBOUNDED,
    FloatArray,
    IntArray,
    ScalarPoints,
    Selection,
    StreamRecord,
    first_hidden_steps,
)
from collage_server.store.row_checks import whole_logged
from collage_server.store.row_helpers import given_rows, int_bytes, rows_given, scalars_from_json, shape_of
from collage_server.store.runs.reported_state import last_sealed_steps

__all__ = [
    "LoggedPart",
    "of_series",
    "pack_scalars",
    "read_logged_parts",
    "read_logged_tables",
    "read_newest_scalars",
    "read_scalar_points",
]

_NEWEST_PARTS: Final = 2
_KEYS_A_STATEMENT: Final = 1000
_KEY: Final = ("run_id", "stream_id", "name")
_ROWS_AT_ONCE: Final = 256
_COPIES: Final = 4
"""Memory for a logged value, which exists as stored, unpacked, joined, and in an answer at once."""
_ROW_BYTES: Final = 1024
LoggedPart = tuple[str, str, int]
"""Stream, name, part."""


@dataclass
class _LoggedValues:
    """Values of one name on one stream: of sealed parts, in the order in which they count (later ones win), and
    of reports that wait: seq, step, time and value of each, one after the other, in no order.
    """

    stream: StreamRecord
    parts: list[FloatArray] = field(default_factory=list)
    waiting: array[float] = field(default_factory=lambda: array("d"))

    def table(self) -> FloatArray:
        """[3][values]: steps, times, values, one column a step, the last word on it."""
        tail = np.frombuffer(self.waiting, dtype=np.float64).reshape(-1, 4)
        return _last_words(np.concatenate([*self.parts, tail[np.argsort(tail[:, 0]), 1:].T], axis=1))


def _last_words(values: FloatArray) -> FloatArray:
    """[3][values] with one column a step: the last one."""
    if np.all(values[0][1:] > values[0][:-1]):
        return values
    _, last = np.unique(values[0][::-1], return_index=True)
    return values[:, values.shape[1] - 1 - last]


def read_scalar_points(
    connection: Connection,
    archive: ArchiveReader,
    views: Mapping[str, RunView],
    names: Collection[str] | None,
    selection: Selection,
) -> dict[str, dict[str, ScalarPoints]]:
    """Logged values by run and name: a rank's last value for a step counts, then the mean over the ranks."""
    for view in views.values():
        view.check_rank(selection.rank)
    return _LoggedReading(connection, archive, views, names, selection).points({})


def read_newest_scalars(
    connection: Connection, archive: ArchiveReader, views: Mapping[str, RunView], count: int
) -> dict[str, dict[str, FloatArray]]:
    """The last `count` logged values by run and name, oldest first."""
    alone = {run_id: view for run_id, view in views.items() if len(view.attempts) == len(view.streams) == 1}
    in_rows = {run_id: view for run_id, view in alone.items() if not view.archived_whole}
    newest = _newest_rows(connection, in_rows, 2 * count)
    points = _LoggedReading(connection, archive, views, None, Selection()).points(newest)
    return {
        run_id: {name: entry.values[-count:] for name, entry in held.items()} for run_id, held in points.items()
    }


@dataclass(frozen=True)
class _LoggedReading:
    """A question about logged values of several runs, and the values found so far, by run, name and stream."""

    connection: Connection
    archive: ArchiveReader
    views: Mapping[str, RunView]
    names: Collection[str] | None
    selection: Selection
    found: dict[str, dict[tuple[str, str], _LoggedValues]] = field(default_factory=lambda: defaultdict(dict))

    def points(self, known: Mapping[str, Sequence[Row[Any]]]) -> dict[str, dict[str, ScalarPoints]]:
        """The answer by run and name; `known`: sealed rows of runs whose others need not be read."""
        self._read_archived()
        self._read_sealed(known)
        self._read_journal()
        points = {}
        for run_id, view in self.views.items():
            by_name: dict[str, list[_LoggedValues]] = defaultdict(list)
            for (name, _), values in sorted(self.found[run_id].items(), key=lambda entry: entry[1].stream.number):
                by_name[name].append(values)
            merged = {name: _merge(view, members, self.selection) for name, members in sorted(by_name.items())}
            points[run_id] = {name: entry for name, entry in merged.items() if len(entry.steps)}
        return points

    def _values(self, run_id: str, stream_id: str, name: str) -> _LoggedValues | None:
        """Where a stream's values of a name are put; None if nobody asks for them."""
        held = self.found[run_id]
        if (name, stream_id) not in held:
            stream = self.views[run_id].streams.get(stream_id)
            if stream is None or not (self.names is None or name in self.names):
                return None
            if self.selection.rank not in (None, stream.rank):
                return None
            held[name, stream_id] = _LoggedValues(stream)
        return held[name, stream_id]

    def _read_archived(self) -> None:
        """Values in files count before those sealed since."""

        def is_wanted(run_id: str, series: LoggedSeries) -> bool:
            return self._values(run_id, series.stream_id, series.name) is not None

        runs = [run_id for run_id, view in self.views.items() if view.archived_whole]
        for run_id, series, table in self.archive.logged(self.connection, runs, is_wanted) if runs else ():
            self.found[run_id][series.name, series.stream_id].parts.append(table)

    def _read_sealed(self, known: Mapping[str, Sequence[Row[Any]]]) -> None:
        """Rows that are not `known` already are read."""
        table = schema.scalar_chunk
        rows = [row for members in known.values() for row in members]
        if whole := [run_id for run_id in self.views if run_id not in known]:
            statement = select(table).where(table.c.run_id.in_(whole)).execution_options(blobs=True)
            if self.names is not None:
                statement = statement.where(table.c.name.in_(list(self.names)))
            ordered = statement.order_by(table.c.run_id, table.c.stream_id, table.c.name, table.c.part)
            stored = self.connection.execute(ordered.execution_options(yield_per=_ROWS_AT_ONCE))
            rows += map(whole_logged, held_rows((row, _COPIES * len(row.data) + _ROW_BYTES) for row in stored))
        alike = groupby(rows, lambda row: (row.run_id, row.stream_id, row.name, row.point_count))
        for (run_id, stream_id, name, count), members in alike:
            values = self._values(run_id, stream_id, name)
            if values is not None:
                values.parts.append(_unpack(b"".join([row.data for row in members]), count))

    def _read_journal(self) -> None:
        selection = self.selection
        if any(len(view.attempts) > 1 for view in self.views.values()):
            # Where an attempt began to log a name may lie before what is asked for.
            selection = replace(selection, first_step=None)
        for stream, row in unsealed_rows(self.connection, self.views, ScalarRow, "scalars", selection):
            for name, value in scalars_from_json(row.scalars).items():
                values = self._values(stream.run_id, stream.stream_id, name)
                if values is not None:
                    values.waiting.extend((row.seq, row.step, row.time, value))


def _newest_rows(connection: Connection, views: Mapping[str, RunView], count: int) -> dict[str, list[Row[Any]]]:
    """By run, the last parts of every name, where they hold at least `count` values each or are all there is.

    If a late report put older steps into the last parts, all parts of the run are read.

    To read all parts instead costs a comparison of 50 runs of 10,000 points 1.65 times the CPU.
    """
    steps = {
        (run_id, *key): step for run_id, view in views.items() for key, step in view.newest_logged_steps().items()
    }
    keys, dialect = list(steps), connection.dialect.name
    rows: list[Row[Any]] = []
    for start in range(0, len(keys), _KEYS_A_STATEMENT):
        some = keys[start : start + _KEYS_A_STATEMENT]
        given = {**rows_given(dialect, some), "parts": _NEWEST_PARTS}
        rows += map(whole_logged, connection.execute(_newest_statement(dialect, shape_of(dialect, some)), given))
    short = _runs_to_read_whole(connection, rows, steps, count)
    found: dict[str, list[Row[Any]]] = {run_id: [] for run_id in views if run_id not in short}
    for row in rows:
        if row.run_id not in short:
            found[row.run_id].append(row)
    return found


def _runs_to_read_whole(
    connection: Connection, rows: Sequence[Row[Any]], newest: Mapping[tuple[str, str, str], int], count: int
) -> set[str]:
    """Runs where the last parts of some name hold too few values, or not surely those of its newest steps."""
    short: set[str] = set()
    ends: dict[str, int] = {}
    for (run_id, *key), members in groupby(rows, lambda row: (row.run_id, row.stream_id, row.name)):
        held = list(members)
        spans = [np.frombuffer(row.data, dtype="<i8", count=row.point_count)[[0, -1]].tolist() for row in held]
        if held[0].part == 0:
            continue
        if sum(row.point_count for row in held) < count or any(a[1] >= b[0] for a, b in pairwise(spans)):
            short.add(run_id)
        elif spans[-1][1] != newest[run_id, key[0], key[1]]:
            ends[run_id] = min(spans[-1][1], ends.get(run_id, UNBOUNDED))
    # The newest value is in the journal or in an earlier part; a later sealed step means an earlier part.
    sealed = {run_id: step for (run_id, _), step in last_sealed_steps(connection, ends).items()} if ends else {}
    return short | {run_id for run_id, end in ends.items() if end < sealed.get(run_id, UNBOUNDED)}


@cache
def _newest_statement(dialect: str, shape: int) -> TextClause:
    same = "{0}.run_id = w.run_id AND {0}.stream_id = w.stream_id AND {0}.name = w.name"
    return text(
        f"WITH {given_rows(dialect, _KEY, shape)} "
        "SELECT t.run_id, t.stream_id, t.name, t.part, t.point_count, t.checks, t.data "
        "FROM w CROSS JOIN scalar_chunk t "
        f"WHERE {same.format('t')} AND t.part > "
        f"(SELECT max(s.part) FROM scalar_chunk s WHERE {same.format('s')}) - :parts "
        "ORDER BY t.run_id, t.stream_id, t.name, t.part"
    ).execution_options(blobs=True)


def _unpack(data: bytes, count: int) -> FloatArray:
    """[3][values]: steps, times, values of parts that hold `count` values each."""
    packed = np.frombuffer(data, dtype="<i8").reshape(-1, 3, count)
    steps = packed[:, 0].astype(np.float64).ravel()
    return np.stack([steps, packed[:, 1].ravel().view("<f8"), packed[:, 2].ravel().view("<f8")])


def _of_one_stream(view: RunView, values: _LoggedValues, selection: Selection) -> ScalarPoints:
    """Drop hidden and unrequested values; nothing is merged."""
    table = values.table()
    seen = (table[0] < view.first_hidden_step(values.stream.attempt)) & _within(table[0], selection)
    return ScalarPoints(table[0][seen].astype(np.int64), table[1][seen], table[2][seen])


def _within(steps: IntArray | FloatArray, selection: Selection) -> NDArray[np.bool_]:
    last = UNBOUNDED if selection.last_step is None else selection.last_step
    return ((selection.first_step or 0) <= steps) & (steps <= last)


def _merge(view: RunView, members: list[_LoggedValues], selection: Selection) -> ScalarPoints:
    if len(members) == 1:
        return _of_one_stream(view, members[0], selection)
    tables = [(entry.stream, entry.table()) for entry in members]
    sizes = [table.shape[1] for _, table in tables]
    joined = np.concatenate([table for _, table in tables], axis=1)
    origins = RowOrigins(
        streams=np.repeat([stream.number for stream, _ in tables], sizes),
        attempts=np.repeat([stream.attempt for stream, _ in tables], sizes),
        ranks=np.repeat([stream.rank for stream, _ in tables], sizes),
        steps=joined[0].astype(np.int64),
        times=joined[1],
    )
    seen = visible(origins, first_hidden_steps(_begins(view, tables))) & _within(origins.steps, selection)
    grouped = group_steps(origins[seen])
    with np.errstate(invalid="ignore"):
        sums = np.bincount(grouped.points, weights=joined[2][seen], minlength=len(grouped.steps))
    counts = np.bincount(grouped.points, minlength=len(grouped.steps))
    return ScalarPoints(grouped.steps, grouped.times, sums / np.maximum(counts, 1))


def _begins(view: RunView, tables: Sequence[tuple[StreamRecord, FloatArray]]) -> list[tuple[int, int | None]]:
    """(attempt, the step from which it hides what older ones logged under a name), from all values of that name."""
    begins = {attempt: UNBOUNDED if begin is None else begin for attempt, begin in view.attempts}
    for stream, table in tables:
        begins[stream.attempt] = min(begins[stream.attempt], int(table[0].min(initial=UNBOUNDED)))
    return list(begins.items())


def pack_scalars(rows: Sequence[Row[Any]]) -> dict[tuple[str, str], tuple[int, bytes]]:
    """(stream_id, name) → (count, packed values) of all scalars in these rows; the last word on a step counts."""
    found: dict[tuple[str, str], array[float]] = defaultdict(lambda: array("d"))
    for row in sorted(rows, key=lambda row: row.seq):
        for name, value in scalars_from_json(row.scalars).items() if row.scalars else ():
            found[row.stream_id, name].extend((row.step, row.time, value))
    packed = {}
    for key in list(found):
        values = np.frombuffer(found.pop(key), dtype=np.float64).reshape(-1, 3)[::-1]
        _, last = np.unique(values[:, 0], return_index=True)
        table = values[last]
        packed[key] = (
            len(last),
            int_bytes(table[:, 0].astype(np.int64)) + np.ascontiguousarray(table[:, 1:].T, dtype="<f8").tobytes(),
        )
    return packed


def of_series(run_id: str, keys: Sequence[tuple[str, str]]) -> tuple[ColumnElement[bool], ...]:
    """The condition for rows with values of these streams and names."""
    table = schema.scalar_chunk
    return table.c.run_id == run_id, tuple_(table.c.stream_id, table.c.name).in_(keys)


def read_logged_parts(connection: Connection, run_id: str, keys: Sequence[tuple[str, str]]) -> list[LoggedPart]:
    """All parts of these streams and names, in the order in which their values count."""
    table = schema.scalar_chunk
    columns = (table.c.stream_id, table.c.name, table.c.part)
    rows = connection.execute(select(*columns).where(*of_series(run_id, keys)))
    return sorted((row.stream_id, row.name, row.part) for row in rows)


def read_logged_tables(
    connection: Connection, run_id: str, parts: Sequence[LoggedPart]
) -> dict[tuple[str, str], FloatArray]:
    """[3][values] steps, times, values by stream and name, those of one name side by side."""
    keys = sorted({part[:2] for part in parts}, key=lambda key: key[::-1])
    table = schema.scalar_chunk
    statement = select(table).where(*of_series(run_id, keys)).order_by(table.c.part)
    found: dict[tuple[str, str], list[FloatArray]] = {key: [] for key in keys}
    rows = connection.execute(statement.execution_options(blobs=True))
    for row in map(whole_logged, held_rows((row, _COPIES * len(row.data)) for row in rows)):
        found[row.stream_id, row.name].append(_unpack(row.data, row.point_count))
    return {key: _last_words(np.concatenate(tables, axis=1)) for key, tables in found.items()}
