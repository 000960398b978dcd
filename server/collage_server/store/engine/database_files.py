"""A database's file and its folder: the space it takes, holds and gives back, the lock of the server that seals.

A folder is refused where its disk is a network's.

`sqlite.py` calls it (`tests/server/life/test_full_disk.py`); archive and back-up take `sync`.
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
    """The type of the network file system that holds the folder; None on a local one, and where nothing tells.

    Linux tells by its table of mounts. The last entry of the longest mount point that leads to the folder counts.
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
    """A file that only its owner may read, made if it is not there, and the folder that holds it.

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
    """The identity of a file, which another file of the same name does not have; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


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


def sync(path: Path) -> None:
    """A file's bytes, or a folder's entries, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def log_bytes(path: Path) -> int:
    """What the write-ahead log of a database takes on the disk."""
    try:
        return path.with_name(f"{path.name}-wal").stat().st_size
    except FileNotFoundError:
        return 0


def sqlite_sizes(path: Path, held_bytes: int) -> Sizes:
    """What the data takes, without free pages and the write-ahead log; and what the disk has left for more.

    `held_bytes` of it are kept elsewhere. Data in the log counts as used, because it will also be written to the
    file.
    """
    with _opened(path) as connection:
        total, free, page = (
            int(connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
    free_bytes = max(shutil.disk_usage(path.parent).free + held_bytes - log_bytes(path), 0)
    return Sizes(used_bytes=(total - free) * page, free_bytes=free_bytes)


def checkpoint_log(path: Path) -> bool:
    """Fold the write-ahead log into the file and empty it; the caller keeps this process from writing meanwhile.

    Readers that follow on each other without a pause keep it from beginning again, and it grows. It waits at most
    half a second for present readers; new ones need no log. False: one of them reads for longer, or the disk has no
    room for what the file would grow by.
    """
    with _opened(path, _PATIENCE_SECONDS) as connection:
        try:
            busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        except sqlite3.OperationalError:
            return False
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
    """A connection to a file that is there: an empty one, made again, would swallow the log of the one that was."""
    address = f"{path.absolute().as_uri()}?mode=rw"
    return closing(sqlite3.connect(address, timeout=timeout_seconds, isolation_level=None, uri=True))


class Ballast:
    """Disk space for operations that must work on a full disk: `size` bytes in the file `path`; with 0 there is no
    file.

    Other programs that fill the disk cannot take these bytes. `release` gives them to the database, `keep` takes
    them again.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    @property
    def bytes(self) -> int:
        """What the file takes now."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def keep(self) -> None:
        """Take the space, if the disk has twice of it: space that was just released is not taken again."""
        if self.bytes >= self._size or shutil.disk_usage(self._path.parent).free < 2 * self._size:
            return
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                _allocate(descriptor, self._size)
            finally:
                os.close(descriptor)
        except OSError as error:
            _LOG.warning("%s cannot hold %d bytes for a full disk: %s", self._path, self._size, error)
            self.release()

    def release(self) -> None:
        """Give the space back if the disk has less than that left."""
        if self.bytes and shutil.disk_usage(self._path.parent).free < self._size:
            os.truncate(self._path, 0)


def _allocate(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    for start in range(0, size, len(_PIECE)):
        os.write(descriptor, _PIECE[: size - start])
