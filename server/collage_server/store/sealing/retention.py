"""What happens to stored reports: sealed into chunks, thinned when old, removed with their run; and what expires.

`Expiry` deletes old records of what happened: ended incidents with deliveries, events, silences, the audit log.
What stays: open incidents and what their runs told since, ended ones that are still owed a message, notes, and each
run's newest event.

All work is done in short transactions, so that readers and the writer do not wait.

A chunk whose level 1 was dropped is *frozen*: its coarse levels no longer change, and later totals for its steps
are refused (`horizon`). The newest chunk of an attempt is never frozen, so a run's last step stays as it was.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Table, delete, exists, func, or_, select

from collage_server.store import schema, server_tables
from collage_server.store.archive.archive_reader import ArchiveReader
from collage_server.store.archive.segments import LOGGED, remove_segments
from collage_server.store.chunks.blobs import LEVELS, read_point_rows
from collage_server.store.engine.database import Database
from collage_server.store.journal.horizon import freeze
from collage_server.store.journal.report_journal import ReportJournal
from collage_server.store.row_helpers import delete_slice, require_run
from collage_server.store.runs.reported_state import all_ranks_are_through
from collage_server.store.runs.run_changes import note_change
from collage_server.store.sealing.replica_comparison import ReplicaComparison, count_mismatches, mismatches_by_run
from collage_server.store.sealing.seal import seal
from collage_server.store.sealing.seal_plan import SealLimits
from collage_server.store.sealing.slice_deletion import SliceDeletion

__all__ = ["Expiry", "Retention", "Sealing"]

_INCIDENT: Final = server_tables.incident
_EVENT: Final = schema.event
_SILENCE: Final = server_tables.silence
_SLICE_ROWS: Final = 500
_SealLateReports = Callable[[str], None]
"""Seals every late report of the run; the caller holds the claim."""
_BULKY: Final = (
    schema.report,
    schema.layer_chunk,
    schema.model_chunk,
    schema.point_chunk,
    schema.scalar_chunk,
)
_PAUSE_SECONDS: Final = 0.001
_FILES_A_SLICE: Final = 256
_PURGED_AT_ONCE: Final = 100
"""The most short transactions that a deletion runs before it is answered."""
_SEARCH_SECONDS: Final = 50.0
"""Seconds between searches for rows of deleted runs: another server may have deleted a run and stopped."""


@dataclass(frozen=True)
class _ExpiredLevel:
    """One level of one chunk that is to go."""

    attempt: int
    level: int
    chunk: int
    last_step: int


class Sealing:
    """From the journal to chunks."""

    def __init__(
        self,
        database: Database,
        journal: ReportJournal,
        archive: ArchiveReader,
        limits: SealLimits,
        stale_after_seconds: float,
    ) -> None:
        self.limits = limits
        self._archive = archive
        self._database = database
        self._journal = journal
        self._stale_after_seconds = stale_after_seconds
        self._replicas = ReplicaComparison()

    def seal(self, run_id: str, now: float, *, journal_full: bool = False) -> int:
        """Turn some of the run's journal into parts of chunks; how many, 0 when nothing was due.

        `journal_full`: there is no room for more, so all of it is due, whoever is waited for.
        """
        with self._database.reading() as connection:
            record = require_run(connection, run_id, "state", "updated_at")
            over = record.state != "running" and all_ranks_are_through(connection, run_id)
        silent = record.updated_at < now - self._stale_after_seconds
        with self._database.claimed(run_id) as mine:
            if not mine:
                return 0
            limits = self.limits.scaled_to_commits(self._journal.last_bytes)
            return self._seal_parts(run_id, limits, now=now, closed=silent or over, journal_full=journal_full)

    def seal_late_reports(self, run_id: str) -> None:
        """Seal every late report, however few they are; the caller has claimed the run."""
        limits = dataclasses.replace(self.limits, late_rows=1)
        with self._database.reading() as connection:
            now = require_run(connection, run_id, "updated_at").updated_at
        while self._seal_parts(run_id, limits, now=now, closed=False):
            pass

    def _seal_parts(
        self, run_id: str, limits: SealLimits, *, now: float, closed: bool, journal_full: bool = False
    ) -> int:
        return seal(
            run_id,
            self._database.reading,
            self._database.writing_claimed,
            limits,
            self._replicas,
            self._archive,
            now=now,
            closed=closed,
            journal_full=journal_full,
            stale_after_seconds=self._stale_after_seconds,
        )

    def replica_mismatches(self) -> int:
        """At how many layers and steps replicas differed, over all runs."""
        with self._database.reading() as connection:
            return count_mismatches(connection)

    def mismatches_by_run(self) -> dict[str, int]:
        """At how many layers and steps replicas of a run's newest attempt differed; without runs that have none."""
        with self._database.reading() as connection:
            return mismatches_by_run(connection)


