"""The bytes of a spool file: records that can be found again behind a damaged one.

A record is a mark, the payload's length, its CRC-32, and the payload, little-endian. Byte 0xC1 is never written by
msgpack, so the mark is rare in a payload, and where it does occur the checksum tells.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["LONGEST_PAYLOAD", "MAGIC", "Record", "copy_range", "next_record", "packed", "records", "write_all"]

MAGIC: Final = b"collage-spool-2\n"
LONGEST_PAYLOAD: Final = 64 * 2**20
_MARK: Final = b"\xc1\xf5spool\n"
_HEADER: Final = struct.Struct("<8sII")
_BLOCK: Final = 2**20


@dataclass(frozen=True)
class Record:
    """A whole record: where it begins and ends in the file, and what it holds."""

    begin: int
    end: int
    payload: bytes


def packed(payload: bytes) -> bytes:
    """The record of a payload, as it stands in the file."""
    return _HEADER.pack(_MARK, len(payload), zlib.crc32(payload)) + payload


def next_record(descriptor: int, begin: int, end: int) -> Record | None:
    """The first whole record of a file at or behind `begin` and before `end`; None when there is none."""
    position: int | None = begin
    while position is not None:
        record = _record_at(descriptor, position, end)
        if record is not None:
            return record
        position = _next_mark(descriptor, position + 1, end)
    return None


def records(descriptor: int, begin: int, end: int) -> Iterator[Record]:
    """All whole records between two places of a file."""
    record = next_record(descriptor, begin, end)
    while record is not None:
        yield record
        record = next_record(descriptor, record.end, end)


def copy_range(source: int, begin: int, end: int, target: int, offset: int) -> None:
    """Copy a part of one file into another, in blocks.

    Raises:
        OSError: the target has no room.
    """
    while begin < end:
        block = os.pread(source, min(_BLOCK, end - begin), begin)
        if not block:
            raise OSError("the file ends too early")
        write_all(target, block, offset)
        begin, offset = begin + len(block), offset + len(block)


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data` at a place of a file.

    Raises:
        OSError: no room, or a limit of the system.
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _record_at(descriptor: int, position: int, end: int) -> Record | None:
    begin = position + _HEADER.size
    header = os.pread(descriptor, _HEADER.size, position)
    if begin > end or len(header) < _HEADER.size:
        return None
    mark, length, checksum = _HEADER.unpack(header)
    if mark != _MARK or length > min(LONGEST_PAYLOAD, end - begin):
        return None
    payload = os.pread(descriptor, length, begin)
    return Record(position, begin + length, payload) if zlib.crc32(payload) == checksum else None


def _next_mark(descriptor: int, position: int, end: int) -> int | None:
    while position < end:
        # Blocks overlap by a mark's length, so that none is missed on a border.
        block = os.pread(descriptor, min(_BLOCK + len(_MARK) - 1, end - position), position)
        found = block.find(_MARK)
        if found >= 0:
            return position + found
        if len(block) < len(_MARK):
            return None
        position += len(block) - len(_MARK) + 1
    return None
