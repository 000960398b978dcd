"""Rows deleted in transactions so short that acknowledgements hardly wait.

Retention, archiving and expiry delete through it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Final

from sqlalchemy import ColumnElement, Table

from collage_server.store.engine.database import Database
from collage_server.store.row_helpers import delete_slice

__all__ = ["SliceDeletion"]

_FIRST_ROWS: Final = 16
_MOST_ROWS: Final = 2048
_QUICK_SECONDS: Final = 0.01
"""A transaction that deletes may take about so long: what is acknowledged waits for it."""


class _Pace:
    """How many rows of a table one transaction deletes: more while that is quick, fewer where rows are large."""

    def __init__(self) -> None:
        self.rows = _FIRST_ROWS

    def took(self, gone: int, seconds: float) -> None:
        """Learn from a transaction that deleted so many rows."""
        if seconds > 2 * _QUICK_SECONDS:
            self.rows = max(self.rows // 2, 1)
        elif seconds <= _QUICK_SECONDS and gone >= self.rows:
            self.rows = min(2 * self.rows, _MOST_ROWS)


class SliceDeletion:
    """Deletes rows of a database, a slice a transaction; it learns how many rows of each table one may hold."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._paces: dict[str, _Pace] = defaultdict(_Pace)

    def delete_slice(self, table: Table, *where: ColumnElement[bool]) -> int:
        """Delete some of these rows in a transaction of their own; how many went."""
        pace = self._paces[table.name]
        with self._database.freeing() as connection:
            began = time.perf_counter()
            gone = delete_slice(connection, table, *where, rows=pace.rows)
        pace.took(gone, time.perf_counter() - began)
        return gone
