"""A connection that is kept for the path that every report takes, beside the pool that all others share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from sqlalchemy import Connection, Engine, Pool

__all__ = ["KeptConnection"]


class KeptConnection:
    """For one user at a time; after an error it is made anew, and when the pool's are given up.

    To take one from the pool and give it back costs as much as to check a report. `options` are its execution
    options; whoever holds `lock` keeps others from using it.
    """

    def __init__(self, **options: Any) -> None:
        self.lock = Lock()
        self._options = options
        self._connection: Connection | None = None
        self._driver: Any = None
        self._pool: Pool | None = None

    @contextmanager
    def held(self, engine: Engine) -> Iterator[Connection]:
        """The connection, for nobody else as long as the context lasts."""
        with self.lock:
            if self._pool is not engine.pool:
                self._drop()
            if self._connection is None:
                self._pool = engine.pool
                self._connection = engine.connect().execution_options(**self._options)
                self._connection.detach()
                self._driver = self._connection.connection.dbapi_connection
            try:
                yield self._connection
            except BaseException:
                self._drop()
                raise

    def close(self) -> None:
        """Close it, unless it is in use: then it is left to the end of the process."""
        if self.lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self.lock.release()

    def _drop(self) -> None:
        """What is left of its transaction is rolled back. One that was found lost is not closed by the engine."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            self._driver.close()
