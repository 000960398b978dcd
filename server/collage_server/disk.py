"""The disk budget: reports are refused before the disk is full, and everything that is there can still be read."""

from __future__ import annotations

import logging
from typing import Final, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from collage_server.errors import Busy
from collage_server.failures import error_of
from collage_server.store import Sizes

__all__ = ["DiskGuard", "Measurable", "ReadOnlyGate"]

_LOG: Final = logging.getLogger(__name__)
_BACK: Final = 0.95
"""Writing begins again below this share of the budget, or above the reserve divided by it: no flutter."""
_RETRY_SECONDS: Final = 30
_WRITES: Final = ("/runs", "/attempts", "/streams", "/reports")


class Measurable(Protocol):
    """What the guard needs of a store."""

    def sizes(self) -> Sizes:
        """How much space there is."""


class DiskGuard:
    """Knows whether reports may be stored. `look` is called from time to time, `reason` from any thread.

    `budget_bytes` bounds the data (None: no bound), `reserve_bytes` must stay free on the disk of an SQLite file.
    """

    def __init__(self, store: Measurable, *, budget_bytes: int | None, reserve_bytes: int) -> None:
        self._store = store
        self._budget_bytes = budget_bytes
        self._reserve_bytes = reserve_bytes
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why nothing may be stored now; None: it may."""
        return self._reason

    def look(self) -> None:
        """Measure, and decide anew."""
        known, self._reason = self._reason, self._judge(self._store.sizes())
        if (known is None) != (self._reason is None):
            _LOG.warning("read-only: %s", self._reason) if self._reason else _LOG.warning("no longer read-only")

    def _judge(self, sizes: Sizes) -> str | None:
        strict = 1.0 if self._reason is None else _BACK
        if self._budget_bytes is not None and sizes.used_bytes > strict * self._budget_bytes:
            # A cluster's files keep the space of deleted rows for new ones.
            then = "" if sizes.free_bytes is not None else ", then VACUUM FULL,"
            return (
                f"the data takes {sizes.used_bytes} bytes, its budget is {self._budget_bytes}; "
                f"delete runs or shorten the retention{then} or raise COLLAGE_SERVER_DISK_BUDGET_BYTES"
            )
        if sizes.free_bytes is not None and sizes.free_bytes < self._reserve_bytes / strict:
            return (
                f"the disk has {sizes.free_bytes} bytes left, {self._reserve_bytes} are kept free; "
                "make room, or lower COLLAGE_SERVER_DISK_RESERVE_BYTES"
            )
        return None


class ReadOnlyGate:
    """While the guard has a reason, answers 503 to all that would store something new; deleting is allowed."""

    def __init__(self, app: ASGIApp, guard: DiskGuard) -> None:
        self.app = app
        self.guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self.guard.reason
        if reason is None or scope["type"] != "http" or not _stores(scope):
            await self.app(scope, receive, send)
            return
        busy = Busy(f"read-only: {reason}; send this again later", retry_after_seconds=_RETRY_SECONDS)
        await error_of(busy, scope.get("state", {}).get("request_id"))(scope, receive, send)


def _stores(scope: Scope) -> bool:
    return scope["method"] == "POST" and str(scope["path"]).endswith(_WRITES)
