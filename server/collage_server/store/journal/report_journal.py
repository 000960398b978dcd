"""The journal: one packed row a report, inserted exactly once, read back as vectors and tables.

The writer appends; `reading/unsealed.py` and sealing read. Each (stream, number) is stored exactly once
(`tests/server/store/laws.py`). `schema.report` defines a row; changing it needs a migration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Dialect,
    bindparam,
    exists,
    func,
    insert,
    literal,
    select,
    tuple_,
    update,
)

from collage_monitor import wire
from collage_server.store import schema
from collage_server.store.engine.database import Database, Statement, driver_cursor
from collage_server.store.records import (
    ROW_BYTES,
    SCALAR_BYTES,
    GroupOutcome,
    NewEvent,
    ReportGroup,
    StreamRecord,
)
from collage_server.store.row_checks import report_checks, require_row, update_rows
from collage_server.store.row_crc import CRC_BYTES, group_check
from collage_server.store.row_helpers import (
    Ranges,
    add_ranges,
    contains,
    count_numbers,
    ranges_from_json,
    ranges_to_json,
    require_run,
    scalars_to_json,
    to_json,
)
from collage_server.store.runs.events import COUNTS_WITH_EVENTS, add_events, count_event

__all__ = ["REPORT_BYTES", "ReportJournal"]

_MARK: Final = '":'
"""Follows each name in a report's scalars, which are JSON text."""
_MARKS: Final = func.length(schema.report.c.scalars) - func.length(func.replace(schema.report.c.scalars, _MARK, ""))
REPORT_BYTES: Final[ColumnElement[int]] = sum(
    (func.coalesce(func.length(schema.report.c[name]), 0) for name in ("scalars", "model", "statistics")),
    literal(ROW_BYTES) + SCALAR_BYTES // len(_MARK) * func.coalesce(_MARKS, 0),
)
"""The same estimate as `report_bytes`, in SQL for a row of the journal."""
_Destination = Literal["journal", "sealed", "late", "too_many_names", "gone"]
_LATEST: Final = schema.run_latest
_REPORT: Final = schema.report
_MOST_NAMES: Final = wire.LIMITS["scalar_names_per_stream"]
_DECODE: Final = msgspec.json.Decoder(dict[str, tuple[int, wire.Number]]).decode
_DECODE_UNFINISHED: Final = msgspec.json.Decoder(dict[int, tuple[int, int]]).decode
_REPORTS_A_STATEMENT: Final = (4, 2, 1)
"""One report a statement takes PostgreSQL 1.3 times as long; of more, psycopg parses the text each time."""
_MOST_GAPS: Final = 10_000
_KNOWN_EXPORTS: Final = 128
"""By stream: an exporter gives up after a minute, a collector's queue may hold some, out of order."""
_UNFINISHED_STEPS: Final = 64
"""How many steps with missing reports a stream's row remembers; the oldest are given up."""
_WRITTEN_COLUMNS: Final = (
    "reports",
    "last_seq",
    "first_step",
    "last_step",
    "first_time",
    "last_report_at",
    "measured_seq",
    "measured_step",
    "scalars",
    "clock_skew_seconds",
    "unfinished",
)
_READ_COLUMNS: Final = ("run_id", "stream_id", "attempt", "rank", "frozen_step", "sealed", "given_up", "checks")
_SEALED, _REPORTED = 0, 1
"""Groups of columns (`row_crc.py`): where reports go, and what each of them changes."""
_UNKNOWN_SEQ: Final = 2**63
"""Above all numbers: whether the journal has a report is then looked up."""
_DAMAGED: Final = bytes(CRC_BYTES)
"""Keeps what is damaged unreadable: a check of what it is now would hide it."""
_BLANK: Final[Mapping[str, Any]] = {"reports": 0, "scalars": "{}", "unfinished": "{}"}


@lru_cache(maxsize=64)
def _read_latest(dialect: Dialect, count: int) -> Statement:
    """Lock and read the rows of `count` streams, always in the key's order, so that servers cannot deadlock."""
    key = (_LATEST.c.run_id, _LATEST.c.stream_id)
    own: BindParameter[Any] = bindparam("own", [("", "")] * count, expanding=True)
    columns = (_LATEST.c[name] for name in (*_READ_COLUMNS, *_WRITTEN_COLUMNS))
    return Statement(select(*columns).where(tuple_(*key).in_(own)).order_by(*key).with_for_update(), dialect)


