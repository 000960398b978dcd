"""Streams that this process has seen, so that a report costs no query."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final

from cachetools import LRUCache

from collage_server.store.contract import StreamRecord

__all__ = ["StreamRegistry"]

_KEPT: Final = 20_000


class StreamRegistry:
    """A bounded cache of stream records. Thread-safe; `load` asks the store."""

    def __init__(self, load: Callable[[str], StreamRecord]) -> None:
        self._load = load
        self._records: LRUCache[str, StreamRecord] = LRUCache(_KEPT)
        self._lock = Lock()

    def known(self, stream_id: str) -> StreamRecord | None:
        """The record, if this process has it."""
        with self._lock:
            return self._records.get(stream_id)

    def load(self, stream_id: str) -> StreamRecord:
        """The record, fresh from the store.

        Raises:
            NotFound: no such stream.
        """
        record = self._load(stream_id)
        with self._lock:
            self._records[stream_id] = record
        return record

    def forget(self, stream_id: str) -> None:
        """Drop a stream that has declared more."""
        with self._lock:
            self._records.pop(stream_id, None)

    def forget_run(self, run_id: str) -> None:
        """Drop the streams of a run that was deleted."""
        with self._lock:
            for stream_id in [key for key, record in self._records.items() if record.run_id == run_id]:
                del self._records[stream_id]
