"""What to seal next: which reports of which attempt become a part of which chunk, and within which limits.

`seal.py` carries a `SealPlan` out. `SealLimits` may change freely: they bound work and memory, and chunks of any
size can be read. `tests/server/store/contract.py` seals in tiny ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, Row, Select, bindparam, select

from collage_server.store import schema
from collage_server.store.chunks.blobs import LEVELS, ChunkInfo, read_chunk_infos, read_point_rows
from collage_server.store.journal.report_journal import REPORT_BYTES
from collage_server.store.reading.run_view import RunView
from collage_server.store.records import UNBOUNDED
from collage_server.store.row_checks import REPORT_PARTS, require_report
from collage_server.store.runs.reported_state import awaited_streams

__all__ = [
    "JournalContents",
    "SealLimits",
    "SealPlan",
    "numbers_between",
    "of_stream",
    "plan_seal",
    "read_journal",
    "read_planned",
]

_COLUMNS: Final = (
    "stream_id",
    "run_id",
    "seq",
    "step",
    "time",
    "scalars",
    "statistic_count",
    "layer_count",
    "parts",
    "checks",
    "model",
    "statistics",
)


_ROWS_AT_ONCE: Final = 256
"""Fetched one by one, they cost 1.3 times the CPU."""


@dataclass(frozen=True, kw_only=True)
class SealLimits:
    """When the journal becomes chunks of `points` measured points: by `part_points` of at least `part_bytes`, or
    earlier by bytes or rows. Small parts, as of a run without layers, wait for the whole chunk, because each part
    has a cost. The journal's bound for a run must be larger than `bytes`.

    `slice_rows` and `slice_bytes` bound one write transaction, `delete_rows` and `delete_bytes` one deletion from
    the journal, so that acknowledgements do not wait. `coarse_bytes` bounds the part of a whole chunk that is read
    at once to make its coarse levels.
    """

    points: int = 256
    part_points: int = 64
    part_bytes: int = 2**18
    bytes: int = 32 * 2**20
    rows: int = 8192
    late_rows: int = 64
    slice_rows: int = 6
    slice_bytes: int = 2**19
    delete_rows: int = 256
    delete_bytes: int = 2**22
    coarse_bytes: int = 2**23

    def scaled_to_commits(self, commit_bytes: int) -> SealLimits:
        """Limits for commits of so many bytes: slices a quarter as large, if that is more than now.

        Each slice waits for a commit: with small slices between large commits, sealing would fall behind.
        """
        factor = max(1, commit_bytes // (4 * self.slice_bytes))
        return replace(
            self,
            slice_rows=factor * self.slice_rows,
            slice_bytes=factor * self.slice_bytes,
            delete_rows=factor * self.delete_rows,
            delete_bytes=factor * self.delete_bytes,
        )


@dataclass(frozen=True, eq=False)
class SealPlan:
    """Reports (stream_id, seq) that become one part of a chunk; `info` is the chunk so far, None for a new one."""

    attempt: int
    chunk: int
    part: int
    first_step: int
    last_step: int
    reports: frozenset[tuple[str, int]]
    info: ChunkInfo | None

    @property
    def chunk_so_far(self) -> list[int]:
        """The chunk, if something of it is sealed already."""
        return [] if self.info is None else [self.chunk]

    def seqs_by_stream(self) -> dict[str, list[int]]:
        """The seq of each report by stream, both sorted."""
        found: dict[str, list[int]] = defaultdict(list)
        for stream_id, seq in sorted(self.reports):
            found[stream_id].append(seq)
        return found


@dataclass(frozen=True)
class _WaitingReport:
    """`statistics`: of so many it has totals; `layers`: so many of the dictionary's first hold its own."""

    stream_id: str
    seq: int
    step: int
    measured: bool
    bytes: int
    statistics: int
    layers: int


@dataclass(frozen=True, eq=False)
class JournalContents:
    """A run's journal as it stood at one moment, without the blobs.

    `leftovers` (stream_id, seq) stand in chunks already: a sealing was interrupted before it deleted them.
    `waiting` are the others by attempt; `ready`, by attempt, is the step that every live rank has passed, None when
    the attempt is over. `journal_full`: there is no room for more, so nobody is waited for.
    """

    leftovers: list[tuple[str, int]]
    waiting: dict[int, list[_WaitingReport]]
    ready: dict[int, int | None]
    journal_full: bool

    def without(self, reports: frozenset[tuple[str, int]]) -> JournalContents:
        """The rest after these are sealed."""
        left = {
            attempt: [report for report in members if (report.stream_id, report.seq) not in reports]
            for attempt, members in self.waiting.items()
        }
        return JournalContents(
            [], {attempt: members for attempt, members in left.items() if members}, self.ready, self.journal_full
        )


