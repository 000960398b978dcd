"""Points, logged values and comparisons of runs: each question is answered from one snapshot."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from threading import Lock
from typing import Final

from cachetools import LRUCache

from collage_server.store.chunks.cache import ChunkCache
from collage_server.store.contract import ComparedRecord, LatestPoint, Points, ScalarPoints, Selection
from collage_server.store.engine.database import Database
from collage_server.store.reading import points as reading
from collage_server.store.reading import scalars
from collage_server.store.reading.run_view import read_views
from collage_server.store.reading.waiting import SLAB_BYTES
from collage_server.store.runs import latest
from collage_server.store.runs.runs import read_records

__all__ = ["SqlPoints"]

_CACHED_RUNS: Final = 1000
_CACHED_COLUMN_BYTES: Final = 64 * 2**20
_CACHED_CHUNKS: Final = 100_000


class SqlPoints:
    """Implements `PointStore` on an SQL database."""

    def __init__(self, database: Database, stale_after_seconds: float) -> None:
        self._database = database
        self._stale_after_seconds = stale_after_seconds
        self._slab_bytes = SLAB_BYTES
        self._chunks = ChunkCache(_CACHED_COLUMN_BYTES, _CACHED_CHUNKS)
        self._newest: LRUCache[str, tuple[object, LatestPoint]] = LRUCache(_CACHED_RUNS)
        self._newest_lock = Lock()

    def model_points(self, run_id: str, keys: Collection[str] | None, selection: Selection) -> Points:
        """The whole model's totals, only those of `keys` (None: all)."""
        with self._database.reading() as connection:
            cache, most = self._chunks, self._slab_bytes
            return reading.read_model_points(connection, [run_id], keys, selection, cache, most)[run_id]

    def layer_points(
        self, run_id: str, keys: Collection[str], selection: Selection, layers: Sequence[str] | None = None
    ) -> Points:
        """Totals by layer, only those of `keys`, only these layers (None: all)."""
        with self._database.reading() as connection:
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
        with self._database.reading() as connection:
            cache, most = self._chunks, self._slab_bytes
            if layer is None:
                return reading.read_model_points(connection, run_ids, keys, selection, cache, most)
            return reading.read_layer_points(connection, run_ids, keys or (), selection, cache, [layer], most)

    def scalar_points(
        self, run_id: str, names: Collection[str] | None, selection: Selection
    ) -> dict[str, ScalarPoints]:
        """Logged values by name, only `names` (None: all)."""
        with self._database.reading() as connection:
            return scalars.read_scalar_points(connection, [run_id], names, selection)[run_id]

    def scalars_of(
        self, run_ids: Sequence[str], names: Collection[str], selection: Selection
    ) -> dict[str, dict[str, ScalarPoints]]:
        """Logged values of several runs by name."""
        with self._database.reading() as connection:
            return scalars.read_scalar_points(connection, run_ids, names, selection)

    def compared(self, run_ids: Sequence[str], newest: int) -> dict[str, ComparedRecord]:
        """What a comparison shows of each run, from one snapshot."""
        with self._database.reading() as connection:
            records = read_records(connection, run_ids)
            views = read_views(connection, run_ids)
            one, cache = Selection(points=1), self._chunks
            points = reading.model_points_of(connection, views, None, one, cache, self._slab_bytes)
            logged = scalars.read_newest_scalars(connection, views, newest)
        return {
            run_id: ComparedRecord(record, points[run_id], logged[run_id]) for run_id, record in records.items()
        }

    def latest(self, run_id: str) -> LatestPoint | None:
        """The newest measured step; read again only when `run_latest` has moved since the last call."""
        with self._database.reading() as connection:
            state = latest.measured_state(connection, run_id, self._stale_after_seconds)
            with self._newest_lock:
                known = self._newest.get(run_id)
            if known is not None and known[0] == state:
                return known[1]
            stale, cache = self._stale_after_seconds, self._chunks
            point = reading.read_latest(connection, run_id, stale, cache, self._slab_bytes)
        if point is not None:  # A deleted run's state is that of one without points.
            with self._newest_lock:
                self._newest[run_id] = (state, point)
        return point