@lru_cache(maxsize=4)
def _write_latest(dialect: Dialect) -> Statement:
    own = (_LATEST.c.run_id == bindparam("own_run"), _LATEST.c.stream_id == bindparam("own_stream"))
    written: dict[str, Any] = {name: bindparam(name) for name in (*_WRITTEN_COLUMNS, "checks")}
    return Statement(update(_LATEST).where(*own).values(written), dialect)


class _LatestRow:
    """A stream's locked row of `run_latest`: decides where reports go, and counts the stored ones.

    A damaged one is read by nobody, but takes reports: all go to the journal, and none is lost.
    """

    def __init__(self, row: Sequence[Any]) -> None:
        held = dict(zip((*_READ_COLUMNS, *_WRITTEN_COLUMNS), row, strict=True))
        self.run_id, self.stream_id = held["run_id"], held["stream_id"]
        self.key = {"own_run": self.run_id, "own_stream": self.stream_id}
        self._place = {name: held[name] for name in ("stream_id", "attempt", "rank")}
        self._checks: bytes | None = held["checks"]
        is_placed = self._checks is None or self._checks[:CRC_BYTES] == group_check(_LATEST, _SEALED, held)
        self.frozen_step = held["frozen_step"] if is_placed else None
        self._sealed = ranges_from_json(held["sealed"]) if is_placed else []
        self.values: dict[str, Any] = {name: held[name] for name in _WRITTEN_COLUMNS}
        self._is_whole = self._checks is None or self._checks[CRC_BYTES:] == self._check()
        if not self._is_whole:
            self.values = {name: _BLANK.get(name) for name in _WRITTEN_COLUMNS}
        self.scalars = _DECODE(self.values["scalars"])
        self._unfinished = _DECODE_UNFINISHED(self.values["unfinished"])
        self._fresh: set[str] = set()
        self.events: list[NewEvent] = []
        self.moved = False
        self.ascending = True
        self._highest_seq: int | None = self.values["last_seq"] if self._is_whole else _UNKNOWN_SEQ
        self.newest_time = -math.inf

    def destination(self, report: wire.Report) -> _Destination:
        """Decide where a report goes; whether the journal already has it is found out later.

        "sealed": it is stored in a chunk. "late": its totals belong to steps that retention has made coarse.
        "too_many_names": its new names exceed a stream's limit, because each commit of the stream writes all names.
        """
        if contains(self._sealed, report.seq):
            return "sealed"
        if self.frozen_step is not None and report.step <= self.frozen_step and report.model is not None:
            return "late"
        if not self._has_room_for_names(report):
            return "too_many_names"
        self._note_order(report.seq)
        return "journal"

    def _has_room_for_names(self, report: wire.Report) -> bool:
        """Whether the stream may log under the report's names, too; if so, they are remembered."""
        fresh = [name for name in report.scalars if name not in self.scalars and name not in self._fresh]
        if fresh and len(self.scalars) + len(self._fresh) + len(fresh) > _MOST_NAMES:
            return False
        self._fresh.update(fresh)
        return True

    def _note_order(self, seq: int) -> None:
        """Note whether numbers only ascend: above `last_seq` none can be stored yet, since this row is locked."""
        if self._highest_seq is None or seq > self._highest_seq:
            self._highest_seq = seq
        else:
            self.ascending = False

    def take_in(self, report: wire.Report) -> None:
        """Count one newly stored report and keep its newest values."""
        values = self.values
        self.moved = True
        values["reports"] += 1
        self.newest_time = max(self.newest_time, report.time)
        values["last_seq"] = _highest(values["last_seq"], report.seq)
        values["last_step"] = _highest(values["last_step"], report.step)
        if values["first_step"] is None or report.step < values["first_step"]:
            values["first_step"] = report.step
        if values["first_time"] is None or report.time < values["first_time"]:
            values["first_time"] = report.time
        if report.model is not None and self._completes(report):
            place = (report.step, report.seq)
            if values["measured_step"] is None or place > (values["measured_step"], values["measured_seq"]):
                values["measured_step"], values["measured_seq"] = place
        for name, value in report.scalars.items():
            if name not in self.scalars or report.step >= self.scalars[name][0]:
                if name in COUNTS_WITH_EVENTS:
                    self._count(name, value, report.step)
                self.scalars[name] = (report.step, wire.to_number(value))

    def _completes(self, report: wire.Report) -> bool:
        """Whether this report completes its step."""
        came, expected = self._unfinished.pop(report.step, (0, 1))
        came, expected = came + 1, max(expected, report.reports_of_step)
        if came < expected:
            self._unfinished[report.step] = (came, expected)
            if len(self._unfinished) > _UNFINISHED_STEPS:
                del self._unfinished[min(self._unfinished)]
        return came >= expected

    def _count(self, name: str, value: float, step: int) -> None:
        _, old = self.scalars.get(name, (0, 0.0))
        event = count_event(name, float(old), value, step=step, **self._place)
        if event is not None:
            self.events.append(event)

    def parameters(self, now: float) -> dict[str, Any]:
        """Parameters for `_write_latest`."""
        skews = [self.newest_time - now, self.values["clock_skew_seconds"]]
        skew = max(entry for entry in skews if entry is not None)
        self.values.update(last_report_at=now, scalars=to_json(self.scalars), clock_skew_seconds=skew)
        self.values["unfinished"] = to_json(self._unfinished)
        check = self._check() if self._is_whole else _DAMAGED
        return {**self.values, **self.key, "checks": self._checks and self._checks[:CRC_BYTES] + check}

    def _check(self) -> bytes:
        return group_check(_LATEST, _REPORTED, {"run_id": self.run_id, **self._place, **self.values})