def read_journal(
    connection: Connection,
    view: RunView,
    *,
    now: float,
    closed: bool,
    journal_full: bool,
    stale_after_seconds: float,
) -> JournalContents:
    """Read the run's journal. `closed`: the training is over, its tail is sealed too; that of a second writer once
    it is silent, as it may write to a run that has ended long ago, a value at a time."""
    leftovers: list[tuple[str, int]] = []
    waiting: dict[int, list[_WaitingReport]] = defaultdict(list)
    for report in _waiting_reports(connection, view):
        if view.is_sealed(report.stream_id, report.seq):
            leftovers.append((report.stream_id, report.seq))
        elif report.stream_id in view.streams:
            waiting[view.streams[report.stream_id].attempt].append(report)
    newest = max(waiting, default=0)
    ready: dict[int, int | None] = {
        attempt: None if closed or attempt < newest else _ready_step(connection, view, attempt, stale_after_seconds)
        for attempt in waiting
        if attempt > 0
    }
    speaking = {row.attempt for row in view.latest_rows if (row.last_report_at or 0) >= now - stale_after_seconds}
    ready |= {attempt: UNBOUNDED if attempt in speaking else None for attempt in waiting if attempt < 0}
    return JournalContents(leftovers, dict(waiting), ready, journal_full)


def _waiting_reports(connection: Connection, view: RunView) -> Iterator[_WaitingReport]:
    found = connection.execute(_journal_of_run(), {"run": view.run_id})
    for stream_id, seq, step, measured, size, statistics, count, by_layer in chain.from_iterable(
        found.partitions(_ROWS_AT_ONCE)
    ):
        layers = view.prefix(stream_id, count) if by_layer else 0
        yield _WaitingReport(stream_id, seq, step, bool(measured), size, statistics, layers)


@cache
def _journal_of_run() -> Select[Any]:
    table = schema.report
    known = (table.c.stream_id, table.c.seq, table.c.step, table.c.model.is_not(None), REPORT_BYTES)
    counts = (table.c.statistic_count, table.c.layer_count, table.c.statistics.is_not(None))
    of_run = table.c.run_id == bindparam("run")
    return select(*known, *counts).where(of_run).order_by(table.c.stream_id, table.c.seq)


def plan_seal(
    connection: Connection, view: RunView, journal: JournalContents, limits: SealLimits, *, late: bool = True
) -> SealPlan | None:
    """The next part to make, None when nothing is due; without `late` none for steps that are sealed already."""
    infos = read_chunk_infos(connection, [view.run_id])[view.run_id]
    for journal_full in (False, True) if journal.journal_full else (False,):
        for attempt, members in sorted(journal.waiting.items()):
            own = [info for info in infos if info.attempt == attempt]
            ready = None if journal_full else journal.ready[attempt]
            plan = _late(attempt, members, own, limits, over=ready is None) if late else None
            room = _room(connection, view.run_id, own, limits)
            plan = plan or _next(attempt, members, own, room, limits, ready)
            if plan is not None:
                return plan
    return None


def _ready_step(connection: Connection, view: RunView, attempt: int, stale_after_seconds: float) -> int:
    """The step that every rank of the attempt has passed; who is silent or measures no more holds nobody back."""
    rows = [row for row in view.latest_rows if row.attempt == attempt and row.last_report_at is not None]
    if not rows:
        return -1
    live = awaited_streams(connection, view.run_id, attempt, rows, stale_after_seconds)
    measuring = [row.measured_step for row in live if row.measured_step is not None]
    return int(min(measuring) if measuring else min(row.last_step for row in live) - 1)


def _late(
    attempt: int,
    waiting: Sequence[_WaitingReport],
    infos: Sequence[ChunkInfo],
    limits: SealLimits,
    *,
    over: bool,
) -> SealPlan | None:
    """Late reports, of steps that are sealed already, become a part of their own once there are enough of them."""
    if not infos:
        return None
    late = [report for report in waiting if report.step <= infos[-1].last_step]
    if not late or (len(late) < limits.late_rows and not over):
        return None
    info = next(info for info in infos if min(report.step for report in late) <= info.last_step)
    of_chunk = [report for report in late if report.step <= info.last_step]
    cutoff = _cutoff(of_chunk, 0, limits, over=True) or 0
    chosen = [report for report in of_chunk if report.step <= cutoff]
    return _plan(attempt, info.chunk, info.parts, chosen, info)


