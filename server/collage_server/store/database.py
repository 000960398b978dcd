"""A store on an SQL database: transactions around the functions of this package. A backend adds its dialect."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Final

from cachetools import LRUCache
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DataError, IntegrityError, InternalError, OperationalError

from collage_monitor import wire
from collage_server.errors import Busy, StoreUnusable, Unprocessable
from collage_server.store.access.tokens import SqlAccess, record_acts
from collage_server.store.chunks.cache import ChunkCache
from collage_server.store.contract import (
    CONNECTIONS,
    ComparedRecord,
    GroupOutcome,
    LatestPoint,
    NewEvent,
    Points,
    ReportGroup,
    RunPageRecord,
    RunQuery,
    RunRecord,
    RunRevision,
    ScalarPoints,
    SealLimits,
    Selection,
    Sizes,
    StreamRecord,
)
from collage_server.store.journal import gaps as gap_ranges
from collage_server.store.journal import reports as journal
from collage_server.store.journal import streams
from collage_server.store.quota import QuotaCheck, judge
from collage_server.store.reading import points as reading
from collage_server.store.reading import scalars
from collage_server.store.reading.run_view import read_views
from collage_server.store.reading.waiting import SLAB_BYTES
from collage_server.store.rows import require_run
from collage_server.store.runs import events as run_events
from collage_server.store.runs import latest, runs
from collage_server.store.sealing import seal as sealing
from collage_server.store.sealing.replicas import Replicas, count_mismatches
from collage_server.store.sealing.retention import SqlLife

__all__ = ["POOL", "SqlStore"]


@contextmanager
def _translated() -> Iterator[None]:
    """What a database says, in this server's words: gone for a moment, or a value that it cannot hold."""
    try:
        yield
    except (OperationalError, InternalError) as error:
        raise Busy(f"the database cannot do this now: {error.orig}", retry_after_seconds=5) from error
    except DataError as error:
        raise Unprocessable(f"the database cannot hold a value: {error.orig}; send plain text") from error


_PURGED_AT_ONCE: Final = 100
"""Short transactions that a deletion takes at most before it is answered; the rest is left to maintenance."""
POOL: Final = {"pool_size": 10, "max_overflow": CONNECTIONS - 11}
"""One connection is kept beside the pool."""
_CACHED_RUNS: Final = 1000
_CACHED_COLUMN_BYTES: Final = 64 * 2**20
_CACHED_CHUNKS: Final = 100_000


