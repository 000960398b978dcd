"""A database's folder: locked by the one server that seals, and refused where its disk is a network's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["folder_lock"]


@contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Whether this process alone has the folder's lock, as long as the context lasts; it ends with the process.

    It leaves no file behind, and is apart from the locks that SQLite takes on its files. Windows has no such lock:
    there a file is for one server.
    """
    if sys.platform == "win32":
        yield True
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