def _room(connection: Connection, run_id: str, infos: Sequence[ChunkInfo], limits: SealLimits) -> int:
    """Measured points for which the newest chunk has room; late parts repeat steps that it already holds."""
    if not infos or infos[-1].levels != {LEVELS[0]}:
        return 0
    newest = infos[-1]
    held = newest.point_count
    if newest.parts > 1:
        points = read_point_rows(connection, LEVELS[0], {(run_id, newest.attempt): [newest.chunk]})
        held = len(np.unique(points.steps))
    return max(limits.points - held, 0)


def _next(
    attempt: int,
    waiting: Sequence[_WaitingReport],
    infos: Sequence[ChunkInfo],
    room: int,
    limits: SealLimits,
    ready: int | None,
) -> SealPlan | None:
    """The reports after the last sealed step: all that are due, as far as the chunk has `room` (0: a new chunk)."""
    open_chunk = infos[-1] if room else None
    after = infos[-1].last_step if infos else -1
    fresh = [report for report in waiting if report.step > after and (ready is None or report.step <= ready)]
    if not fresh:
        return None
    cutoff = _cutoff(fresh, room or limits.points, limits, over=ready is None)
    if cutoff is None:
        return None
    chosen = [report for report in fresh if report.step <= cutoff]
    chunk = open_chunk.chunk if open_chunk else (infos[-1].chunk + 1 if infos else 0)
    return _plan(attempt, chunk, open_chunk.parts if open_chunk else 0, chosen, open_chunk)


def _cutoff(fresh: Sequence[_WaitingReport], room: int, limits: SealLimits, *, over: bool) -> int | None:
    """The last step to seal: where the room (0: any), rows or bytes are full; all when the attempt is `over`.

    Bytes are those of the reports, or of the part, which has room for each statistic of each layer.

    Otherwise whole multiples of `part_points` of at least `part_bytes`, so that parts are alike and worth it.
    """
    points = rows = size = statistics = layers = 0
    part = None
    for step, members in groupby(sorted(fresh, key=attrgetter("step")), attrgetter("step")):
        waiting = list(members)
        rows += len(waiting)
        size += sum(report.bytes for report in waiting)
        measured = any(report.measured for report in waiting)
        points += measured
        statistics = max(statistics, *(report.statistics for report in waiting))
        layers = max(layers, *(report.layers for report in waiting))
        table = 8 * statistics * (points * layers + rows)
        if max(size, table) >= limits.bytes or rows >= limits.rows or points == room:
            return int(step)
        if measured and points % limits.part_points == 0 and size >= limits.part_bytes:
            part = int(step)
    return max(report.step for report in fresh) if over else part


def _plan(
    attempt: int, chunk: int, part: int, chosen: Sequence[_WaitingReport], info: ChunkInfo | None
) -> SealPlan:
    return SealPlan(
        attempt=attempt,
        chunk=chunk,
        part=part,
        first_step=min(report.step for report in chosen),
        last_step=max(report.step for report in chosen),
        reports=frozenset((report.stream_id, report.seq) for report in chosen),
        info=info,
    )


def of_stream(table: Any) -> tuple[Any, ...]:
    """Which rows are of the stream that `run` and `own_stream` name when a statement, made once, is executed."""
    return (table.c.run_id == bindparam("run"), table.c.stream_id == bindparam("own_stream"))


def numbers_between() -> tuple[Any, ...]:
    """Which rows of the journal are `of_stream`, from its report `first` to `last`."""
    return (*of_stream(schema.report), schema.report.c.seq.between(bindparam("first"), bindparam("last")))


def read_planned(connection: Connection, view: RunView, plan: SealPlan) -> list[Row[Any]]:
    """The plan's journal rows, read by key, so that the rest of the journal is not scanned."""
    found: list[Row[Any]] = []
    for stream_id, seqs in plan.seqs_by_stream().items():
        own = {"run": view.run_id, "own_stream": stream_id, "first": seqs[0], "last": seqs[-1]}
        wanted = set(seqs)
        for rows in connection.execute(_planned_rows(), own).partitions(_ROWS_AT_ONCE):
            found += [row for row in rows if row.seq in wanted]
    for row in found:
        for part, names in REPORT_PARTS.items():
            require_report(row.checks, part, [getattr(row, name) for name in names])
    return found


@cache
def _planned_rows() -> Select[Any]:
    return select(*(schema.report.c[name] for name in _COLUMNS)).where(*numbers_between())
