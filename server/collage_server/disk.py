"""The disk budget: reports are refused before the disk is full, and everything that is there can still be read."""

from __future__ import annotations

import logging
from typing import Final

from collage_server.errors import StoreUnusable
from collage_server.store import Sizes, Store

__all__ = ["DiskGuard"]

_LOG: Final = logging.getLogger(__name__)
_BACK: Final = 0.95
"""Writing begins again below this share of the budget, or above the reserve divided by it: no flutter."""


class DiskGuard:
    """Decides whether reports may be stored. `check_sizes` is called from time to time, `reason` from any thread.

    `budget_bytes` bounds the data (None: no bound), `reserve_bytes` must stay free on the disk of an SQLite file.
    """

    def __init__(self, store: Store, *, budget_bytes: int | None, reserve_bytes: int) -> None:
        self._store = store
        self._budget_bytes = budget_bytes
        self._reserve_bytes = reserve_bytes
        self._reason: str | None = None
        self._left_ratio: float | None = None

    @property
    def left_ratio(self) -> float | None:
        """Share of the room for data that is left, beside the data or in its budget; None: neither is known."""
        return self._left_ratio

    @property
    def reason(self) -> str | None:
        """Why nothing may be stored now; None: it may."""
        return self._reason

    def check_sizes(self) -> None:
        """Measure the disk, and decide again whether reports may be stored."""
        known, self._reason = self._reason, self._measured()
        if (known is None) != (self._reason is None):
            _LOG.warning("read-only: %s", self._reason) if self._reason else _LOG.warning("no longer read-only")

    def _measured(self) -> str | None:
        try:
            sizes = self._store.sizes()
            self._left_ratio = self._left(sizes)
            return self._judge(sizes)
        except StoreUnusable as error:
            return error.message

    def _left(self, sizes: Sizes) -> float | None:
        rooms = [] if self._budget_bytes is None else [(self._budget_bytes - sizes.used_bytes, self._budget_bytes)]
        if sizes.free_bytes is not None:
            free = sizes.free_bytes - self._reserve_bytes
            rooms.append((free, free + sizes.used_bytes))
        return min((max(left, 0) / room if room > 0 else 0.0 for left, room in rooms), default=None)

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
