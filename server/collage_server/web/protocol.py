"""One connection: how much of a request's head it may send, how long it may take, and who goes when all are taken.

uvicorn bounds none of these: a head of any size and any age is kept, and its limit of connections refuses the new
one and keeps the silent ones.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from asyncio import TimerHandle, Transport
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from collage_server.errors import BadRequest, Busy, HeadTooLarge, ServerError
from collage_server.logs import REQUEST_ID
from collage_server.web.failures import answer_to

__all__ = ["BoundedProtocol", "ConnectionLimits"]

_LOG: Final = logging.getLogger("collage_server.requests")
_MOST_HEADERS: Final = 100
"""Many small headers take ten times the memory of their bytes."""
_READER_SECONDS: Final = 60.0
"""Who takes nothing of an answer for so long is gone."""


@dataclass(frozen=True)
class ConnectionLimits:
    """`idle_seconds` for a whole head, `connections` open at a time, `head_bytes` of request line and headers."""

    idle_seconds: float
    connections: int
    head_bytes: int = 64 * 2**10


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within `ConnectionLimits`.

    When all connections are taken, the one that has been silent for longest goes, of those that wait for their
    client. What is no HTTP is answered in the one error shape.
    """

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.limits = limits
        self.heard_at = self.loop.time()
        self._head_due: TimerHandle | None = None
        self._reader_due: TimerHandle | None = None
        self._parsed_bytes = 0
        self._fed_bytes = 0
        self._in_head = True
        self._oversized = False

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing can happen here before the client sends more."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make room for the connection, and wait for its first head."""
        has_room = len(self.connections) < self.limits.connections or self._evict_one()
        super().connection_made(transport)  # type: ignore[arg-type]
        if has_room:
            self._await_head()
        else:
            self._refuse(Busy("every connection is in use; connect again later", retry_after_seconds=1))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        for timer in (self._head_due, self._reader_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; what is no HTTP, and a head beyond its size, ends the connection with an answer."""
        self.heard_at = self.loop.time()
        self._unset_keepalive_if_required()
        if self._in_head:
            # A name or value that is not whole yet is in no callback.
            self._fed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return
        except httptools.HttpParserError:
            self._refuse(self._too_large() if self._oversized else _NO_HTTP)
            return
        if self._in_head and self._fed_bytes > self.limits.head_bytes:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._in_head, self._parsed_bytes = True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head, self._fed_bytes = False, 0
        if self._head_due is not None:
            self._head_due.cancel()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Wait for the next head, and for what is left of this request's body, for `idle_seconds`."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._await_head()

    def pause_writing(self) -> None:
        """The client does not read: wait for it, not for ever."""
        super().pause_writing()
        self._reader_due = self.loop.call_later(_READER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads."""
        if self._reader_due is not None:
            self._reader_due.cancel()
        super().resume_writing()

    def _await_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
        self._head_due = self.loop.call_later(self.limits.idle_seconds, self.transport.close)

    def _count(self, size: int) -> None:
        self._parsed_bytes += size
        too_many = self.headers is not None and len(self.headers) >= _MOST_HEADERS
        if too_many or self._parsed_bytes > self.limits.head_bytes:
            self._oversized = True
            raise self._too_large()  # Ends the parser at once; it reports an error of its own.

    def _too_large(self) -> HeadTooLarge:
        limit = self.limits.head_bytes
        return HeadTooLarge(
            f"request line and headers have more than {limit} bytes, or there are more than {_MOST_HEADERS} "
            "headers; send fewer",
            limit=limit,
        )

    def _evict_one(self) -> bool:
        """Whether a connection that waits for its client has given its place."""
        waiting = [held for held in self.connections if isinstance(held, BoundedProtocol) and held.waits_for_client]
        if not waiting:
            return False
        silent = min(waiting, key=lambda held: held.heard_at)
        self.connections.discard(silent)  # Its end is told later: the next in this round takes another place.
        silent.transport.abort()
        return True

    def _refuse(self, error: ServerError) -> None:
        request_id = secrets.token_hex(8)
        REQUEST_ID.set(request_id)
        about = {"status": error.status, "client": None if self.client is None else self.client[0]}
        _LOG.info("a connection from %(client)s ends with %(status)s", about, extra=about)
        _write(self.transport, error, request_id)
        self.transport.close()


_NO_HTTP: Final = BadRequest("the request is not HTTP/1.1; send one that is")


def _write(transport: Transport, error: ServerError, request_id: str) -> None:
    """The answer to a request that has no scope."""
    answer = answer_to(error, {"type": "http", "state": {"request_id": request_id}})
    status = HTTPStatus(answer.status_code)
    headers = [*answer.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b"%s: %s" % header for header in headers)]
    transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
