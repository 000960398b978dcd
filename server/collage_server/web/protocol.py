"""HTTP as uvicorn speaks it, but an answer's head leaves together with what follows it, in one write.

Two writes are two packets, and wake the client twice: that costs both sides more than to make a small answer.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["OneWriteProtocol"]

_HEAD: Final = b"HTTP/1.1 "
_GO_ON: Final = b"HTTP/1.1 100"


class OneWriteProtocol(HttpToolsProtocol):
    """A connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Speak to a transport that joins writes."""
        self._joining = _Joining(transport)
        super().connection_made(self._joining)

    def on_response_complete(self) -> None:
        """An answer without a body has left by now, too."""
        self._joining.flush()
        super().on_response_complete()


class _Joining(asyncio.Transport):
    """A transport that holds the head of an answer back until the next write."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._head = b""
        for name in ("get_extra_info", "is_closing", "pause_reading", "resume_reading"):
            setattr(self, name, getattr(transport, name))

    def write(self, data: Any) -> None:
        """Send, after the head that waits; keep the head of an answer."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data.startswith(_HEAD) and not data.startswith(_GO_ON):
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send what waits."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        """Send what waits, then close."""
        self.flush()
        self._transport.close()
