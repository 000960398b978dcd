"""The disk budget: reports are refused before the disk is full, and all existing data can still be read.

Maintenance measures, and middleware refuses requests that would store (`ReadOnlyGate`): reports, never questions
(`tests/server/life/test_maintenance.py`).
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from threading import Lock
from typing import Final

from collage_server.errors import Busy, StoreUnusable
from collage_server.store import Sizes, Store

__all__ = ["DiskGuard"]

_LOG: Final = logging.getLogger(__name__)
_BACK: Final = 0.95
"""Writing begins again below this share of the budget, or above the reserve divided by it: no flutter."""
_WRITTEN: Final = 2
"""How often a report's bytes are written: to the log, and from there to the file."""
_RETRY_SECONDS: Final = 30


class DiskGuard:
    """Decides whether reports may be stored. Any thread may ask; `check_sizes` is called from time to time.

    `budget_bytes` bounds the data (None: no bound), `reserve_bytes` must stay free on the disk of an SQLite file.
    """

    def __init__(self, store: Store, *, budget_bytes: int | None, reserve_bytes: int) -> None:
        self._store = store
        self._budget_bytes = budget_bytes
        self._reserve_bytes = reserve_bytes
        self._reason: str | None = None
        self._left_ratio: float | None = None
        self._archived_bytes = 0
        self._room_bytes = 0.0
        self._may_seal = True
        self._lock = Lock()

    @property
    def left_ratio(self) -> float | None:
        """Share of the room for data that is left, on the disk or in the budget; None: neither is known."""
        return self._left_ratio

    @property
    def archived_bytes(self) -> int:
        """The size of all archived files at the last look."""
        return self._archived_bytes

    @property
    def reason(self) -> str | None:
        """Why nothing may be stored now; None: it may."""
        return self._reason

    @property
    def may_seal(self) -> bool:
        """Whether reports may become chunks: never from the reserve, because such work takes space before it frees
        some."""
        return self._may_seal

    def require_room(self) -> None:
        """Raise while nothing may be stored.

        Raises:
            Busy: the server reads only.
        """
        if self._reason is not None:
            raise Busy(f"read-only: {self._reason}; send this again later", retry_after_seconds=_RETRY_SECONDS)

    def admit(self, size: int) -> None:
        """Admit a commit of `size` bytes. The measured free space is counted down, and measured again once it is
        used up.

        Raises:
            Busy: the server reads only, from now on if this commit does not fit.
        """
        self.require_room()
        with self._lock:
            self._room_bytes -= _WRITTEN * size
            short = self._room_bytes < 0
        if short:
            self.check_sizes(_WRITTEN * size)
            self.require_room()

    def check_sizes(self, coming_bytes: int = 0) -> None:
        """Measure the disk, and decide again whether it has room for reports, after `coming_bytes` more."""
        with self._lock:
            known, self._reason = self._reason, self._measured(coming_bytes)
        if (known is None) != (self._reason is None):
            _LOG.warning("read-only: %s", self._reason) if self._reason else _LOG.warning("no longer read-only")

    def _measured(self, coming_bytes: int) -> str | None:
        try:
            sizes = self._store.sizes()
        except StoreUnusable as error:
            return error.message
        used = sizes.used_bytes + sizes.archived_bytes
        self._archived_bytes = sizes.archived_bytes
        self._left_ratio = self._left(sizes, used)
        budget = math.inf if self._budget_bytes is None else self._budget_bytes - used
        free = math.inf if sizes.free_bytes is None else sizes.free_bytes - self._reserve_bytes
        self._room_bytes = min(budget, free) - coming_bytes
        self._may_seal = free >= 0
        return self._reason_for(replace(sizes, used_bytes=used), coming_bytes)

    def _left(self, sizes: Sizes, used_bytes: int) -> float | None:
        """`used_bytes`: with archived files, which may lie elsewhere; the budget counts them, the disk does not."""
        rooms = [] if self._budget_bytes is None else [(self._budget_bytes - used_bytes, self._budget_bytes)]
        if sizes.free_bytes is not None:
            free = sizes.free_bytes - self._reserve_bytes
            rooms.append((free, free + sizes.used_bytes))
        return min((max(left, 0) / room if room > 0 else 0.0 for left, room in rooms), default=None)

    def _reason_for(self, sizes: Sizes, coming_bytes: int) -> str | None:
        strict = 1.0 if self._reason is None else _BACK
        if self._budget_bytes is not None and sizes.used_bytes + coming_bytes > strict * self._budget_bytes:
            # A cluster's files keep the space of deleted rows for new ones.
            then = "" if sizes.free_bytes is not None else ", then VACUUM FULL,"
            return (
                f"the data takes {sizes.used_bytes} bytes, its budget is {self._budget_bytes}; "
                f"delete runs or shorten the retention{then} or raise COLLAGE_SERVER_DISK_BUDGET_BYTES"
            )
        if sizes.free_bytes is not None and sizes.free_bytes - coming_bytes < self._reserve_bytes / strict:
            return (
                f"the disk has {sizes.free_bytes} bytes left, {self._reserve_bytes} are kept free; "
                "make room, or lower COLLAGE_SERVER_DISK_RESERVE_BYTES"
            )
        return None
