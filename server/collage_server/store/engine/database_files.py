"""SQLite's files on the disk: permissions, the lock of the server that seals, sizes, write-ahead log, free space.

`sqlite.py` calls these functions (`tests/server/life/test_maintenance.py`); archive and back-up use `sync`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from collage_server.store.records import Sizes

__all__ = [
    "Ballast",
    "checkpoint_log",
    "file_identity",
    "folder_lock",
    "log_bytes",
    "make_private",
    "network_file_system",
    "return_pages",
    "sqlite_sizes",
    "sync",
]

_LOG: Final = logging.getLogger(__name__)
_MOUNTS = Path("/proc/self/mounts")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_NETWORK: Final = frozenset(
    {
        *("9p", "acfs", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "ftpfs", "gfs2", "glusterfs"),
        *("gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs"),
        *("sshfs", "wekafs"),
    }
)
_NETWORK_FUSE: Final = frozenset(
    {
        *("blobfuse", "blobfuse2", "ceph", "ceph-fuse", "davfs", "gcsfuse", "glusterfs", "goofys", "juicefs"),
        *("mount-s3", "mountpoint-s3", "rclone", "s3fs", "sshfs"),
    }
)
_PRIVATE_FILE: Final = 0o600
_PRIVATE_FOLDER: Final = 0o700
_OTHERS: Final = 0o077
_PAGES_A_SLICE: Final = 256
_PATIENCE_SECONDS: Final = 0.5
_PIECE: Final = bytes(2**20)


def network_file_system(folder: Path) -> str | None:
    """The type of the network file system that holds the folder; None on a local one, or if it cannot be found out.

    Linux lists its mounts. The longest mount point above the folder counts, its last entry if there are several.
    """
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    resolved, best, kind = folder.resolve(), -1, ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[1]))
        depth = len(point.parts)
        if depth >= best and resolved.is_relative_to(point):
            best, kind = depth, fields[2]
    family, _, program = kind.partition(".")
    return kind if kind in _NETWORK or (family == "fuse" and program in _NETWORK_FUSE) else None


def make_private(path: Path) -> None:
    """Make the file, and the folder that holds it, readable by their owner alone; create them if missing.

    SQLite gives its log and index the permissions of the database.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, _PRIVATE_FILE)
    try:
        if sys.platform != "win32" and os.fstat(descriptor).st_mode & _OTHERS:
            os.fchmod(descriptor, _PRIVATE_FILE)
    finally:
        os.close(descriptor)


def file_identity(path: Path) -> tuple[int, int] | None:
    """The identity of a file, different for another file at the same path; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Try to lock the folder for this process while the context lasts; yields whether it worked.

    The lock ends with the process, leaves no file behind, and is independent of SQLite's own. Windows has no such
    lock: there only one server may use a file.
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


def sync(path: Path) -> None:
    """Write a file's bytes, or a folder's entries, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def log_bytes(path: Path) -> int:
    """The size of a database's write-ahead log on the disk."""
    try:
        return path.with_name(f"{path.name}-wal").stat().st_size
    except FileNotFoundError:
        return 0


def sqlite_sizes(path: Path, held_bytes: int) -> Sizes:
    """The size of the data, without free pages, and the room on the disk for more.

    held_bytes: further room, which the ballast holds. The write-ahead log reduces the room: its content will also
    be written to the file.
    """
    with _opened(path) as connection:
        total, free, page = (
            int(connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
    free_bytes = max(shutil.disk_usage(path.parent).free + held_bytes - log_bytes(path), 0)
    return Sizes(used_bytes=(total - free) * page, free_bytes=free_bytes)


def checkpoint_log(path: Path) -> bool:
    """Move the write-ahead log into the file and empty it; the caller keeps this process from writing meanwhile.

    Without this the log grows as long as readers overlap. It waits up to half a second for the present readers; new
    ones need no log. False: a reader took longer, or the disk has no room for the larger file.
    """
    with _opened(path, _PATIENCE_SECONDS) as connection:
        try:
            busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        except sqlite3.OperationalError:
            return False
    return not busy


def return_pages(path: Path, timeout_seconds: float) -> bool:
    """Free some unused pages; True if there are more. The file shrinks at the next checkpoint.

    `executescript`, because `execute` steps the statement once and so frees a single page.
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
    """Connect to an existing file. A new, empty file in place of a lost one would swallow the lost one's log."""
    address = f"{path.absolute().as_uri()}?mode=rw"
    return closing(sqlite3.connect(address, timeout=timeout_seconds, isolation_level=None, uri=True))


class Ballast:
    """A file of `size` bytes that reserves room for operations that must work on a full disk; 0: no file.

    Other programs cannot take these bytes. `release` frees them for the database, `keep` takes them again.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    @property
    def bytes(self) -> int:
        """The size of the file now."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def keep(self) -> None:
        """Take the space if twice as much is free, so that space just released is not taken again."""
        if self.bytes >= self._size or shutil.disk_usage(self._path.parent).free < 2 * self._size:
            return
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY, _PRIVATE_FILE)
            try:
                _allocate(descriptor, self._size)
            finally:
                os.close(descriptor)
        except OSError as error:
            _LOG.warning("%s cannot hold %d bytes for a full disk: %s", self._path, self._size, error)
            self.release()

    def release(self) -> None:
        """Give the space back if less than it is free."""
        if self.bytes and shutil.disk_usage(self._path.parent).free < self._size:
            os.truncate(self._path, 0)


def _allocate(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    for start in range(0, size, len(_PIECE)):
        os.write(descriptor, _PIECE[: size - start])