class SqlStore(ABC):
    """Implements `Store`; reads see one snapshot each, writes are one transaction each."""

    def __init__(self, stale_after_seconds: float, limits: SealLimits) -> None:
        self._stale_after_seconds = stale_after_seconds
        self._limits = limits
        self._seal_lock = Lock()
        self._append_bytes = 0
        self._slab_bytes = SLAB_BYTES
        self._engine: Engine | None = None
        self._chunks = ChunkCache(_CACHED_COLUMN_BYTES, _CACHED_CHUNKS)
        self._newest: LRUCache[str, tuple[object, LatestPoint | None]] = LRUCache(_CACHED_RUNS)
        self._newest_lock = Lock()
        self._replicas = Replicas()
        self._access = SqlAccess(self._reading, self._writing)
        self._life = SqlLife(self._reading, self._writing, self._sealing, self._settle)

    @abstractmethod
    def _connect(self) -> Engine:
        """An engine on the database, its file or cluster made ready."""

    @abstractmethod
    def _begin_reading(self) -> AbstractContextManager[Connection]:
        """A read transaction on one snapshot."""

    @abstractmethod
    def _begin_writing(self) -> AbstractContextManager[Connection]:
        """A write transaction, committed durably on leaving."""

    def _begin_appending(self) -> AbstractContextManager[Connection]:
        """The same for a commit of reports."""
        return self._begin_writing()

    @abstractmethod
    def _prepare_schema(self) -> None:
        """Bring the schema up to date, or refuse to work on another one."""

    @abstractmethod
    def _claim(self, run_id: str) -> AbstractContextManager[bool]:
        """Whether this process may seal the run, as long as the context lasts."""

    @abstractmethod
    def _require_claim(self) -> None:
        """Raise if the claim that this thread holds has been lost."""

    @abstractmethod
    def _lock_project(self, connection: Connection, project: str) -> None:
        """Keep others from adding runs or tags to the project in this transaction."""

    @property
    @abstractmethod
    def _journal_driver(self) -> journal.JournalDriver:
        """How a commit's statements reach the database."""

    @abstractmethod
    def sizes(self) -> Sizes:
        """How much space there is."""

    @abstractmethod
    def fold_log(self) -> None:
        """Keep the database's log short."""

    @abstractmethod
    def return_space(self) -> bool:
        """Give a slice of free space back to the disk; True if there is more."""

    @property
    def engine(self) -> Engine:
        """The engine; the store must be open."""
        if self._engine is None:
            raise StoreUnusable("the store is not open")
        return self._engine

    @property
    def access(self) -> SqlAccess:
        """Tokens, the audit log, and whose a run is."""
        return self._access

    @property
    def life(self) -> SqlLife:
        """Retention and the rows of deleted runs."""
        return self._life

    def open(self) -> None:
        """Open the database and bring its schema up to date; an open one stays as it is."""
        if self._engine is not None:
            return
        self._engine = self._connect()
        try:
            self._prepare_schema()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close every connection."""
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def check(self) -> None:
        """Raise if the database does not answer."""
        with self._reading() as connection:
            connection.execute(text("SELECT 1"))

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _translated(), self._begin_reading() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with _translated(), self._begin_writing() as connection:
            yield connection

    @contextmanager
    def _writing_claimed(self) -> Iterator[Connection]:
        """The same for whoever claimed a run: not committed once the claim is lost."""
        with self._writing() as connection:
            yield connection
            self._require_claim()

    def create_run(
        self, project: str, create: wire.RunCreate, now: float, check: QuotaCheck | None = None
    ) -> tuple[RunRecord, bool]:
        """Create a run or resume it; says if it is new. `check` may refuse what the project would then hold."""
        try:
            return self._create_run(project, create, now, check)
        except IntegrityError:
            return self._create_run(project, create, now, check)

    def _create_run(
        self, project: str, create: wire.RunCreate, now: float, check: QuotaCheck | None
    ) -> tuple[RunRecord, bool]:
        """Once more where another process created the same run in between: it is then resumed."""
        with self._writing() as connection:
            if check is not None:
                self._lock_project(connection, project)
            is_new = runs.create_run(connection, project, create, now)
            if check is not None:
                judge(connection, project, check, runs=is_new, tags=bool(create.tags))
            return runs.read_run(connection, create.run_id), is_new

    def runs(self, query: RunQuery, now: float, stale_after_seconds: float) -> RunPageRecord:
        """A page of runs, newest first."""
        with self._reading() as connection:
            return runs.read_runs(connection, query, now, stale_after_seconds)

    def run(self, run_id: str) -> RunRecord:
        """One run."""
        with self._reading() as connection:
            return runs.read_run(connection, run_id)

    def records(self, run_ids: Sequence[str]) -> dict[str, RunRecord]:
        """Several runs, in the order given."""
        with self._reading() as connection:
            return runs.read_records(connection, run_ids)

    def revisions(self, run_ids: Sequence[str]) -> dict[str, RunRevision]:
        """The revision of each of these runs, in the order given."""
        with self._reading() as connection:
            return runs.read_revisions(connection, run_ids)

    def update_run(
        self, run_id: str, update: wire.RunUpdate, now: float, check: QuotaCheck | None = None
    ) -> RunRecord:
        """Change a run. `check` may refuse what its project would then hold."""
        with self._writing() as connection:
            counted = None
            if check is not None and update.tags:
                counted = runs.read_run(connection, run_id).project
                self._lock_project(connection, counted)
            runs.update_run(connection, run_id, update, now)
            if check is not None and counted is not None:
                judge(connection, counted, check, runs=False, tags=True)
            return runs.read_run(connection, run_id)

    def delete_run(self, run_id: str, now: float, acts: Sequence[wire.Act] = ()) -> None:
        """Delete a run and leave a tombstone, and these acts in the audit log."""
        with self._writing() as connection:
            runs.delete_run(connection, run_id, now)
            record_acts(connection, acts)
        self._life.doom(run_id)
        self._life.purge(_PURGED_AT_ONCE)
        with self._newest_lock:
            self._newest.pop(run_id, None)

    def create_attempt(self, run_id: str, create: wire.AttemptCreate, now: float) -> wire.Attempt:
        """Register a launch; the same launch_id is the same attempt."""
        with self._writing() as connection:
            return streams.create_attempt(connection, run_id, create, now)

    def create_stream(self, run_id: str, create: wire.StreamCreate, now: float) -> wire.Stream:
        """Register a stream, or extend it."""
        with self._writing() as connection:
            streams.create_stream(connection, run_id, create, now)
            return streams.read_stream(connection, create.stream_id)

    def streams(self, run_id: str) -> list[wire.Stream]:
        """The run's streams, by attempt and rank."""
        with self._reading() as connection:
            return streams.read_streams(connection, run_id)

    def stream_record(self, stream_id: str) -> StreamRecord:
        """What ingest has to know of a stream."""
        with self._reading() as connection:
            return streams.read_stream_record(connection, stream_id)

    def layers(self, run_id: str) -> list[wire.Layer]:
        """The run's layers in the order in which they were first seen."""
        with self._reading() as connection:
            return streams.read_layers(connection, run_id)

    def append(self, groups: Sequence[ReportGroup], now: float) -> list[GroupOutcome]:
        """Store all groups in one transaction; durable when it returns."""
        self._append_bytes = sum(group.bytes for group in groups)
        with _translated(), self._begin_appending() as connection:
            return journal.append(connection, groups, now, self._journal_driver)

    def note_gaps(self, stream: StreamRecord, gaps: Sequence[wire.Gap], now: float) -> None:
        """Keep which reports of a stream will never come."""
        with self._writing() as connection:
            gap_ranges.note_gaps(connection, stream, gaps, now)

    def note_events(self, run_id: str, events: Sequence[NewEvent], now: float) -> int:
        """Add to what happened to a run; how many of these were new."""
        with self._writing() as connection:
            require_run(connection, run_id, lock=True)
            return run_events.add_events(connection, run_id, events, now)

    def events(self, run_id: str, after: int, limit: int) -> list[wire.Event]:
        """What happened to a run, oldest first."""
        with self._reading() as connection:
            return run_events.read_events(connection, run_id, after, limit)

    def model_points(self, run_id: str, keys: Collection[str] | None, selection: Selection) -> Points:
        """The whole model's totals, only those of `keys` (None: all)."""
        with self._reading() as connection:
            cache, most = self._chunks, self._slab_bytes
            return reading.read_model_points(connection, [run_id], keys, selection, cache, most)[run_id]

    def layer_points(
        self, run_id: str, keys: Collection[str], selection: Selection, layers: Sequence[str] | None = None
    ) -> Points:
        """Totals by layer, only those of `keys`, only these layers (None: all)."""
        with self._reading() as connection:
            cache, most = self._chunks, self._slab_bytes
            return reading.read_layer_points(connection, [run_id], keys, selection, cache, layers, most)[run_id]

    def points_of(
        self,
        run_ids: Sequence[str],
        keys: Collection[str] | None,
        selection: Selection,
        layer: str | None = None,
    ) -> dict[str, Points]:
        """The model's totals of several runs, or those of one layer."""
        with self._reading() as connection:
            cache, most = self._chunks, self._slab_bytes
            if layer is None:
                return reading.read_model_points(connection, run_ids, keys, selection, cache, most)
            return reading.read_layer_points(connection, run_ids, keys or (), selection, cache, [layer], most)

    def scalar_points(
        self, run_id: str, names: Collection[str] | None, selection: Selection
    ) -> dict[str, ScalarPoints]:
        """Logged values by name, only `names` (None: all)."""
        with self._reading() as connection:
            return scalars.read_scalar_points(connection, [run_id], names, selection)[run_id]

    def scalars_of(
        self, run_ids: Sequence[str], names: Collection[str], selection: Selection
    ) -> dict[str, dict[str, ScalarPoints]]:
        """Logged values of several runs by name."""
        with self._reading() as connection:
            return scalars.read_scalar_points(connection, run_ids, names, selection)

    def compared(self, run_ids: Sequence[str], newest: int) -> dict[str, ComparedRecord]:
        """What a comparison shows of each run, from one snapshot."""
        with self._reading() as connection:
            records = runs.read_records(connection, run_ids)
            views = read_views(connection, run_ids)
            one, cache = Selection(points=1), self._chunks
            points = reading.model_points_of(connection, views, None, one, cache, self._slab_bytes)
            logged = scalars.read_newest_scalars(connection, views, newest)
        return {
            run_id: ComparedRecord(record, points[run_id], logged[run_id]) for run_id, record in records.items()
        }

    def replica_mismatches(self) -> int:
        """At how many layers and steps replicas differed, over all runs."""
        with self._reading() as connection:
            return count_mismatches(connection)

    def journal_runs(self) -> list[str]:
        """Runs that have reports in the journal."""
        with self._reading() as connection:
            return journal.journal_runs(connection)

    @contextmanager
    def _sealing(self, run_id: str) -> Iterator[bool]:
        """Whether this thread alone changes the run's chunks, as long as the context lasts."""
        with self._seal_lock, self._claim(run_id) as mine:
            yield mine

    def seal(self, run_id: str, now: float) -> int:
        """Turn some of the run's journal into parts of chunks; how many, 0 when nothing was due."""
        record = self.run(run_id)
        silent = record.updated_at < now - self._stale_after_seconds
        with self._sealing(run_id) as mine:
            closed = silent or record.state != "running"
            limits = self._limits.beside(self._append_bytes)
            return self._seal_parts(run_id, limits, now=now, closed=closed) if mine else 0

    def _settle(self, run_id: str) -> None:
        """Seal every late report, however few they are; the caller has claimed the run."""
        limits = dataclasses.replace(self._limits, late_rows=1)
        now = self.run(run_id).updated_at
        while self._seal_parts(run_id, limits, now=now, closed=False):
            pass

    def _seal_parts(self, run_id: str, limits: SealLimits, *, now: float, closed: bool) -> int:
        return sealing.seal(
            run_id,
            self._reading,
            self._writing_claimed,
            limits,
            self._replicas,
            now=now,
            closed=closed,
            stale_after_seconds=self._stale_after_seconds,
        )

    def latest(self, run_id: str) -> LatestPoint | None:
        """The newest measured step; read again only when `run_latest` has moved since the last call."""
        with self._reading() as connection:
            state = latest.measured_state(connection, run_id, self._stale_after_seconds)
            with self._newest_lock:
                known = self._newest.get(run_id)
            if known is not None and known[0] == state:
                return known[1]
            stale, cache = self._stale_after_seconds, self._chunks
            point = reading.read_latest(connection, run_id, stale, cache, self._slab_bytes)
        with self._newest_lock:
            self._newest[run_id] = (state, point)
        return point