class Retention:
    """How data leaves the store. Every call takes short transactions, and may be cut off anywhere without harm."""

    def __init__(self, database: Database, seal_late_reports: _SealLateReports, deletion: SliceDeletion) -> None:
        self._database = database
        self._seal_late_reports = seal_late_reports
        self._deleted: set[str] = set()
        self._next_search = 0.0
        self._lock = Lock()
        self._deletion = deletion

    def sealed_runs(self) -> list[str]:
        """Runs that have chunks."""
        table = schema.point_chunk
        with self._database.reading() as connection:
            return list(connection.execute(select(table.c.run_id).distinct().order_by(table.c.run_id)).scalars())

    def expire(self, run_id: str, before: Mapping[int, float]) -> int:
        """Drop levels of whole chunks that ended before a moment: `before` maps level → Unix seconds.

        A chunk's age is that of its last report, or of its attempt where that is younger (an import). A level goes
        only where a coarser one is there. Returns how many levels of chunks went.
        """
        with self._database.claimed(run_id) as mine:
            if not mine:
                return 0
            with self._database.reading() as connection:
                expired = _expired(connection, run_id, before)
            if any(entry.level == 1 for entry in expired):
                self._seal_late_reports(run_id)
            dropped = sum(self._drop(run_id, entry) for entry in expired)
            self._remove_emptied(run_id)
            return dropped

    def _remove_emptied(self, run_id: str) -> None:
        """Name no archived file of which retention has dropped every point."""
        with self._database.reading() as connection:
            paths = list(connection.execute(_emptied(run_id)).scalars())
        if paths:
            with self._database.freeing() as connection:
                remove_segments(connection, run_id, paths, self._database.time(connection, time.time()))

    def begin_purge(self, run_id: str) -> None:
        """Remove the first rows of a run that was just deleted; maintenance removes the rest."""
        with self._lock:
            self._deleted.add(run_id)
        self.purge(_PURGED_AT_ONCE)

    def purge(self, slices: int) -> bool:
        """Remove rows of deleted runs, `slices` short transactions at most; True if there may be more."""
        for _ in range(slices):
            run_id = self._next_deleted()
            if run_id is None:
                return False
            # Let waiting writers take the file's only write lock now.
            time.sleep(_PAUSE_SECONDS)
            if not self._purge_slice(run_id):
                with self._lock:
                    self._deleted.discard(run_id)
        return True

    def _next_deleted(self) -> str | None:
        with self._lock:
            if not self._deleted and time.monotonic() >= self._next_search:
                with self._database.reading() as connection:
                    self._deleted = set(connection.execute(_deleted_runs_with_rows()).scalars())
                self._next_search = time.monotonic() + _SEARCH_SECONDS
            return min(self._deleted, default=None)

    def _purge_slice(self, run_id: str) -> bool:
        table = schema.segment
        with self._database.reading() as connection:
            some = select(table.c.path).where(table.c.run_id == run_id).limit(_FILES_A_SLICE)
            paths = list(connection.execute(some).scalars())
        if paths:
            with self._database.freeing() as connection:
                remove_segments(connection, run_id, paths, self._database.time(connection, time.time()))
            return True
        return any(self._deletion.delete_slice(table, table.c.run_id == run_id) for table in _BULKY)

    def _drop(self, run_id: str, entry: _ExpiredLevel) -> bool:
        """Delete one level of one chunk.

        Points go first: from then on readers use coarser levels. The model's rows go last: while they exist, an
        interrupted drop is found again. False: new reports came for it; the next round tries again.
        """
        with self._database.freeing() as connection:
            if entry.level == 1 and not freeze(connection, run_id, entry.attempt, entry.last_step):
                return False
            if entry.level > 1:
                # For level 1 `freeze` has moved the horizon, which changes the revision; others change it here.
                require_run(connection, run_id, lock=True)
                note_change(connection, run_id, time.time())
            connection.execute(delete(schema.point_chunk).where(*_rows_of(schema.point_chunk, run_id, entry)))
        while self._deletion.delete_slice(schema.layer_chunk, *_rows_of(schema.layer_chunk, run_id, entry)):
            pass
        with self._database.freeing() as connection:
            connection.execute(delete(schema.model_chunk).where(*_rows_of(schema.model_chunk, run_id, entry)))
        return True


def _deleted_runs_with_rows() -> Any:
    tomb = schema.deleted_run
    there = [exists().where(table.c.run_id == tomb.c.run_id) for table in (*_BULKY, schema.segment)]
    return select(tomb.c.run_id).where(tomb.c.kept.is_(None), or_(*there))


