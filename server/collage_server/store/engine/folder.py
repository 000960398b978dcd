"""A database's folder: locked by the one server that seals, and refused where its disk is a network's."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["file_identity", "folder_lock", "network_file_system"]

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


def file_identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from any other that gets its name; None where there is none."""
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
