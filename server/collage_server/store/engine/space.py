"""How much space an SQLite file takes, and giving free pages back to the disk."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from collage_server.store.contract import Sizes

__all__ = ["return_pages", "sqlite_sizes"]

_PAGES_A_SLICE: Final = 256


def sqlite_sizes(path: Path) -> Sizes:
    """What the data takes, without free pages and the write-ahead log; and what the disk has left."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        total, free, page = (
            int(connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
    return Sizes(used_bytes=(total - free) * page, free_bytes=shutil.disk_usage(path.parent).free)


def return_pages(path: Path, timeout_seconds: float) -> bool:
    """Give a slice of free pages back; True if there are more. The file shrinks at the next checkpoint.

    `execute` would step the statement once and free one page whatever the number says: `executescript` frees all.
    """
    with closing(sqlite3.connect(path, timeout=timeout_seconds, isolation_level=None)) as connection:
        if not connection.execute("PRAGMA freelist_count").fetchone()[0]:
            return False
        connection.executescript(f"PRAGMA incremental_vacuum({_PAGES_A_SLICE})")
        left = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
        if not left:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    return left > 0
