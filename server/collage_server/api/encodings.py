"""Content encodings of request bodies: gzip and zstd, never decompressed beyond a limit.

A bomb costs no more memory than the limit, and none at all where its header says how large it is.
"""

from __future__ import annotations

import zlib
from typing import Final

import zstandard

from collage_server.errors import BadRequest, TooLarge, UnsupportedMediaType

__all__ = ["ENCODINGS", "checked_encoding", "decompress", "decompressed_bound"]

ENCODINGS: Final = ("identity", "gzip", "zstd")
_WINDOW_BYTES: Final = 8 * 2**20
_GZIP_BITS: Final = 31
_SLICE_BYTES: Final = 256


def checked_encoding(header: str) -> str:
    """The encoding that a Content-Encoding header names.

    Raises:
        UnsupportedMediaType: another one, or several.
    """
    encoding = header.strip().lower()
    if encoding not in ENCODINGS:
        raise UnsupportedMediaType(
            f"content encoding {header!r} is not spoken here; send {', '.join(ENCODINGS[1:])} or the body plain",
            field="Content-Encoding",
        )
    return encoding


def decompressed_bound(body: bytes, encoding: str, limit: int) -> int:
    """At most so many bytes are behind this body: what a zstd header states, else the limit.

    Raises:
        TooLarge: the header states more than the limit.
        BadRequest: the header is none.
    """
    if encoding != "zstd":
        return limit
    try:
        stated = zstandard.get_frame_parameters(body).content_size
    except zstandard.ZstdError as error:
        raise _unreadable(encoding, str(error)) from error
    if stated == zstandard.CONTENTSIZE_UNKNOWN:
        return limit
    if stated > limit:
        raise _too_large(limit)
    return int(stated)


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """The bytes behind an encoded body; takes no more memory than about twice `limit`.

    Raises:
        TooLarge: there are more than `limit`.
        BadRequest: not one whole gzip member or zstd frame.
    """
    return _gunzip(body, limit) if encoding == "gzip" else _unzstd(body, limit)


def _gunzip(body: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj(_GZIP_BITS)
    try:
        data = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise _unreadable("gzip", str(error)) from error
    if len(data) > limit:
        raise _too_large(limit)
    if not stream.eof or stream.unused_data:
        raise _unreadable("gzip", "the body is cut off, or something follows it")
    return data


def _unzstd(body: bytes, limit: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    try:
        if zstandard.get_frame_parameters(body).content_size != zstandard.CONTENTSIZE_UNKNOWN:
            return decoder.decompress(body, max_output_size=limit, allow_extra_data=False)
        return _stream(decoder, body, limit)
    except zstandard.ZstdError as error:
        raise _unreadable("zstd", str(error)) from error


def _stream(decoder: zstandard.ZstdDecompressor, body: bytes, limit: int) -> bytes:
    """The frame in slices so small that one of them cannot hold much: zstd packs 32 KiB into a byte at best."""
    stream = decoder.decompressobj()
    parts: list[bytes] = []
    size = 0
    for start in range(0, len(body), _SLICE_BYTES):
        if stream.eof:
            break
        parts.append(stream.decompress(body[start : start + _SLICE_BYTES]))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
    else:
        start = len(body)
    if not stream.eof or stream.unused_data or start < len(body):
        raise _unreadable("zstd", "the body is cut off, or something follows it")
    return b"".join(parts)


def _unreadable(encoding: str, reason: str) -> BadRequest:
    return BadRequest(f"the body is not {encoding} as Content-Encoding says: {reason}", field="body")


def _too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than {limit} bytes once decompressed; send it in smaller batches",
        field="body",
        limit=limit,
    )
