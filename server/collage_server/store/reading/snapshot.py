"""The snapshot: everything that a question reads comes from one read transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Final

from cachetools import LRUCache
from sqlalchemy import Connection

from collage_monitor import wire
from collage_server.store.chunks.cache import ColumnCache
from collage_server.store.engine.database import Database
from collage_server.store.journal.streams import read_layers, read_streams
from collage_server.store.reading.newest import read_newest_reports
from collage_server.store.reading.points import read_latest, read_points
from collage_server.store.reading.run_view import RunViews, read_views
from collage_server.store.reading.scalars import read_newest_scalars, read_scalar_points
from collage_server.store.records import (
    FloatArray,
    LatestPoint,
    NewestReport,
    Points,
    RunPageRecord,
    RunQuery,
    RunRecord,
    ScalarPoints,
    Selection,
)
from collage_server.store.runs.events import read_events
from collage_server.store.runs.latest import measured_states
from collage_server.store.runs.runs import read_page, read_records

__all__ = ["PointStore", "Snapshot"]

_CACHED_RUNS: Final = 1000
_CACHED_COLUMN_BYTES: Final = 64 * 2**20
_RUNS_AT_ONCE: Final = 64
"""Of so many runs chunks are in memory at a time."""


class PointStore:
    """Points and logged values: every question is answered from one snapshot."""

    def __init__(self, database: Database, stale_after_seconds: float) -> None:
        self._database = database
        self._stale_after_seconds = stale_after_seconds
        self._caches = ReadCaches()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Runs as they are at this moment, to be asked several things while the context lasts."""
        with self._database.reading() as connection:
            yield Snapshot(connection, self._caches, self._stale_after_seconds)


class ReadCaches:
    """What readers of one store keep in memory: coarse columns, and each run's newest step.

    Without kept newest steps the list of 51 runs costs 5 times the CPU.
    """

    def __init__(self) -> None:
        self.columns = ColumnCache(_CACHED_COLUMN_BYTES)
        self._newest: LRUCache[str, tuple[object, LatestPoint]] = LRUCache(_CACHED_RUNS)
        self._lock = Lock()

    def newest(self, run_id: str, state: object) -> LatestPoint | None:
        """The run's newest step, if it was read in this state."""
        with self._lock:
            known = self._newest.get(run_id)
        return known[1] if known is not None and known[0] == state else None

    def keep_newest(self, run_id: str, state: object, point: LatestPoint) -> None:
        """Remember the run's newest step until its state is another one."""
        with self._lock:
            self._newest[run_id] = (state, point)


class Snapshot:
    """Runs as they stood at one moment, one read transaction: whatever is asked of it fits together."""

    def __init__(self, connection: Connection, caches: ReadCaches, stale_after_seconds: float) -> None:
        self._connection = connection
        self._caches = caches
        self._stale_after_seconds = stale_after_seconds
        self._views = RunViews(connection)

    def run_page(self, query: RunQuery, now: float) -> RunPageRecord:
        """A page of runs, newest first."""
        return read_page(self._connection, query, now, self._stale_after_seconds)

    def records(self, run_ids: Sequence[str]) -> dict[str, RunRecord]:
        """Several runs, in the order given."""
        return read_records(self._connection, run_ids, self._views.attempts(run_ids))

    def layers(self, run_id: str) -> list[wire.Layer]:
        """The run's layers in the order in which they were first seen."""
        return read_layers(self._connection, run_id)

    def layer_count(self, run_id: str) -> int:
        """How many layers the run has."""
        return len(self._views.of([run_id], keys=())[run_id].layers)

    def streams(self, run_id: str) -> list[wire.Stream]:
        """The run's streams, by attempt and rank."""
        return read_streams(self._connection, run_id)

    def events(self, run_id: str, after: int, limit: int) -> list[wire.Event]:
        """What happened to a run, oldest first."""
        return read_events(self._connection, run_id, after, limit)

    def points(
        self, run_ids: Sequence[str], keys: Collection[str] | None, selection: Selection
    ) -> dict[str, Points]:
        """Totals of each run, only those of `keys` (None: all)."""
        return read_points(self._connection, self._views, run_ids, keys, selection, self._caches.columns)

    def scalars(
        self, run_ids: Sequence[str], names: Collection[str] | None, selection: Selection
    ) -> dict[str, dict[str, ScalarPoints]]:
        """Logged values by run and name, only `names` (None: all)."""
        return read_scalar_points(self._connection, self._views.of(run_ids, keys=()), names, selection)

    def newest_scalars(self, run_ids: Sequence[str], count: int) -> dict[str, dict[str, FloatArray]]:
        """The last `count` logged values by run and name, oldest first."""
        return read_newest_scalars(self._connection, self._views.of(run_ids, keys=()), count)

    def newest_reports(self, run_ids: Sequence[str], layer_keys: Collection[str]) -> dict[str, NewestReport]:
        """The newest measured step of those runs of which one report a rank, or one sealed part, says it all.

        By layer only `layer_keys` are sure to be in it.
        """
        return read_newest_reports(self._connection, run_ids, layer_keys, self._stale_after_seconds)

    def latest(self, run_id: str) -> LatestPoint | None:
        """The newest measured step; read again only when `run_latest` has moved since the last call."""
        return self.latest_of([run_id])[run_id]

    def latest_of(self, run_ids: Sequence[str]) -> dict[str, LatestPoint | None]:
        """The newest measured step of each of these runs, None where nothing is measured.

        Raises:
            NotFound, Gone: one of the runs is not there.
        """
        states = measured_states(self._connection, run_ids, self._stale_after_seconds)
        found = {run_id: self._caches.newest(run_id, state) for run_id, state in states.items()}
        unknown = [run_id for run_id, point in found.items() if point is None]
        for start in range(0, len(unknown), _RUNS_AT_ONCE):
            some = unknown[start : start + _RUNS_AT_ONCE]
            # Of a single run more is asked in a moment, such as its worst layers; of a page of them not.
            views = self._views.of(some) if len(run_ids) == 1 else read_views(self._connection, some)
            read = read_latest(self._connection, views, self._stale_after_seconds, self._caches.columns)
            for run_id, point in read.items():
                found[run_id] = point
                if point is not None:  # A deleted run's state is that of one without points.
                    self._caches.keep_newest(run_id, states[run_id], point)
        return found
