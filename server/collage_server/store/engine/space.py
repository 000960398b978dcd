"""How much space an SQLite file takes, and giving free pages back to the disk."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from collage_server.store.contract import Sizes

__all__ = ["fold_log", "return_pages", "sqlite_sizes"]

_PAGES_A_SLICE: Final = 256
_PATIENCE_SECONDS: Final = 0.5


def sqlite_sizes(path: Path) -> Sizes:
    """What the data takes, without free pages and the write-ahead log; and what the disk has left."""
    with _opened(path) as connection:
        total, free, page = (
            int(connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
    return Sizes(used_bytes=(total - free) * page, free_bytes=shutil.disk_usage(path.parent).free)


def fold_log(path: Path) -> bool:
    """Fold the write-ahead log into the file and empty it; the caller keeps this process from writing meanwhile.

    Readers that follow on each other without a pause keep it from beginning anew, and it grows. Those of now are
    waited for, half a second at most, and new ones need no log. False: one of them reads for longer.
    """
    with _opened(path, _PATIENCE_SECONDS) as connection:
        busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    return not busy


def return_pages(path: Path, timeout_seconds: float) -> bool:
    """Give a slice of free pages back; True if there are more. The file shrinks at the next checkpoint.

    `execute` would step the statement once and free one page whatever the number says: `executescript` frees all.
    """
    with _opened(path, timeout_seconds) as connection:
        if not connection.execute("PRAGMA freelist_count").fetchone()[0]:
            return False
        connection.executescript(f"PRAGMA incremental_vacuum({_PAGES_A_SLICE})")
        left = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
        if not left:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    return left > 0


def _opened(path: Path, timeout_seconds: float = 5.0) -> closing[sqlite3.Connection]:
    """A connection to a file that is there: an empty one, made anew, would swallow the log of the one that was."""
    address = f"{path.absolute().as_uri()}?mode=rw"
    return closing(sqlite3.connect(address, timeout=timeout_seconds, isolation_level=None, uri=True))