def _emptied(run_id: str) -> Any:
    """Paths of the run's archived files none of whose points are left."""
    segment, point = schema.segment, schema.point_chunk
    left = exists().where(
        point.c.run_id == segment.c.run_id,
        point.c.attempt == segment.c.attempt,
        point.c.level == func.abs(segment.c.level),
        point.c.chunk.between(segment.c.first_chunk, segment.c.last_chunk),
    )
    return select(segment.c.path).where(segment.c.run_id == run_id, segment.c.level != LOGGED, ~left)


def _rows_of(table: Table, run_id: str, entry: _ExpiredLevel) -> tuple[Any, ...]:
    return (
        table.c.run_id == run_id,
        table.c.attempt == entry.attempt,
        table.c.level == entry.level,
        table.c.chunk == entry.chunk,
    )


def _expired(connection: Connection, run_id: str, before: Mapping[int, float]) -> list[_ExpiredLevel]:
    created = _attempt_times(connection, run_id)
    held = _levels_by_chunk(connection, schema.point_chunk, run_id)
    left = _levels_by_chunk(connection, schema.model_chunk, run_id)
    expired = []
    for attempt, chunks in held.items():
        newest = max(chunks)
        for level, moment in before.items():
            coarser = LEVELS[LEVELS.index(level) + 1]
            if created.get(attempt, moment) >= moment:
                continue
            for chunk, levels in sorted(chunks.items()):
                there = level in levels
                if chunk == newest or coarser not in levels or not (there or level in left[attempt][chunk]):
                    continue
                last_step, last_time = _last_point(connection, run_id, attempt, coarser, chunk)
                if there and last_time >= moment:
                    break
                expired.append(_ExpiredLevel(attempt, level, chunk, last_step))
    return expired


def _attempt_times(connection: Connection, run_id: str) -> dict[int, float]:
    table = schema.attempt
    rows: Any = connection.execute(select(table.c.attempt, table.c.created_at).where(table.c.run_id == run_id))
    return {row.attempt: row.created_at for row in rows}


def _levels_by_chunk(connection: Connection, table: Table, run_id: str) -> dict[int, dict[int, set[int]]]:
    """Attempt → chunk → its levels."""
    columns = (table.c.attempt, table.c.chunk, table.c.level)
    rows: list[Row[Any]] = list(connection.execute(select(*columns).where(table.c.run_id == run_id).distinct()))
    found: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        found[row.attempt][row.chunk].add(row.level)
    return found


def _last_point(connection: Connection, run_id: str, attempt: int, level: int, chunk: int) -> tuple[int, float]:
    """The last step of a chunk, and the newest time in it."""
    points = read_point_rows(connection, level, {(run_id, attempt): [chunk]})
    return int(points.steps.max()), float(points.times.max())


class Expiry:
    """Deletes expired records, in short transactions that may be interrupted anywhere without harm."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def expire(self, before: float, owed_before: float) -> int:
        """Remove a slice of the records that ended before a moment (Unix seconds); returns the number of rows, 0
        when none is left.

        Open incidents stay, with all events of their run since they began, and ended ones with a message due until
        `owed_before`. A run keeps its notes, written by people, and its newest event, from which events are
        numbered.
        """
        return next(filter(None, (self._remove(table, *old) for table, old in self._old(before, owed_before))), 0)

    def expire_audit_log(self, before: float) -> int:
        """Remove a slice of the audit log from before a moment (Unix seconds); how many entries went."""
        return self._remove(server_tables.act, server_tables.act.c.time < before)

    def _remove(self, table: Table, *old: ColumnElement[bool]) -> int:
        with self._database.freeing() as connection:
            return delete_slice(connection, table, *old, rows=_SLICE_ROWS)

    @staticmethod
    def _old(before: float, owed_before: float) -> list[tuple[Table, tuple[Any, ...]]]:
        done = _INCIDENT.c.settled | (_INCIDENT.c.resolved_at < owed_before)
        # The index is by when it began.
        ended = (_INCIDENT.c.started_at < before, _INCIDENT.c.resolved_at < before, done)
        firing = exists().where(
            _INCIDENT.c.run_id == _EVENT.c.run_id,
            _INCIDENT.c.open_key.is_not(None),
            _INCIDENT.c.started_at <= _EVENT.c.time,
        )
        later = _EVENT.alias()
        newest = select(func.max(later.c.event)).where(later.c.run_id == _EVENT.c.run_id).scalar_subquery()
        told = (
            _EVENT.c.time < before,
            _EVENT.c.kind != "note",
            _EVENT.c.event < newest,
            ~firing,
        )
        return [(_INCIDENT, ended), (_EVENT, told), (_SILENCE, (_SILENCE.c.ends_at < before,))]
