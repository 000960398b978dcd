"""The clock by which everything that a server stores is dated: the database's, where it has one of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from collage_server.store import Store

__all__ = ["DatabaseClock"]


class DatabaseClock:
    """Unix seconds. On SQLite the machine's clock; on PostgreSQL the database's, as it was at the last `follow`.

    Between two calls it advances by `monotonic`, so setting the machine's clock changes no stored times there.
    """

    def __init__(
        self,
        store: Store,
        own: Callable[[], float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._own = own or time.time
        self._monotonic = monotonic
        self._ahead: float | None = None
        """Of `monotonic`; None: the machine's clock counts."""
        self.skew_seconds: float | None = None
        """By how much the database's clock was ahead of the machine's at the last `follow`; None: it has none."""

    def __call__(self) -> float:
        return self._own() if self._ahead is None else self._monotonic() + self._ahead

    def follow(self) -> None:
        """Ask the database. Blocks for one statement."""
        theirs = self._store.own_time()
        self._ahead = None if theirs is None else theirs - self._monotonic()
        self.skew_seconds = None if theirs is None else theirs - self._own()
