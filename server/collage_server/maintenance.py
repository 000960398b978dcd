"""Maintenance: a thread that expires, purges, gives space back, and watches what is left of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from collage_server.background import Background
from collage_server.disk import DiskGuard
from collage_server.errors import Gone, NotFound
from collage_server.store import EventStore, NewEvent, Retention

__all__ = ["Maintainable", "Maintenance"]

_LOG: Final = logging.getLogger(__name__)
_SLICES: Final = 16
_PAUSE_SECONDS: Final = 0.02
_DAY_SECONDS: Final = 86_400.0


class Maintainable(Protocol):
    """What maintenance needs of a store."""

    @property
    def retention(self) -> Retention:
        """Old points and deleted runs."""

    @property
    def events(self) -> EventStore:
        """What happened to runs."""

    def fold_log(self) -> None:
        """Keep the database's log short, whoever reads."""

    def return_space(self) -> bool:
        """Give a slice of free space back to the disk; True if there is more."""


class Maintenance(Background):
    """Looks at the disk every `disk_seconds`, however long a round takes, at the rest every `interval_seconds`.

    `days` maps a level (measured points a stored point merges) to how long it is kept.
    """

    def __init__(
        self,
        store: Maintainable,
        guard: DiskGuard,
        *,
        clock: Callable[[], float],
        days: Mapping[int, float],
        interval_seconds: float = 60.0,
        disk_seconds: float = 2.0,
    ) -> None:
        super().__init__("maintenance", interval_seconds=disk_seconds)
        self._store = store
        self._guard = guard
        self._clock = clock
        self._days = days
        self._disk_seconds = disk_seconds
        self._disk_due = time.monotonic()
        self._round_seconds = interval_seconds
        self._round_due = time.monotonic()

    def start(self) -> None:
        """Look at the disk before the first report comes, then start the thread."""
        self.attempt(self._guard.look)
        super().start()

    def look(self) -> None:
        """Look at the disk, and go a round if one is due."""
        self._watch_disk()
        if time.monotonic() >= self._round_due:
            self.attempt(self.once)
            self._round_due = time.monotonic() + self._round_seconds

    def once(self) -> None:
        """One round: expire, purge, give space back. A pause after each slice lets others write."""
        for run_id in self._store.retention.sealed_runs() if self._days else ():
            if self.stopping.is_set():
                return
            self._watch_disk()
            now = self._clock()
            try:
                gone = self._store.retention.expire(
                    run_id, {level: now - days * _DAY_SECONDS for level, days in self._days.items()}
                )
                if gone:
                    _LOG.info("retention: %d levels of chunks of run %s left", gone, run_id)
                    self._tell(run_id, gone, now)
            except (Gone, NotFound):
                continue
            except Exception:
                _LOG.exception("retention of run %s failed; the next round tries again, the others go on", run_id)
        self._repeat(lambda: self._store.retention.purge(_SLICES))
        self._repeat(self._store.return_space)

    def _tell(self, run_id: str, gone: int, now: float) -> None:
        text = f"retention took fine points of {gone} stretch{'es' if gone > 1 else ''} of steps; coarser ones stay"
        self._store.events.add(run_id, [NewEvent(origin=f"retention/{now}", kind="retention", text=text)], now)

    def _repeat(self, work: Callable[[], bool]) -> None:
        while not self.stopping.is_set() and work():
            self._watch_disk()
            self.stopping.wait(_PAUSE_SECONDS)

    def _watch_disk(self) -> None:
        if time.monotonic() >= self._disk_due:
            self.attempt(self._guard.look)
            self.attempt(self._store.fold_log)
            self._disk_due = time.monotonic() + self._disk_seconds