@lru_cache(maxsize=4)
def _read_known(dialect: Dialect) -> Statement:
    own = (_REPORT.c.run_id == bindparam("own_run"), _REPORT.c.stream_id == bindparam("own_stream"))
    within = _REPORT.c.seq.between(bindparam("first"), bindparam("last"))
    return Statement(select(_REPORT.c.seq).where(*own, within), dialect)


@lru_cache(maxsize=16)
def _insert_reports(dialect: Dialect, count: int) -> Statement:
    rows: list[dict[str, Any]] = [
        {column.name: bindparam(f"{column.name}_{i}") for column in _REPORT.c} for i in range(count)
    ]
    return Statement(insert(_REPORT).values(rows), dialect)


class _Exports(msgspec.Struct):
    """Exports of a stream: by time its count, and its reports' numbers by digest. `forgotten`: the newest time that
    is known no more."""

    times: dict[int, tuple[int, dict[int, int]]] = msgspec.field(default_factory=dict)
    forgotten: int = 0
    count: int = 0
    next_seq: int = 0

    def place(self, time: int, digest: int) -> tuple[int, int] | None:
        """(seq, count) of an export, which is known from now on."""
        if time not in self.times:
            oldest = min(self.times, default=0) if len(self.times) == _KNOWN_EXPORTS else self.forgotten
            if time <= oldest:
                return None
            if len(self.times) == _KNOWN_EXPORTS:
                self.forgotten = oldest
                del self.times[oldest]
            self.count += 1
            self.times[time] = (self.count, {})
        count, numbers = self.times[time]
        if digest not in numbers:
            numbers[digest] = self.next_seq
            self.next_seq += 1
        return numbers[digest], count


_DECODE_EXPORTS: Final = msgspec.json.Decoder(_Exports).decode


