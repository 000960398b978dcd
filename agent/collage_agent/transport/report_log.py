"""A process's messages in order, and a cursor behind those that are settled: in memory, after a failure on disk.

A log's file, its spool, is a magic line and records of msgpack envelopes. It is written without a buffer, so a
killed process loses nothing that was kept. While its writer lives it holds a lock on the file. A file without a
lock was left behind, and the process that takes it over sends it.

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
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from collage_agent.transport.envelope import Envelope
from collage_agent.transport.report_counts import Place, ReportCounts
from collage_monitor.errors import WireError
from collage_monitor.wire import RejectedReport, ReportBatch, ReportGap, RunCreate

__all__ = ["ReportLog", "abandoned_spools", "spool_path", "waiting_spools"]

_LOG = logging.getLogger("collage_agent")
_REGISTRATIONS: Final = ("run", "attempt", "stream")
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


def abandoned_spools(folder: Path, own: Path) -> Iterator[ReportLog]:
    """The logs that earlier processes left in `folder`, each locked for the caller.

    Those of the run that `own` belongs to come first, then the oldest.
    """
    for path in sorted(waiting_spools(folder), key=lambda path: path.parent != own.parent):
        if path != own and (log := ReportLog.take_over(path)) is not None:
            yield log


def waiting_spools(folder: Path) -> list[Path]:
    """All spool files in `folder`, held or not, by the age of their streams."""
    return sorted((folder / "spool").glob(f"*/*{_SUFFIX}"), key=lambda path: path.name)


class ReportLog:
    """Appends at the end, and settles the first message: it was acknowledged, or is given up.

    `keep` moves what is in memory to the file, which its first call makes, and `close` removes once all is settled.
    Reading a file again after a crash begins at the front: the server knows repeated reports by their seq. At the
    size limit the older half gives way. A report that is given up is counted, and the next batch of its stream
    names its seq as a gap, so that the server does not wait for it.
    """

    def __init__(self, path: Path, limit_bytes: int = 2**40, counts: ReportCounts | None = None) -> None:
        self.path = path
        self.counts = ReportCounts() if counts is None else counts
        self.registrations: dict[str, Envelope] = {}
        """The settled run, attempt and stream to which the first message belongs."""
        self._limit_bytes = limit_bytes
        self._descriptor: int | None = None
        self._taken_over = False
        self._cursor = self._record_end = self._end = len(_MAGIC)
        self._record: deque[Envelope] = deque()
        """What is left of the record at the cursor, once it was read."""
        self._unkept: deque[Envelope] = deque()
        """What is behind the file's end, in memory alone."""
        self._gaps: defaultdict[str, list[ReportGap]] = defaultdict(list)
        """Reports that were given up, by stream, until the server or the file knows of them."""
        self._next_seq: tuple[str, int] | None = None
        """Stream and seq that follow the last record read."""
        self._skipped = False
        self._warned: set[str] = set()

    @classmethod
    def take_over(cls, path: Path) -> ReportLog | None:
        """The log of a process that is gone, or None when its writer lives or the file is no spool."""
        log = cls(path)
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return None
        held = _lock(descriptor) and os.fstat(descriptor).st_nlink > 0
        if not held or os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
            os.close(descriptor)
            return None
        log._taken_over = True
        log._descriptor = descriptor
        log._end = os.fstat(descriptor).st_size
        return log

    @property
    def bytes_left(self) -> int:
        """Bytes of the file that are not settled."""
        return max(0, self._end - self._cursor)

    @property
    def is_empty(self) -> bool:
        """Whether everything is settled."""
        return not (self.bytes_left or self._unkept)

    def append(self, envelope: Envelope) -> None:
        """Add a message at the end, in memory."""
        self._unkept.append(envelope)

    def keep(self) -> None:
        """Move to the file what is in memory alone; what cannot be written is given up."""
        while self._unkept:
            # Each file is complete without what the server knew when it was written.
            needed = () if self.bytes_left else self.registrations.values()
            message = self._unkept.popleft()
            told = self._with_gaps(message)
            try:
                self._write(b"".join(_packed(_allowing_resume(each)) for each in (*needed, told)))
            except Exception as error:
                # One message must not hold up those behind it, whatever is wrong with it.
                self._give_up(message, "pending", "spool_failed")
                self.warn_once("spool_failed", f"reports cannot be kept in {self.path}: {error}")
            else:
                self._forget_gaps(message)
                self.counts.move(message.report_count, "pending", "spooled")

    def first(self) -> Envelope | None:
        """The oldest message that is not settled, with the gaps of its stream; None when there is none.

        Damaged records are left out with a log line.
        """
        while self.bytes_left and not self._record:
            record = next(_records(self._opened(), self._cursor, self._end), None)
            until = self._end if record is None else record.begin
            if until > self._cursor:
                _LOG.warning("%s: %d bytes are left out: damaged or torn", self.path, until - self._cursor)
                self._cursor, self._skipped = until, True
            if record is not None:
                self._record_end = record.end
                self._record.append(record.envelope)
                self._notice_missing(record.envelope)
        if not self.bytes_left:
            # Reports at a damaged end have no readable number.
            self.counts.move(self.counts.spooled, "spooled", "dropped", "spool_damaged")
        return self._with_gaps(self._front[0]) if self._front else None

    def acknowledge(self, rejected: Sequence[RejectedReport] = ()) -> None:
        """Settle the first message: the server has it, without its rejected reports."""
        first = self._front[0]
        self.counts.move(first.report_count - len(rejected), self._place, "sent")
        self.counts.move(len(rejected), self._place, "dropped", "rejected")
        self._forget_gaps(first)
        numbers = [entry.seq for entry in rejected if entry.seq is not None]
        _join_gaps(self._gaps[first.stream_id], _gaps_of(numbers, "rejected"))
        self._advance()

    def drop(self, reason: str) -> None:
        """Settle the first message: it is given up."""
        self._give_up(self._front[0], self._place, reason)
        self._advance()

    def split(self) -> None:
        """Let the two halves of the first batch take its place, each a message of its own."""
        whole = self._front.popleft()
        assert isinstance(whole.body, ReportBatch)
        reports, middle = whole.body.reports, whole.report_count // 2
        second = replace(whole, body=ReportBatch(reports=reports[middle:]))
        first = replace(whole, body=msgspec.structs.replace(whole.body, reports=reports[:middle]))
        self._front.extendleft((second, first))

    def close(self) -> None:
        """Let go of the file; remove it, and its folder, when all of it is settled."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            self._shorter_path.unlink(missing_ok=True)
        if not self.bytes_left:
            with contextlib.suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()
        else:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor and nothing else; in a forked child the file stays the parent's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def warn_once(self, reason: str, text: str) -> None:
        """Log a warning, once for each reason."""
        if self.is_new(reason):
            _LOG.warning("%s (said once; see run.reports_dropped)", text)

    def is_new(self, reason: str) -> bool:
        """Whether nothing was said for this reason yet; from now on it was."""
        is_new = reason not in self._warned
        self._warned.add(reason)
        return is_new

    @property
    def _shorter_path(self) -> Path:
        return self.path.with_suffix(_SHORTER_SUFFIX)

    @property
    def _front(self) -> deque[Envelope]:
        """Where the first message is, once it was read."""
        return self._record if self.bytes_left else self._unkept

    @property
    def _place(self) -> Place:
        """Where the first reports are counted; what another process left counts as it is read."""
        return "spooled" if self.bytes_left and not self._taken_over else "pending"

    def _advance(self) -> None:
        settled = self._front.popleft()
        if settled.kind == "attempt":
            # The current stream belongs to an older attempt.
            self.registrations.pop("stream", None)
        if settled.kind in _REGISTRATIONS:
            self.registrations[settled.kind] = _allowing_resume(settled)
        if self.bytes_left and not self._record:
            self._cursor = self._record_end
            if not self.bytes_left:
                os.ftruncate(self._opened(), len(_MAGIC))
                self._cursor = self._end = len(_MAGIC)

    def _give_up(self, envelope: Envelope, place: Place, reason: str) -> None:
        self.counts.move(envelope.report_count, place, "dropped", reason)
        if isinstance(envelope.body, ReportBatch):
            gaps = self._gaps[envelope.stream_id] = [*envelope.body.gaps, *self._gaps[envelope.stream_id]]
            _join_gaps(gaps, _gaps_of((report.seq for report in envelope.body.reports), reason))

    def _with_gaps(self, envelope: Envelope) -> Envelope:
        """A batch of reports, with the gaps of its stream that neither server nor file knows; other messages
        unchanged."""
        body, gaps = envelope.body, self._gaps.get(envelope.stream_id)
        if not gaps or not isinstance(body, ReportBatch):
            return envelope
        return replace(envelope, body=msgspec.structs.replace(body, gaps=[*body.gaps, *gaps]))

    def _forget_gaps(self, envelope: Envelope) -> None:
        if isinstance(envelope.body, ReportBatch):
            self._gaps.pop(envelope.stream_id, None)

    def _notice_missing(self, envelope: Envelope) -> None:
        """The reports between the last readable one and this one are lost."""
        if not isinstance(envelope.body, ReportBatch) or not envelope.body.reports:
            return
        numbers = [report.seq for report in envelope.body.reports]
        stream_id, due = self._next_seq or (None, 0)
        lost = range(due, min(numbers)) if self._skipped and stream_id == envelope.stream_id else range(0)
        self._next_seq, self._skipped = (envelope.stream_id, max(numbers) + 1), False
        if self._taken_over:
            self.counts.add(len(lost) + len(numbers))
        if lost:
            self.counts.move(len(lost), self._place, "dropped", "spool_damaged")
            _join_gaps(self._gaps[envelope.stream_id], _gaps_of(lost, "spool_damaged"))
            self.warn_once("spool_damaged", f"{self.path} was damaged: some reports are lost")

    def _write(self, records: bytes) -> None:
        """Write records at the end; they survive the death of the process when this returns.

        Raises:
            OSError: no space, no permission, or longer than the size limit; older reports may have given way.
        """
        if 2 * len(records) > min(self._limit_bytes, 2 * _LONGEST_PAYLOAD):
            raise OSError(f"a message of {len(records)} bytes is too long for it")
        descriptor = self._opened()
        if self._end + len(records) > self._limit_bytes:
            self._shorten()
            descriptor = self._opened()
        try:
            _write_all(descriptor, records, self._end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._end)
            raise
        self._end += len(records)

    def _shorten(self) -> None:
        """Rewrite the file without the settled part and, if that is not enough, without the older half.

        Registrations stay: without them the server could not place what follows. A batch without reports takes the
        place of what was removed: it names those reports as gaps, beside the gaps that they carried.
        """
        source = self._opened()
        cut = max(self._cursor, self._end - self._limit_bytes // 2)
        first = {(known.kind, known.stream_id): known for known in self.registrations.values()}
        count = 0
        for record in _records(source, self._cursor, self._end):
            if record.begin >= cut:
                cut = record.begin
                break
            for envelope in self._record if record.begin == self._cursor and self._record else (record.envelope,):
                place = envelope.kind, envelope.stream_id
                if isinstance(envelope.body, ReportBatch):
                    count += envelope.report_count
                    envelope = _emptied(envelope, first.get(place))
                first[place] = envelope
        else:
            cut = self._end
        self._rewrite(source, b"".join(_packed(envelope) for envelope in first.values()), cut)
        if count:
            self.counts.move(count, "spooled", "dropped", "spool_full")
            self.warn_once("spool_full", f"{self.path} is full: its oldest reports gave way")

    def _rewrite(self, source: int, first: bytes, cut: int) -> None:
        """Replace the file by one with these records and the rest behind `cut`, under the same lock."""
        target = os.open(self._shorter_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _lock(target)
            begin = _MAGIC + first
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
        moved = len(begin) - cut
        if cut > self._cursor:
            # Send what gave way from its beginning; repeated registrations do no harm.
            self._record.clear()
            self._cursor = len(_MAGIC)
        else:
            self._cursor += moved
        self._record_end += moved
        self._end += moved

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


def _allowing_resume(envelope: Envelope) -> Envelope:
    """A registration that may be repeated: `resume` only restricts the first one."""
    if not isinstance(envelope.body, RunCreate):
        return envelope
    return replace(envelope, body=msgspec.structs.replace(envelope.body, resume="allow"))


def _gaps_of(numbers: Iterable[int], reason: str) -> Iterator[ReportGap]:
    return (ReportGap(first_seq=seq, last_seq=seq, reason=reason) for seq in numbers)


def _join_gaps(known: list[ReportGap], gaps: Iterable[ReportGap]) -> None:
    """Add gaps, each as one with the last where it goes on from there for the same reason."""
    for gap in gaps:
        if known and known[-1].reason == gap.reason and known[-1].last_seq + 1 == gap.first_seq:
            gap = ReportGap(first_seq=known.pop().first_seq, last_seq=gap.last_seq, reason=gap.reason)
        known.append(gap)


def _emptied(envelope: Envelope, earlier: Envelope | None) -> Envelope:
    """A batch that names as gaps the reports of this one, and what an earlier emptied one names."""
    assert isinstance(envelope.body, ReportBatch)
    gaps = list(earlier.body.gaps) if earlier and isinstance(earlier.body, ReportBatch) else []
    numbers = (report.seq for report in envelope.body.reports)
    _join_gaps(gaps, [*envelope.body.gaps, *_gaps_of(numbers, "spool_full")])
    return replace(envelope, body=ReportBatch(reports=[], gaps=gaps))


def _lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        # Windows cannot delete an open file, which serves as the lock.
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class _Record(NamedTuple):
    """A whole record: its begin and end in the file, and its message."""

    begin: int
    end: int
    envelope: Envelope


def _packed(envelope: Envelope) -> bytes:
    """The record of a message, as it stands in the file."""
    payload = envelope.to_bytes()
    return _HEADER.pack(_MARK, len(payload), zlib.crc32(payload)) + payload


def _records(descriptor: int, begin: int, end: int) -> Iterator[_Record]:
    """All whole records between two places of a file."""
    position: int | None = begin
    while position is not None:
        record = _record_at(descriptor, position, end)
        if record is not None:
            yield record
        position = _next_mark(descriptor, position + 1, end) if record is None else record.end


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
    with contextlib.suppress(WireError):
        if zlib.crc32(payload) == checksum:
            return _Record(position, begin + length, Envelope.from_bytes(payload))
    return None


def _next_mark(descriptor: int, position: int, end: int) -> int | None:
    for begin in range(position, end, _READ_BYTES):
        # Blocks overlap by a mark's length, so that none is missed on a border.
        found = os.pread(descriptor, _READ_BYTES + len(_MARK) - 1, begin).find(_MARK)
        if found >= 0:
            return begin + found
    return None
