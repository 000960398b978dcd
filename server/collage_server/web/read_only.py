"""Read-only mode: while the disk guard has a reason, what would store something new is answered 503."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from collage_server.disk import DiskGuard
from collage_server.errors import Busy

__all__ = ["ReadOnlyGate"]

_RETRY_SECONDS: Final = 30
_WRITES: Final = ("/runs", "/attempts", "/streams", "/reports")


class ReadOnlyGate:
    """While the guard has a reason, refuses all that would store something new; deleting is allowed."""

    def __init__(self, app: ASGIApp, guard: DiskGuard) -> None:
        self.app = app
        self.guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self.guard.reason
        if reason is not None and scope["type"] == "http" and _stores(scope):
            raise Busy(f"read-only: {reason}; send this again later", retry_after_seconds=_RETRY_SECONDS)
        await self.app(scope, receive, send)


def _stores(scope: Scope) -> bool:
    return scope["method"] == "POST" and str(scope["path"]).endswith(_WRITES)
