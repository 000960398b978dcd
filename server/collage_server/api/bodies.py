"""Request bodies: read with a limit, decompressed, decoded by content type, errors in the one shape.

A gzip bomb costs no more memory than the limit.

Every route that takes a body reads it here. Limits and errors are fixed by the HTTP page
(`tests/server/test_bodies.py`).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from collage_monitor import wire
from collage_server.app_state import AppState, app_state_of
from collage_server.errors import BadRequest, Busy, TooLarge, UnsupportedMediaType
from collage_server.ingest.report_checks import LARGE_BYTES, decoded_batch, decoded_message
from collage_server.memory_budget import BodyLease

__all__ = [
    "batch_in",
    "body_lease",
    "content_type_of",
    "decompress",
    "message",
    "read_body",
]

_Message = TypeVar("_Message")
_BODY_BYTES: Final = wire.LIMITS["body_bytes"]
_DECOMPRESSED_BYTES: Final = 64 * 2**20
_JSON_BYTES: Final = 2**20
"""A decoder of JSON holds the interpreter until it is done: tens of milliseconds for so much."""
_JSON_GROWTH: Final = 16
_SCALAR_BYTES: Final = 80
"""What a logged value takes as an object, with its place among the others of its report."""
_PATIENCE_SECONDS: Final = 20.0
_SLOWEST_BYTES_A_SECOND: Final = 100_000
"""Slower bodies are given up, after some patience: one whose sender has died would hold its room for ever."""
_IDENTITY: Final = "identity"
_GZIP: Final = "gzip"
_GZIP_BITS: Final = 31


def content_type_of(request: Request, spoken: Sequence[str] = (wire.MSGPACK, wire.JSON)) -> str:
    """The content type, one of those that are spoken; JSON when none is given.

    Raises:
        UnsupportedMediaType: another type.
    """
    given = _header(request, b"content-type", wire.JSON).partition(";")[0].strip().lower()
    if given not in spoken:
        raise UnsupportedMediaType(
            f"content type {given!r} is not spoken here; send {' or '.join(spoken)}", field="Content-Type"
        )
    return given


def _declared_size(request: Request, limit: int) -> int:
    """The body's size as its header says it, the limit where it does not.

    Raises:
        TooLarge: it says more than the limit.
        BadRequest: it says nonsense.
    """
    text = _header(request, b"content-length", str(limit))
    if not text.isdecimal():
        raise BadRequest(f"Content-Length {text!r} is not a number", field="Content-Length")
    size = int(text)
    if size > limit:
        raise _too_large(limit)
    return size


def _header(request: Request, name: bytes, default: str) -> str:
    """A header, from the dictionary that every request brings along."""
    value: bytes | None = request.scope["state"]["headers"].get(name)
    return default if value is None else value.decode("latin-1")


def body_lease(request: Request, app_state: AppState, content_type: str) -> AbstractContextManager[BodyLease]:
    """Room for this request's body in the budget of bytes in flight, while the context lasts.

    It grows with the bytes that come: a declared size takes nothing from others.

    Raises:
        TooLarge: the body says that it is larger than its limit.
        Busy: whole bodies that wait leave no room for it.
    """
    limit = _limit(content_type)
    declared = _declared_size(request, limit)
    app_state.memory.bodies.admit(0 if _header(request, b"content-length", "") == "" else declared)
    state = request.scope["state"]
    holders = [f"token {state['principal'].actor}"]
    if state.get("project") is not None:
        holders.append(f"project {state['project']}")
    return app_state.memory.bodies.receive(holders)


async def read_body(request: Request, held: BodyLease, content_type: str) -> bytes | bytearray:
    """The whole body, decompressed, refused as soon as it grows beyond its limit.

    `held` grows to the memory that decoding may take: in JSON, a number of two characters becomes an object of 32
    bytes.

    Raises:
        TooLarge: more than 16 MiB, or 64 MiB once decompressed; of JSON, than 1 MiB.
        BadRequest: not what its Content-Encoding says.
        UnsupportedMediaType: an encoding that is not spoken here.
        Busy: the body stopped arriving; decompressed it does not fit beside what is in flight.
    """
    is_json = content_type != wire.MSGPACK
    packed = _is_packed(_header(request, b"content-encoding", _IDENTITY))
    limit = _limit(content_type)
    body: bytes | bytearray = await _read_sent(request, held, limit)
    if packed:
        limit = limit if is_json else _DECOMPRESSED_BYTES
        held.resize(len(body) + limit)
        body = await run_in_threadpool(decompress, body, limit)
    held.resize(len(body) * (_JSON_GROWTH if is_json else 1))
    return body


async def _read_sent(request: Request, held: BodyLease, limit: int) -> bytearray:
    """The bytes of a body as long as they keep arriving; arrived bytes extend the time for the next ones."""
    body = bytearray()
    began = asyncio.get_running_loop().time()
    seconds = _PATIENCE_SECONDS
    try:
        async with asyncio.timeout_at(began + seconds) as deadline:
            async for part in request.stream():
                if not part:
                    continue
                if len(body) + len(part) > limit:
                    raise _too_large(limit)
                held.arrive(len(part))
                body += part
                if (earned := _PATIENCE_SECONDS + len(body) // _SLOWEST_BYTES_A_SECOND) > seconds:
                    seconds = earned
                    deadline.reschedule(began + seconds)
    except TimeoutError as error:
        raise Busy(
            f"the body did not arrive within {seconds:.0f} seconds ({len(body)} bytes did); send it again, faster "
            f"than {_SLOWEST_BYTES_A_SECOND} bytes a second",
            retry_after_seconds=1,
        ) from error
    return body


def _limit(content_type: str) -> int:
    """The most bytes of a body of this type; what else is spoken is decoded as slowly as JSON."""
    return _BODY_BYTES if content_type == wire.MSGPACK else _JSON_BYTES


def _too_large(limit: int, after: str = "") -> TooLarge:
    way = f"; of JSON at most {_JSON_BYTES} are taken: send {wire.MSGPACK}" if limit == _JSON_BYTES else ""
    return TooLarge(
        f"the body is larger than {limit} bytes{after}{way or '; send it in smaller batches'}",
        field="body",
        limit=limit,
    )


async def message(request: Request, kind: type[_Message]) -> _Message:
    """The message in the body.

    Raises:
        BadRequest: not decodable at all.
        Unprocessable: decodable, but a field is of a wrong type or beyond its bound.
    """
    app_state, content_type = app_state_of(request), content_type_of(request)
    limit = wire.LIMITS["config_bytes"]
    with body_lease(request, app_state, content_type) as held:
        data = await read_body(request, held, content_type)
        if kind is wire.RunCreate:
            # Its configuration is small and may hold what msgpack cannot.
            if len(data) > limit:
                raise TooLarge(f"a run's description is larger than {limit} bytes", field="config", limit=limit)
            return await run_in_threadpool(decoded_message, data, kind, content_type)
        if len(data) > LARGE_BYTES:
            return await run_in_threadpool(decoded_message, data, kind, content_type)
        return decoded_message(data, kind, content_type)


async def batch_in(
    app_state: AppState, data: bytes | bytearray, content_type: str, held: BodyLease
) -> tuple[wire.ReportBatch, list[wire.RejectedReport]]:
    """The batch in a body, and its reports that cannot be decoded; a large one is not decoded on the event loop.

    Large ones are decoded one at a time: `held` grows by each report's size as objects before the next one begins.

    Raises:
        BadRequest, Unprocessable: no report can be decoded.
        TooLarge: more reports or gaps than one batch may hold.
        Busy: it does not fit beside what is in flight.
    """
    if len(data) <= LARGE_BYTES:
        return decoded_batch(data, content_type)
    async with app_state.decoding:
        batch, refused = await run_in_threadpool(decoded_batch, data, content_type)
        scalars = sum(len(report.scalars) for report in batch.reports)
        held.resize(max(held.size, len(data) + _SCALAR_BYTES * scalars))
    return batch, refused


def _is_packed(header: str) -> bool:
    """Whether a Content-Encoding header names gzip.

    Raises:
        UnsupportedMediaType: another encoding, or several.
    """
    encoding = header.strip().lower()
    if encoding not in (_IDENTITY, _GZIP):
        raise UnsupportedMediaType(
            f"content encoding {header!r} is not spoken here; send {_GZIP} or the body plain",
            field="Content-Encoding",
        )
    return encoding == _GZIP


def decompress(body: bytes | bytearray, limit: int) -> bytes:
    """The bytes behind a body in gzip; takes no more memory than about twice `limit`.

    Raises:
        TooLarge: there are more than `limit`.
        BadRequest: not one whole gzip member.
    """
    stream = zlib.decompressobj(_GZIP_BITS)
    try:
        data = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise _undecodable(str(error)) from error
    if len(data) > limit:
        raise _too_large(limit, " once decompressed")
    if not stream.eof or stream.unused_data:
        raise _undecodable("the body is cut off, or something follows it")
    return data


def _undecodable(reason: str) -> BadRequest:
    return BadRequest(f"the body is not gzip as Content-Encoding says: {reason}", field="body")
