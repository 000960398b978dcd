"""What could not be sent yet, on disk: an append-only file per process, read in order, safe against a torn end.

A file is a magic line and records of msgpack envelopes. It is written without a buffer, so a killed process loses
nothing that was appended. While its writer lives it holds a lock on the file. A file without a lock was left
behind, and the process that takes it over sends it.

A record is a mark, the payload's length, its CRC-32, and the payload, little-endian. Byte 0xC1 is never written by
msgpack, so the mark is rare in a payload, and where it does occur the checksum tells: records are found again
behind a damaged one.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from collage_agent.transport.envelope import Envelope
from collage_monitor.errors import WireError
from collage_monitor.wire import ReportBatch, ReportGap

__all__ = ["SpoolFile", "abandoned_spools", "join_gap", "spool_path", "waiting_spools"]

_LOG = logging.getLogger("collage_agent")
_MAGIC: Final = b"collage-spool-2\n"
_LONGEST_PAYLOAD: Final = 64 * 2**20
_MARK: Final = b"\xc1\xf5spool\n"
_HEADER: Final = struct.Struct("<8sII")
_READ_BYTES: Final = 2**20
_SUFFIX: Final = ".spool"
_SHORTER_SUFFIX: Final = ".shorter"


def spool_path(folder: Path, run_id: str, stream_id: str) -> Path:
    """Where a process keeps its spool."""
    return folder / "spool" / run_id / f"{stream_id}{_SUFFIX}"


def abandoned_spools(folder: Path, own: Path) -> Iterator[SpoolFile]:
    """Spool files that earlier processes left in `folder`, each locked for the caller.

    Those of the run that `own` belongs to come first, then the oldest.
    """
    for path in sorted(waiting_spools(folder), key=lambda path: path.parent != own.parent):
        if path != own and (spool := SpoolFile.take_over(path)) is not None:
            yield spool


def waiting_spools(folder: Path) -> list[Path]:
    """All spool files in `folder`, held or not, by the age of their streams."""
    return sorted((folder / "spool").glob(f"*/*{_SUFFIX}"), key=lambda path: path.name)


class SpoolFile:
    """Appends at the end, reads from the front. The file is made by the first append and removed once all is read.

    Reading again after a crash begins at the front: the server knows repeated reports by their seq. At the size
    limit the older half gives way.
    """

    def __init__(self, path: Path, limit_bytes: int = 2**40) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self._descriptor: int | None = None
        self._read_at = self._end = len(_MAGIC)
        self._peeked_end: int | None = None
        self._expected: tuple[str, int] | None = None
        self._skipped = False
        self._left: tuple[str, int] | None = None
        """Stream and first report of what is left of the oldest record, when a part of it is dealt with."""
        self.taken_over = False
        """Whether another process wrote it."""
        self.damaged: list[tuple[str, ReportGap]] = []
        """Stream and reports of damaged records, as far as their neighbours tell; taken away by the reader."""
        self.gave_way: list[ReportGap] = []
        """Reports that had to give way to newer ones, as ranges of their seq; taken away by the writer."""

    @classmethod
    def take_over(cls, path: Path) -> SpoolFile | None:
        """The file of a process that is gone, or None when its writer lives or it is no spool."""
        spool = cls(path)
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return None
        held = _lock(descriptor) and os.fstat(descriptor).st_nlink > 0
        if not held or os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
            os.close(descriptor)
            return None
        spool.taken_over = True
        spool._descriptor = descriptor
        spool._end = os.fstat(descriptor).st_size
        return spool

    @property
    def is_empty(self) -> bool:
        """Whether everything appended has been read."""
        return self._read_at >= self._end

    @property
    def bytes_left(self) -> int:
        """Bytes that wait to be read."""
        return max(0, self._end - self._read_at)

    def append(self, envelope: Envelope) -> None:
        """Write one envelope at the end; survives the death of the process when this returns.

        Raises:
            OSError: no space, no permission, or longer than the size limit; of the file only older reports may be
                gone, which `gave_way` then tells all the same.
        """
        payload = envelope.to_bytes()
        record = _packed(payload)
        if len(payload) > _LONGEST_PAYLOAD or 2 * len(record) > self._limit_bytes:
            raise OSError(f"a message of {len(payload)} bytes is too long for it")
        descriptor = self._opened()
        if self._end + len(record) > self._limit_bytes:
            self.gave_way += self._shorten()
            descriptor = self._opened()
        try:
            _write_all(descriptor, record, self._end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._end)
            raise
        self._end += len(record)

    def peek(self) -> Envelope | None:
        """The oldest envelope that was not read; None at the end. Damaged records are left out with a log line."""
        while not self.is_empty and self._descriptor is not None:
            record = _next_record(self._descriptor, self._read_at, self._end)
            until = self._end if record is None else record.begin
            if until > self._read_at:
                self._skip(until, "damaged or torn")
            if record is None:
                break
            try:
                envelope = Envelope.from_bytes(record.payload)
            except WireError as error:
                self._skip(record.end, str(error))
                continue
            self._peeked_end = record.end
            self._notice_missing(envelope)
            return self._rest(envelope)
        return None

    def advance(self) -> None:
        """The envelope from `peek` is dealt with; after the last one the file is emptied."""
        if self._peeked_end is None:
            # It had to give way in the meantime, and was counted then.
            return
        self._read_at, self._peeked_end = self._peeked_end, None
        if self.is_empty and self._descriptor is not None:
            os.ftruncate(self._descriptor, len(_MAGIC))
            self._read_at = self._end = len(_MAGIC)

    def leave(self, left: Envelope) -> None:
        """Only the last `left` reports of the envelope from `peek` remain to be sent."""
        if isinstance(left.body, ReportBatch) and left.body.reports:
            self._left = left.stream_id, left.body.reports[0].seq

    def close(self) -> None:
        """Let go of the file; remove it, and its folder, when nothing is left to read."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            self._shorter_path.unlink(missing_ok=True)
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

    @property
    def _shorter_path(self) -> Path:
        return self.path.with_suffix(_SHORTER_SUFFIX)

    def _skip(self, until: int, why: str) -> None:
        _LOG.warning("%s: %d bytes are left out: %s", self.path, until - self._read_at, why)
        self._read_at = until
        self._skipped = True

    def _notice_missing(self, envelope: Envelope) -> None:
        """The reports between the last readable one and this one are lost."""
        if not isinstance(envelope.body, ReportBatch) or not envelope.body.reports:
            return
        numbers = [report.seq for report in envelope.body.reports]
        expected, self._expected = self._expected, (envelope.stream_id, max(numbers) + 1)
        if self._skipped and expected is not None and expected[0] == envelope.stream_id:
            gap = ReportGap(first_seq=expected[1], last_seq=min(numbers) - 1, reason="spool_damaged")
            if gap.first_seq <= gap.last_seq:
                self.damaged.append((envelope.stream_id, gap))
        self._skipped = False

    def _rest(self, envelope: Envelope) -> Envelope:
        """The envelope without the reports that are done, whose gaps the server then knows, too."""
        body = envelope.body
        if self._left is None or self._left[0] != envelope.stream_id or not isinstance(body, ReportBatch):
            return envelope
        reports = [report for report in body.reports if report.seq >= self._left[1]]
        if len(reports) == len(body.reports):
            return envelope
        return replace(envelope, body=msgspec.structs.replace(body, reports=reports, gaps=[]))

    def _shorten(self) -> list[ReportGap]:
        """Rewrite the file without the read part and, if that is not enough, without the older half.

        Registrations stay: without them the server could not place what follows. A batch without reports takes the
        place of what was removed: it names those reports as gaps, beside the gaps that they carried.
        """
        source = self._opened()
        cut = max(self._read_at, self._end - self._limit_bytes // 2)
        begin: dict[tuple[str, str], Envelope] = {}
        given_up: list[ReportGap] = []
        for record in _records(source, len(_MAGIC), self._end):
            if record.begin >= cut:
                cut = record.begin
                break
            envelope = _readable(record.payload)
            if envelope is None:
                continue
            if not isinstance(envelope.body, ReportBatch):
                begin[envelope.kind, envelope.stream_id] = envelope
            elif record.begin >= self._read_at:
                envelope = self._rest(envelope)
                assert isinstance(envelope.body, ReportBatch)
                gone = [
                    ReportGap(first_seq=report.seq, last_seq=report.seq, reason="spool_full")
                    for report in envelope.body.reports
                ]
                for gap in gone:
                    join_gap(given_up, gap)
                known = begin.get((envelope.kind, envelope.stream_id))
                carried = list(known.body.gaps) if known and isinstance(known.body, ReportBatch) else []
                for gap in (*envelope.body.gaps, *gone):
                    join_gap(carried, gap)
                emptied = ReportBatch(reports=[], gaps=carried)
                begin[envelope.kind, envelope.stream_id] = replace(envelope, body=emptied)
        else:
            cut = self._end
        self._rewrite(source, [_packed(envelope.to_bytes()) for envelope in begin.values()], cut)
        return given_up

    def _rewrite(self, source: int, first: list[bytes], cut: int) -> None:
        """Replace the file by one with these records and the rest behind `cut`, under the same lock."""
        target = os.open(self._shorter_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _lock(target)
            begin = _MAGIC + b"".join(first)
            _write_all(target, begin, 0)
            _copy_range(source, cut, self._end, target, len(begin))
            os.replace(self._shorter_path, self.path)
        except OSError:
            os.close(target)
            with contextlib.suppress(OSError):
                self._shorter_path.unlink()
            raise
        os.close(source)
        self._descriptor = target
        self._end = len(begin) + self._end - cut
        # Registrations are sent again, which does no harm.
        self._read_at = len(_MAGIC)
        self._peeked_end = None

    def _opened(self) -> int:
        """The descriptor, made and locked on first use; again when somebody removed the file in between."""
        if self._descriptor is not None:
            return self._descriptor
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for _ in range(20):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            if _lock(descriptor) and os.fstat(descriptor).st_nlink > 0:
                try:
                    _write_all(descriptor, _MAGIC, 0)
                except OSError:
                    os.close(descriptor)
                    raise
                self._descriptor = descriptor
                return descriptor
            os.close(descriptor)
            time.sleep(0.05)
        raise OSError(f"{self.path} is locked by another process")


def _readable(payload: bytes) -> Envelope | None:
    try:
        return Envelope.from_bytes(payload)
    except WireError:
        return None


def join_gap(gaps: list[ReportGap], gap: ReportGap) -> None:
    """Add a gap, as one with the last where it goes on from there for the same reason."""
    if gaps and gaps[-1].reason == gap.reason and gaps[-1].last_seq + 1 == gap.first_seq:
        gap = ReportGap(first_seq=gaps.pop().first_seq, last_seq=gap.last_seq, reason=gap.reason)
    gaps.append(gap)


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


@dataclass(frozen=True)
class _Record:
    """A whole record: its begin and end in the file, and its payload."""

    begin: int
    end: int
    payload: bytes


def _packed(payload: bytes) -> bytes:
    """The record of a payload, as it stands in the file."""
    return _HEADER.pack(_MARK, len(payload), zlib.crc32(payload)) + payload


def _next_record(descriptor: int, begin: int, end: int) -> _Record | None:
    """The first whole record of a file at or behind `begin` and before `end`; None when there is none."""
    position: int | None = begin
    while position is not None:
        record = _record_at(descriptor, position, end)
        if record is not None:
            return record
        position = _next_mark(descriptor, position + 1, end)
    return None


def _records(descriptor: int, begin: int, end: int) -> Iterator[_Record]:
    """All whole records between two places of a file."""
    record = _next_record(descriptor, begin, end)
    while record is not None:
        yield record
        record = _next_record(descriptor, record.end, end)


def _copy_range(source: int, begin: int, end: int, target: int, offset: int) -> None:
    """Copy a part of one file into another, in blocks.

    Raises:
        OSError: the target has no room.
    """
    while begin < end:
        data = os.pread(source, min(_READ_BYTES, end - begin), begin)
        if not data:
            raise OSError("the file ends too early")
        _write_all(target, data, offset)
        begin, offset = begin + len(data), offset + len(data)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data` at a place of a file.

    Raises:
        OSError: no room, or a limit of the system.
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _record_at(descriptor: int, position: int, end: int) -> _Record | None:
    begin = position + _HEADER.size
    header = os.pread(descriptor, _HEADER.size, position)
    if begin > end or len(header) < _HEADER.size:
        return None
    mark, length, checksum = _HEADER.unpack(header)
    if mark != _MARK or length > min(_LONGEST_PAYLOAD, end - begin):
        return None
    payload = os.pread(descriptor, length, begin)
    return _Record(position, begin + length, payload) if zlib.crc32(payload) == checksum else None


def _next_mark(descriptor: int, position: int, end: int) -> int | None:
    while position < end:
        # Blocks overlap by a mark's length, so that none is missed on a border.
        data = os.pread(descriptor, min(_READ_BYTES + len(_MARK) - 1, end - position), position)
        found = data.find(_MARK)
        if found >= 0:
            return position + found
        if len(data) < len(_MARK):
            return None
        position += len(data) - len(_MARK) + 1
    return None
