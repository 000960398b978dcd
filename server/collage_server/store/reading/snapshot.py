"""The snapshot: everything that a question reads comes from one read transaction.

Routes and background threads get one from `store.points.snapshot()`. All of one answer must come from one snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection

from collage_monitor import wire
from collage_server.memory_budget import released_afterwards
from collage_server.store.archive.archive_reader import ArchiveReader
from collage_server.store.chunks.column_cache import ColumnCache
from collage_server.store.engine.database import Database
from collage_server.store.journal.stream_store import read_layers, read_streams
from collage_server.store.reading.logged_scalars import read_newest_scalars, read_scalar_points
from collage_server.store.reading.points import PointReading, Sources, read_points
from collage_server.store.reading.run_view import RunView, RunViews
from collage_server.store.records import (
    FloatArray,
    LatestPoint,
    Points,
    RunPageRecord,
    RunQuery,
    RunRecord,
    ScalarPoints,
    Selection,
)
from collage_server.store.runs.events import count_events
from collage_server.store.runs.reported_state import newest_measured_step
from collage_server.store.runs.run_store import read_page, read_records
from collage_server.store.runs.run_summary import (
    KeptPoint,
    LiveRunPage,
    Place,
    read_kept_points,
    read_live_runs,
)

__all__ = ["PointStore", "Snapshot"]

_CACHED_COLUMN_BYTES: Final = 64 * 2**20


class PointStore:
    """Points and logged values: every question is answered from one snapshot."""

    def __init__(self, database: Database, archive: ArchiveReader, stale_after_seconds: float) -> None:
        self._database = database
        self._stale_after_seconds = stale_after_seconds
        self._sources = Sources(ColumnCache(_CACHED_COLUMN_BYTES), archive)

    def limit_cache(self, limit_bytes: int) -> None:
        """Keep no more than so many bytes of columns."""
        columns = ColumnCache(min(limit_bytes, _CACHED_COLUMN_BYTES))
        self._sources = Sources(columns, self._sources.archive)

    @property
    def cached_bytes(self) -> int:
        """The cached columns."""
        return self._sources.columns.bytes

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Runs as they are at this moment, to be asked several things while the context lasts.

        An evaluation caches none of its reads; an answer does.
        """
        with released_afterwards("evaluations"), self._database.reading() as connection:
            yield Snapshot(connection, self._sources, self._stale_after_seconds)


class Snapshot:
    """Runs as they stood at one moment, one read transaction: all its answers are consistent."""

    def __init__(self, connection: Connection, sources: Sources, stale_after_seconds: float) -> None:
        self._connection = connection
        self._sources = sources
        self._stale_after_seconds = stale_after_seconds
        self._views = RunViews(connection)

    def run_page(self, query: RunQuery, now: float) -> RunPageRecord:
        """A page of runs, newest first."""
        return read_page(self._connection, query, now, self._stale_after_seconds)

    def live_runs(
        self, projects: Collection[str] | None, now: float, after: Place | None, limit: int
    ) -> LiveRunPage:
        """A page of the runs that are running and not stale, newest first, with what gauges show of them."""
        return read_live_runs(self._connection, projects, now - self._stale_after_seconds, after, limit)

    def records(self, run_ids: Sequence[str], *, before_points: bool = False) -> dict[str, RunRecord]:
        """Several runs, in the order given; `before_points`: what their points need, too, is read now, once."""
        if before_points:
            self._views.of(run_ids, keys=())
        return read_records(self._connection, run_ids, self._views.rows(run_ids))

    def layers(self, run_id: str) -> list[wire.Layer]:
        """The run's layers in the order in which they were first seen."""
        return read_layers(self._connection, run_id)

    def layer_count(self, run_id: str) -> int:
        """How many layers the run has."""
        return self._views.of([run_id], keys=())[run_id].layer_count

    def streams(self, run_id: str) -> list[wire.Stream]:
        """The run's streams, by attempt and rank."""
        return read_streams(self._connection, run_id)

    def event_count(self, run_id: str) -> tuple[int, int]:
        """How many events the run has, and the number of the newest; (0, 0) without any."""
        return count_events(self._connection, run_id)

    def points(
        self, run_ids: Sequence[str], keys: Collection[str] | None, selection: Selection
    ) -> dict[str, Points]:
        """Totals of each run, only those of `keys` (None: all)."""
        return read_points(self._connection, self._views, run_ids, keys, selection, self._sources)

    def scalars(
        self, run_ids: Sequence[str], names: Collection[str] | None, selection: Selection
    ) -> dict[str, dict[str, ScalarPoints]]:
        """Logged values by run and name, only `names` (None: all)."""
        views = self._views.of(run_ids, keys=())
        return read_scalar_points(self._connection, self._sources.archive, views, names, selection)

    def newest_scalars(self, run_ids: Sequence[str], count: int) -> dict[str, dict[str, FloatArray]]:
        """The last `count` logged values by run and name, oldest first."""
        views = self._views.of(run_ids, keys=())
        return read_newest_scalars(self._connection, self._sources.archive, views, count)

    def kept_points(self, run_ids: Sequence[str]) -> dict[str, KeptPoint]:
        """The newest measured steps as they were written, of those runs that have a row."""
        return read_kept_points(self._connection, run_ids)

    def newest_step(self, run_id: str) -> int | None:
        """The newest measured step that every live rank has reached; None where nothing is measured."""
        return self._newest_step(self._views.of([run_id])[run_id])

    def latest_of(self, run_ids: Sequence[str]) -> dict[str, LatestPoint | None]:
        """The newest measured step that every live rank of each run has reached whole, with the model's totals.

        None where nothing is measured; they are read together.

        Raises:
            NotFound, Gone: one of the runs is not there.
        """
        views = self._views.of(run_ids)
        steps = {run_id: step for run_id, view in views.items() if (step := self._newest_step(view)) is not None}
        latest: dict[str, LatestPoint | None] = dict.fromkeys(views)
        standing = {run_id: views[run_id] for run_id in steps}
        for run_id, points in self._points_of(standing, None, Selection(at=steps)).items():
            if len(points.steps):
                totals = {key: values[0] for key, values in points.totals.items()}
                latest[run_id] = LatestPoint(steps[run_id], float(points.times[0]), totals)
        return latest

    def _newest_step(self, view: RunView) -> int | None:
        step = newest_measured_step(
            self._connection, view.run_id, view.latest_rows, view.first_hidden_steps, self._stale_after_seconds
        )
        if step is not None or not view.is_measured:
            return step
        found = self._points_of({view.run_id: view}, ("measured_steps",), Selection())[view.run_id]
        return max(found.steps[found.ranks > 0].tolist(), default=None)

    def _points_of(
        self, views: Mapping[str, RunView], wanted: Collection[str] | None, selection: Selection
    ) -> dict[str, Points]:
        archive, columns = self._sources.archive, self._sources.columns
        return PointReading(self._connection, views, wanted, selection, archive, columns).points()