class ReportJournal:
    """Keeps each report once until it is sealed. Only one thread at a time may call `append`.

    last_bytes: the size of the request bodies in the newest commit, set as it begins.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.last_bytes = 0

    def append(self, groups: Sequence[ReportGroup], now: float) -> list[GroupOutcome]:
        """Store all groups in one transaction, which is durable when this returns."""
        self.last_bytes = sum(group.body_bytes for group in groups)
        with self._database.appending() as connection:
            return append(connection, groups, now)

    def number_exports(
        self, stream: StreamRecord, exports: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int] | None]:
        """(seq, count) of the report that each export becomes: the same whenever it is sent again.

        exports: time in nanoseconds, and a digest of what it holds; several of one time differ in that. `count` is
        the place of its time among all, from 1. None: it is older than all that are still known.

        Raises:
            Gone, NotFound: the run was deleted.
        """
        table = schema.numbered_export
        mine = {"run_id": stream.run_id, "stream_id": stream.stream_id}
        own = [table.c[name] == value for name, value in mine.items()]
        with self._database.writing() as connection:
            require_run(connection, stream.run_id, lock=True)
            row = connection.execute(select(table).where(*own)).first()
            if row is not None:
                require_row(table, row)
            known = _Exports() if row is None else _DECODE_EXPORTS(row.known)
            places = [known.place(time, digest) for time, digest in exports]
            told = to_json(known)
            if row is None:
                connection.execute(insert(table).values(**mine, known=told))
            elif told != row.known:
                update_rows(connection, table, {"known": told}, *own)
        return places

    def record_gaps(self, stream: StreamRecord, gaps: Sequence[wire.ReportGap], now: float) -> None:
        """Add gaps to the stream's, with an event if any is new.

        A stream keeps up to `_MOST_GAPS` ranges. Later gaps count as missing; no report is refused.
        """
        with self._database.writing() as connection:
            mine = (_LATEST.c.run_id == stream.run_id, _LATEST.c.stream_id == stream.stream_id)
            known = connection.execute(select(_LATEST.c.given_up).where(*mine).with_for_update()).scalar()
            if known is None:
                return
            before = ranges_from_json(known)
            merged = add_ranges(before, [(gap.first_seq, gap.last_seq) for gap in gaps])
            if merged != before and len(merged) <= _MOST_GAPS:
                update_rows(connection, _LATEST, {"given_up": ranges_to_json(merged)}, *mine)
                add_events(connection, stream.run_id, [_gap_event(stream, gaps, before, merged)], now)

    def runs(self) -> list[str]:
        """Runs with reports in the journal, found without reading all of it."""
        with self._database.reading() as connection:
            run_id = schema.run.c.run_id
            waiting = exists().where(_REPORT.c.run_id == run_id)
            return list(connection.execute(select(run_id).where(waiting).order_by(run_id)).scalars())

    def oldest_time(self) -> float | None:
        """When the oldest report that waits to be sealed was made, by its sender's clock; None: none waits."""
        own = (_REPORT.c.run_id == _LATEST.c.run_id, _REPORT.c.stream_id == _LATEST.c.stream_id)
        first = select(_REPORT.c.time).where(*own).order_by(_REPORT.c.seq).limit(1).scalar_subquery()
        with self._database.reading() as connection:
            found = connection.execute(select(func.min(first)).select_from(_LATEST)).scalar_one()
        return None if found is None else float(found)

    def bytes_of(self, run_id: str) -> int:
        """The size of the run's reports in the journal, as its bounds count it."""
        with self._database.reading() as connection:
            total = select(func.coalesce(func.sum(REPORT_BYTES), 0)).where(_REPORT.c.run_id == run_id)
            return int(connection.execute(total).scalar_one())


def append(connection: Connection, groups: Sequence[ReportGroup], now: float) -> list[GroupOutcome]:
    """Insert the groups' reports and update `run_latest`; the caller's transaction ends with this.

    It uses the driver's own cursor, in a pipeline on PostgreSQL. Through SQLAlchemy each statement is a round trip
    there, and a report costs server and database 1.6 to 2.2 times the CPU (SQLite: 1.2 to 1.4).
    """
    latest: dict[str, _LatestRow | None] = {group.stream.stream_id: None for group in groups}
    dialect = connection.dialect
    with driver_cursor(connection) as cursor:
        for entry in _lock_latest(cursor, dialect, groups):
            latest[entry.stream_id] = entry
        destinations = [_destinations(group, latest[group.stream.stream_id]) for group in groups]
        rows = [
            _row(group.stream, report)
            for group, chosen in zip(groups, destinations, strict=True)
            for report, destination in zip(group.reports, chosen, strict=True)
            if destination == "journal"
        ]
        found = [entry for entry in latest.values() if entry is not None]
        repeated = [entry for entry in found if not entry.ascending]
        flags = iter(_insert_new(cursor, dialect, rows, repeated))
        outcomes = [
            _outcome(group, latest[group.stream.stream_id], chosen, flags)
            for group, chosen in zip(groups, destinations, strict=True)
        ]
        write = _write_latest(dialect)
        for entry in found:
            if entry.moved:
                cursor.execute(write.text, write.bind(entry.parameters(now)))
        if not any(entry.events for entry in found):
            _commit(cursor)
    for entry in sorted(found, key=lambda entry: entry.run_id):
        if entry.events:
            add_events(connection, entry.run_id, entry.events, now)
    return outcomes


def _commit(cursor: Any) -> None:
    """Commit in the pipeline, so that it is sent together with the statements that wait."""
    cursor.execute("COMMIT")


