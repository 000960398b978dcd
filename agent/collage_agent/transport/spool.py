"""What could not be sent yet, on disk: an append-only file per process, read in order, safe against a torn end.

A file is a magic line and records of (length, CRC-32, msgpack envelope), little-endian. It is written without a
buffer, so a killed process loses nothing that was appended. While its writer lives it holds a lock on the file;
a file that nobody holds was left behind and is sent by whoever takes it over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from collage_agent.transport.envelope import Envelope
from collage_monitor.errors import WireError

__all__ = ["SpoolFile", "abandoned_spools", "spool_path"]

_LOG = logging.getLogger("collage_agent")
_MAGIC: Final = b"collage-spool-1\n"
_HEADER: Final = struct.Struct("<II")
_LONGEST_RECORD: Final = 64 * 2**20
_SUFFIX: Final = ".spool"


def spool_path(folder: Path, run_id: str, stream_id: str) -> Path:
    """Where a process keeps its spool."""
    return folder / "spool" / run_id / f"{stream_id}{_SUFFIX}"


def abandoned_spools(folder: Path, own: Path) -> Iterator[SpoolFile]:
    """Spool files that earlier processes left in `folder`, each locked for the caller.

    Those of the run that `own` belongs to come first, then the oldest.
    """
    found = (folder / "spool").glob(f"*/*{_SUFFIX}")
    for path in sorted(found, key=lambda path: (path.parent != own.parent, path.name)):
        if path != own and (spool := SpoolFile.take_over(path)) is not None:
            yield spool


class SpoolFile:
    """Appends at the end, reads from the front. The file is made by the first append and removed once all is read.

    Reading again after a crash begins at the front: the server knows repeated reports by their seq.
    """

    def __init__(self, path: Path, limit_bytes: int = 2**40) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self._descriptor: int | None = None
        self._read_at = self._end = len(_MAGIC)
        self.reports = 0
        """Reports appended here and not read yet; unknown, so 0, for a file taken over."""

    @classmethod
    def take_over(cls, path: Path) -> SpoolFile | None:
        """The file of a process that is gone, or None when its writer lives or it is no spool."""
        spool = cls(path)
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return None
        if not _lock(descriptor) or os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
            os.close(descriptor)
            return None
        spool._descriptor = descriptor
        spool._end = os.fstat(descriptor).st_size
        return spool

    @property
    def is_empty(self) -> bool:
        """Whether everything appended has been read."""
        return self._read_at >= self._end

    def append(self, envelope: Envelope) -> None:
        """Write one envelope at the end; survives the death of the process when this returns.

        Raises:
            OSError: no space, no permission, or beyond the size limit; the file is as it was.
        """
        payload = envelope.to_bytes()
        record = _HEADER.pack(len(payload), zlib.crc32(payload)) + payload
        if self._end + len(record) > self._limit_bytes or len(payload) > _LONGEST_RECORD:
            raise OSError(f"{self.path} would exceed {self._limit_bytes} bytes")
        descriptor = self._opened()
        try:
            _write_all(descriptor, record, self._end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._end)
            raise
        self._end += len(record)
        self.reports += envelope.report_count

    def peek(self) -> Envelope | None:
        """The oldest envelope that was not read; None at the end. Damaged records are left out with a log line."""
        while not self.is_empty:
            payload = self._payload()
            if payload is None:
                _LOG.warning("%s: its end is torn, %d bytes are lost", self.path, self._end - self._read_at)
                self._read_at = self._end
                return None
            try:
                return Envelope.from_bytes(payload)
            except WireError as error:
                _LOG.warning("%s: one record left out: %s", self.path, error)
                self._read_at += _HEADER.size + len(payload)
        return None

    def advance(self, envelope: Envelope) -> None:
        """The envelope from `peek` is dealt with; after the last one the file is emptied."""
        payload = self._payload()
        self._read_at += _HEADER.size + len(payload or b"")
        self.reports = max(0, self.reports - envelope.report_count)
        if self.is_empty and self._descriptor is not None:
            os.ftruncate(self._descriptor, len(_MAGIC))
            self._read_at = self._end = len(_MAGIC)

    def close(self) -> None:
        """Let go of the file; remove it, and its folder, when nothing is left to read."""
        if self._descriptor is None:
            return
        if self.is_empty:
            with contextlib.suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()
        else:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None

    def forget(self) -> None:
        """In a forked child: close the inherited descriptor; the file stays the parent's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _payload(self) -> bytes | None:
        """The record at the read position, None when it is torn."""
        if self._descriptor is None:
            return None
        header = os.pread(self._descriptor, _HEADER.size, self._read_at)
        if len(header) < _HEADER.size:
            return None
        length, checksum = _HEADER.unpack(header)
        if length > min(_LONGEST_RECORD, self._end - self._read_at - _HEADER.size):
            return None
        payload = os.pread(self._descriptor, length, self._read_at + _HEADER.size)
        return payload if zlib.crc32(payload) == checksum else None

    def _opened(self) -> int:
        """The descriptor, made and locked on first use; again when somebody removed the file in between."""
        if self._descriptor is not None:
            return self._descriptor
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for _ in range(20):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            if _lock(descriptor) and os.fstat(descriptor).st_nlink > 0:
                _write_all(descriptor, _MAGIC, 0)
                self._descriptor = descriptor
                return descriptor
            os.close(descriptor)
            time.sleep(0.05)
        raise OSError(f"{self.path} is locked by another process")


def _lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        # An open file cannot be deleted there, which serves as the lock.
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
