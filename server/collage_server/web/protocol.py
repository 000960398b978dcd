"""One connection: limits on unanswered requests and on time, and which connection is closed when all are in use.

uvicorn bounds none of these: heads and trailers of any size and age are kept, and any number of requests that wait
behind another; its limit of connections refuses the new one and keeps the silent ones.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from asyncio import TimerHandle, Transport
from collections.abc import Sized
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, NoReturn

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from collage_server.errors import BadRequest, Busy, HeadTooLarge, ServerError
from collage_server.logs import REQUEST_ID
from collage_server.web.failures import answer_to

__all__ = ["BoundedProtocol", "ConnectionLimits"]

_LOG: Final = logging.getLogger("collage_server.requests")
_MOST_HEADERS: Final = 100
"""Many small headers take ten times the memory of their bytes."""
_MOST_WAITING: Final = 16
"""Requests that wait behind another take 2.5 KiB each, whatever they are; one read may bring 10,000."""
_READER_SECONDS: Final = 60.0
"""Who takes nothing of an answer for so long is gone."""


@dataclass(frozen=True)
class ConnectionLimits:
    """head_bytes: of request line, headers and trailers. idle_seconds: to wait for a head. connections: at once."""

    idle_seconds: float
    connections: int
    head_bytes: int = 64 * 2**10


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within `ConnectionLimits`.

    When all connections are taken, it closes the longest silent one that waits for its client. Input that is not
    HTTP is answered in the one error shape. A request that may not be read any further ends the connection, after
    the answers to those before it.
    """

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.limits = limits
        self.heard_at = self.loop.time()
        self._head_due: TimerHandle | None = None
        self._reader_due: TimerHandle | None = None
        self._parsed_bytes = 0
        self._fed_bytes = 0
        self._in_body = False
        self._fault: ServerError | None = None

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing can happen here before the client sends more."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make room for the connection, and wait for its first head."""
        has_room = len(self.connections) < self.limits.connections or self._evict_one()
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = _PipelineFlow(self.transport, self.pipeline)
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
        """Parse the received bytes; input that is not HTTP, or beyond a limit, ends the connection."""
        if self._fault is not None:
            return
        self.heard_at = self.loop.time()
        self._unset_keepalive_if_required()
        # Count all bytes: the parser's callbacks never see an incomplete name or value.
        self._fed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            # Bytes after an upgrade may be in the other protocol.
            self._refuse(self._fault or _NO_HTTP)
        else:
            if self._fed_bytes > self.limits.head_bytes:
                self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._parsed_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header. A trailer is counted and dropped: what checks headers has read them already."""
        self._count(len(name) + len(value))
        if not self._in_body:
            if len(self.headers) >= _MOST_HEADERS:
                self._stop(self._too_large())
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._stop(_NOT_ONE_HOST)
        if len(self.pipeline) >= _MOST_WAITING:
            self._stop(_TOO_MANY_WAIT)
        self._fed_bytes = 0
        if self._head_due is not None:
            self._head_due.cancel()
        super().on_headers_complete()
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        """The bytes of a body are counted where it is read."""
        self._fed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole, with its trailers."""
        self._in_body, self._fed_bytes = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next head, and for the rest of this request's body, for `idle_seconds`."""
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
        if self._parsed_bytes > self.limits.head_bytes:
            self._stop(self._too_large())

    def _stop(self, fault: ServerError) -> NoReturn:
        """End the parser at once; it reports an error of its own."""
        self._fault = fault
        raise fault

    def _too_large(self) -> HeadTooLarge:
        limit = self.limits.head_bytes
        return HeadTooLarge(
            f"request line, headers and trailers have more than {limit} bytes, or there are more than "
            f"{_MOST_HEADERS} headers; send fewer",
            limit=limit,
        )

    def _evict_one(self) -> bool:
        """Close a connection that waits for its client; False if there is none."""
        waiting = [held for held in self.connections if isinstance(held, BoundedProtocol) and held.waits_for_client]
        if not waiting:
            return False
        silent = min(waiting, key=lambda held: held.heard_at)
        # Its own end comes later: without this, the next eviction would pick it again.
        self.connections.discard(silent)
        silent.transport.abort()
        return True

    def _refuse(self, error: ServerError) -> None:
        """Read no more. The error is written unless an answer is due or begun: it would be taken for that."""
        self._fault = error
        request_id = secrets.token_hex(8)
        REQUEST_ID.set(request_id)
        client = None if self.client is None else self.client[0]
        about = {"status": error.status, "client": client, "reason": error.message}
        _LOG.info("a connection from %(client)s ends with %(status)s: %(reason)s", about, extra=about)
        unanswered = self.cycle is not None and not self.cycle.response_complete
        if unanswered and not self._in_body:
            self.cycle.keep_alive = False
            return
        if not self.pipeline and not (self._in_body and self.cycle.response_started):
            _write(self.transport, error, request_id)
        self.transport.close()


class _PipelineFlow(FlowControl):
    """Reads on once no request waits behind another, so that at most one read waits."""

    def __init__(self, transport: Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


_NO_HTTP: Final = BadRequest("the request is not HTTP/1.1; send one that is")
_NOT_ONE_HOST: Final = BadRequest("a request names one Host; send that header once", field="Host")
_TOO_MANY_WAIT: Final = Busy(
    f"more than {_MOST_WAITING} requests wait for the one before them; send the rest again"
)


def _write(transport: Transport, error: ServerError, request_id: str) -> None:
    """The answer to a request that has no scope."""
    answer = answer_to(error, {"type": "http", "state": {"request_id": request_id}})
    status = HTTPStatus(answer.status_code)
    headers = [*answer.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b"%s: %s" % header for header in headers)]
    transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
