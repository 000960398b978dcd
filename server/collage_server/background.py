"""Work in the background: threads that check, once an interval, whether there is something to do.

The sealer turns journals into chunks; maintenance expires, purges, frees space, and watches the free space.

`create_app` makes the threads. New work derives from `BackgroundThread`. Stopping is quick
(`tests/server/test_process.py`).
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from threading import Event, Thread
from typing import Final

from collage_server.clock import DatabaseClock
from collage_server.disk_guard import DiskGuard
from collage_server.errors import Busy, DatabaseAway, Gone, NotFound
from collage_server.ingest.writer import JournalBounds
from collage_server.memory_budget import MemoryBudget, Owner
from collage_server.store import NewEvent, Store

__all__ = ["BackgroundThread", "Maintenance", "Sealer"]

_LOG: Final = logging.getLogger(__name__)
_SLICES: Final = 16
_PAUSE_SECONDS: Final = 0.02
_DAY_SECONDS: Final = 86_400.0
_SILENT_SECONDS: Final = 60.0
"""A thread logs "busy" at most this often."""
_CHECK_SECONDS: Final = 60.0
"""From the start to the first check of the database."""
_OWED_DAYS: Final = 2.0
"""Messages about incidents are given up earlier than this."""


class BackgroundThread(ABC):
    """A daemon thread that runs `do_due_work` every `interval_seconds`; it logs a failure and goes on.

    It may be stopped at any point without harm: `do_due_work` checks `stopping` between slices of its work.
    """

    def __init__(
        self,
        name: str,
        *,
        interval_seconds: float,
        memory: MemoryBudget | None = None,
        owner: Owner = "evaluations",
    ) -> None:
        self.stopping = Event()
        self._woken = Event()
        self._name = name
        self._interval_seconds = interval_seconds
        self._memory, self._owner = memory, owner
        self._thread: Thread | None = None
        self._silent_until = 0.0

    @abstractmethod
    def do_due_work(self) -> None:
        """Do the due work."""

    def start(self) -> None:
        """Start the thread."""
        self.stopping.clear()
        self._thread = Thread(target=self._run, name=f"collage-{self._name}", daemon=True)
        self._thread.start()

    def stop(self, deadline_seconds: float) -> None:
        """Stop after the current slice of work, or leave it unfinished at the deadline."""
        self.stopping.set()
        self.wake()
        if self._thread is not None:
            self._thread.join(deadline_seconds)
            self._thread = None

    def wake(self) -> None:
        """Look for work now, without waiting for the interval to end."""
        self._woken.set()

    def attempt(self, work: Callable[[], object]) -> None:
        """Do the work; log an exception instead of raising it."""
        try:
            work()
        except Exception as error:
            self.log_failure(error, f"{self._name} failed; the next round tries again")

    def log_failure(self, error: Exception, message: str) -> None:
        """Log an error with its traceback; if memory is only busy, log one line, once a minute.

        That the database is away is told by its own state, once for all threads.
        """
        if isinstance(error, DatabaseAway):
            return
        if not isinstance(error, Busy):
            _LOG.error(message, exc_info=error)
        elif time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + _SILENT_SECONDS
            _LOG.warning("%s: %s", message, error.message)

    def _run(self) -> None:
        while not self.stopping.is_set():
            self._woken.wait(self._interval_seconds)
            self._woken.clear()
            if not self.stopping.is_set():
                with nullcontext() if self._memory is None else self._memory.lease(self._owner):
                    self.attempt(self.do_due_work)


class Sealer(BackgroundThread):
    """Calls `seal` for every run that is `waiting`, once an interval and when the journal is half full.

    After each seal that sealed something, `sealed` is called with the run.
    """

    def __init__(
        self,
        waiting: Callable[[], list[str]],
        seal: Callable[..., int],
        bytes_of: Callable[[str], int],
        bounds: JournalBounds,
        *,
        clock: Callable[[], float],
        interval_seconds: float,
        sealed: Callable[[str], None] = lambda _: None,
        memory: MemoryBudget | None = None,
    ) -> None:
        super().__init__("sealer", interval_seconds=interval_seconds, memory=memory, owner="sealing")
        self._sealed = sealed
        self._waiting = waiting
        self._seal = seal
        self._bytes_of = bytes_of
        self._bounds = bounds
        self._clock = clock
        bounds.on_pressure = self.wake
        self.round_at: float | None = None
        """When the last round ended."""

    def do_due_work(self) -> None:
        """Seal the due reports of every run; a failure in one does not stop the others."""
        waiting = self._waiting()
        for run_id in waiting:
            try:
                self._seal_run(run_id)
            except (Gone, NotFound):
                continue
            except Exception as error:
                self.log_failure(
                    error, f"run {run_id} cannot be sealed; its journal keeps everything, the others go on"
                )
        for run_id in {*waiting, *self._bounds.waiting()}:
            if self._bounds.needs_count(run_id):
                self._bounds.count(run_id, self._bytes_of(run_id))
        self._bounds.end_round()
        self.round_at = self._clock()

    def _seal_run(self, run_id: str) -> None:
        journal_full = self._bounds.must_seal(run_id)
        while not self.stopping.is_set() and self._seal(run_id, self._clock(), journal_full=journal_full):
            self._sealed(run_id)


class Maintenance(BackgroundThread):
    """Checks the disk every `disk_seconds`, even during a round; begins a round every `interval_seconds`.

    days: how long points of each level (measured points merged into one) are kept. event_days: the same for events
    and ended incidents; audit_days: for the audit log. None keeps them for good.
    """

    def __init__(
        self,
        store: Store,
        guard: DiskGuard,
        *,
        clock: Callable[[], float],
        days: Mapping[int, float],
        event_days: float | None = None,
        audit_days: float | None = None,
        interval_seconds: float = 60.0,
        disk_seconds: float = 2.0,
    ) -> None:
        super().__init__("maintenance", interval_seconds=disk_seconds)
        self._store = store
        self._guard = guard
        self._clock = clock
        self._days = days
        self._event_days = event_days
        self._audit_days = audit_days
        self._disk_seconds = disk_seconds
        self._disk_due = time.monotonic()
        self._round_seconds = interval_seconds
        self._round_due = time.monotonic()
        self.oldest_unsealed: float | None = None
        """When the oldest report that waits to be sealed was made, as of the last round; None: none waits."""
        self._check_due = time.monotonic() + _CHECK_SECONDS
        self.damaged_rows: int | None = None
        """Of the database, when it was last checked; None before, and where it checks itself."""

    def start(self) -> None:
        """Check the disk before the first report comes, then start the thread."""
        self.attempt(self._guard.check_sizes)
        super().start()

    def do_due_work(self) -> None:
        """Check the disk, and run a round if one is due."""
        self._watch_disk()
        if time.monotonic() >= self._round_due:
            self.attempt(self.once)
            self._round_due = time.monotonic() + self._round_seconds

    def set_clock(self) -> None:
        """Follow the database's clock; at each start, correct times that a fast clock has set."""
        if isinstance(self._clock, DatabaseClock):
            self._clock.follow()
        brought_back = self._store.runs.bring_back(self._clock())
        if brought_back:
            _LOG.warning(
                "%d runs had signs of life in the future: a clock was ahead; they count as of now", brought_back
            )

    def once(self) -> None:
        """Run one round: expire, purge, give space back. A pause after each slice lets others write."""
        if isinstance(self._clock, DatabaseClock):
            self.attempt(self._clock.follow)
        self.attempt(self._check_database)
        self._store.incidents.end_silences(self._clock())
        self.oldest_unsealed = self._store.journal.oldest_time()
        self._expire_points()
        if self._event_days is not None:
            now = self._clock()
            before, owed_before = now - self._event_days * _DAY_SECONDS, now - _OWED_DAYS * _DAY_SECONDS
            self._repeat(lambda: self._store.expiry.expire(before, owed_before) > 0)
        if self._audit_days is not None:
            audit_before = self._clock() - self._audit_days * _DAY_SECONDS
            self._repeat(lambda: self._store.expiry.expire_audit_log(audit_before) > 0)
        self._store.runs.end_undo(self._clock())
        self._repeat(lambda: self._store.retention.purge(_SLICES))
        self._repeat(self._store.release_space)

    def _check_database(self) -> None:
        """Soon after the start and once a day."""
        if time.monotonic() >= self._check_due:
            self._check_due = time.monotonic() + _DAY_SECONDS
            checked = self._store.check_database(self._goes_on)
            self.damaged_rows = None if checked is None else len(checked.damaged)

    def _expire_points(self) -> None:
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
                    _LOG.info("retention dropped %d chunk levels of run %s", gone, run_id)
                    self._record_event(run_id, gone, now)
            except (Gone, NotFound):
                continue
            except Exception as error:
                self.log_failure(
                    error, f"retention of run {run_id} failed; the next round tries again, the others go on"
                )

    def _record_event(self, run_id: str, gone: int, now: float) -> None:
        levels = f"{gone} chunk level{'s' if gone > 1 else ''}"
        text = f"retention dropped {levels} (points of 1 or 16 measured steps); coarser points stay"
        self._store.events.add(run_id, [NewEvent(origin=f"retention/{now}", kind="retention", text=text)], now)

    def _repeat(self, work: Callable[[], bool]) -> None:
        while not self.stopping.is_set() and work():
            self._goes_on()

    def _goes_on(self) -> bool:
        self._watch_disk()
        return not self.stopping.wait(_PAUSE_SECONDS)

    def _watch_disk(self) -> None:
        if time.monotonic() >= self._disk_due:
            self.attempt(self._guard.check_sizes)
            self.attempt(lambda: self._store.checkpoint_log(read_only=self._guard.reason is not None))
            self.attempt(self._store.keep_room)
            self._disk_due = time.monotonic() + self._disk_seconds