def _insert_new(
    cursor: Any, dialect: Dialect, rows: Sequence[dict[str, Any]], repeated: Sequence[_LatestRow]
) -> list[bool]:
    """Insert the rows that the journal lacks, and return which these are. Only `repeated` streams may have some.

    `_lock_latest` has locked the streams: a row that is missing now is still missing at the insert.
    """
    known = {entry.stream_id: _known_seqs(cursor, dialect, rows, entry) for entry in repeated}
    flags = []
    for row in rows:
        seen = known.get(row["stream_id"])
        flags.append(seen is None or row["seq"] not in seen)
        if seen is not None:
            seen.add(row["seq"])
    fresh, start = [row for row, is_new in zip(rows, flags, strict=True) if is_new], 0
    while start < len(fresh):
        count = next(size for size in _REPORTS_A_STATEMENT if size <= len(fresh) - start)
        insertion, some = _insert_reports(dialect, count), fresh[start : start + count]
        values = {f"{name}_{i}": value for i, row in enumerate(some) for name, value in row.items()}
        cursor.execute(insertion.text, insertion.bind(values))
        start += count
    return flags


def _known_seqs(cursor: Any, dialect: Dialect, rows: Sequence[dict[str, Any]], entry: _LatestRow) -> set[int]:
    """The stream's numbers in the journal, within the range of these rows."""
    numbers = [row["seq"] for row in rows if row["stream_id"] == entry.stream_id]
    read = _read_known(dialect)
    cursor.execute(read.text, read.bind({**entry.key, "first": min(numbers), "last": max(numbers)}))
    return {seq for (seq,) in cursor.fetchall()}


def _lock_latest(cursor: Any, dialect: Dialect, groups: Sequence[ReportGroup]) -> Iterator[_LatestRow]:
    """Lock the rows of these streams. Repeating keys up to a power of two keeps the number of SQL texts small."""
    own = sorted({(group.stream.run_id, group.stream.stream_id) for group in groups})
    own += own[-1:] * ((1 << (len(own) - 1).bit_length()) - len(own))
    values = {f"own_{i}_{j}": part for i, key in enumerate(own, 1) for j, part in enumerate(key, 1)}
    read = _read_latest(dialect, len(own))
    cursor.execute(read.text, read.bind(values))
    return map(_LatestRow, cursor.fetchall())


def _destinations(group: ReportGroup, latest: _LatestRow | None) -> list[_Destination]:
    return ["gone" if latest is None else latest.destination(report) for report in group.reports]


def _outcome(
    group: ReportGroup, latest: _LatestRow | None, destinations: Sequence[_Destination], flags: Iterator[bool]
) -> GroupOutcome:
    if latest is None:
        return GroupOutcome(0, 0, gone=True)
    accepted = accepted_bytes = 0
    for report, size, destination in zip(group.reports, group.journal_bytes, destinations, strict=True):
        if destination == "journal" and next(flags):
            accepted += 1
            accepted_bytes += size
            latest.take_in(report)
    late, too_many_names = (
        tuple(i for i, destination in enumerate(destinations) if destination == kind)
        for kind in ("late", "too_many_names")
    )
    duplicates = len(destinations) - accepted - len(late) - len(too_many_names)
    return GroupOutcome(
        accepted,
        duplicates,
        accepted_bytes,
        late=late,
        too_many_names=too_many_names,
        frozen_step=latest.frozen_step,
    )


def _row(stream: StreamRecord, report: wire.Report) -> dict[str, Any]:
    row = {
        "run_id": stream.run_id,
        "stream_id": stream.stream_id,
        "seq": report.seq,
        "step": report.step,
        "time": report.time,
        "scalars": scalars_to_json(report.scalars) if report.scalars else None,
        "statistic_count": report.statistic_count,
        "layer_count": report.layer_count,
        "parts": report.reports_of_step,
        "model": report.model,
        "statistics": report.statistics,
    }
    return row | report_checks(row)


def _highest(known: int | None, value: int) -> int:
    return value if known is None or value > known else known


def _gap_event(stream: StreamRecord, gaps: Sequence[wire.ReportGap], before: Ranges, merged: Ranges) -> NewEvent:
    total = count_numbers(merged)
    fresh = total - count_numbers(before)
    reasons = ", ".join(sorted({gap.reason for gap in gaps}))
    return NewEvent(
        origin=f"gap/{stream.stream_id}/{total}",
        kind="gap",
        text=f"{fresh} report{'s' if fresh > 1 else ''} of rank {stream.rank} will never come ({reasons[:500]})",
        attempt=stream.attempt,
    )
