"""Back-pressure: limits what is accepted, so that nothing waits for long. Beyond them agents keep their reports.

Bounded are request bodies that are read but not yet answered, and what waits in the journal to be sealed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import Final

from collage_server.errors import Busy, JournalFull

__all__ = ["BudgetLease", "InFlightBudget", "JournalBounds"]

_LEAST: Final = 2**20
_CUT: Final = 0.7
_GROWTH: Final = 0.1
_RETRY_AFTER_SECONDS: Final = 2


class InFlightBudget:
    """A budget of bytes; used on the event loop only, so without a lock.

    At most `limit`, and at any moment `allowed`: less when reports have lately waited longer than `wait_seconds`
    for their commit, whatever the reason, and more again as they do not. It falls by a share, and grows by a share
    of what is acknowledged in time.
    """

    def __init__(
        self, limit: int, *, wait_seconds: float = 0.25, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.allowed = limit
        self.bytes = 0
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._next_cut = -math.inf

    def waited(self, seconds: float, size: int) -> None:
        """Adjust the budget by how long a body waited for its acknowledgement; its bytes are still counted."""
        if seconds <= self._wait_seconds:
            self.allowed = min(self.limit, self.allowed + int(_GROWTH * size))
        elif self._clock() >= self._next_cut:
            # Bodies in flight now were admitted before this cut: their waits do not measure it.
            self._next_cut = self._clock() + seconds
            self.allowed = min(self.limit, max(_LEAST, int(_CUT * min(self.allowed, self.bytes))))

    def hold(self, size: int) -> BudgetLease:
        """Take `size` bytes from the budget while the context that is entered lasts.

        A single body always passes when nothing else is in flight, however small the budget.

        Raises:
            Busy: they do not fit (on entering).
        """
        return BudgetLease(self, size)


class BudgetLease:
    """One request's part of the budget."""

    def __init__(self, budget: InFlightBudget, asked: int) -> None:
        self.size = 0
        self._budget = budget
        self._asked = asked

    def __enter__(self) -> BudgetLease:
        self.resize(self._asked)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.bytes -= self.size

    def resize(self, size: int) -> None:
        """Hold so many bytes from now on.

        Raises:
            Busy: they do not fit beside what others hold.
        """
        others = self._budget.bytes - self.size
        if size > self.size and others and others + size > self._budget.allowed:
            raise Busy(
                f"{others} bytes of other bodies are in flight, at most {self._budget.allowed} in all now; "
                "send this one again later",
                limit=self._budget.allowed,
                retry_after_seconds=1,
            )
        self._budget.bytes = others + size
        self.size = size


class JournalBounds:
    """Bytes of unsealed reports by run, as far as this server knows, counted as `REPORT_BYTES` does. Thread-safe.

    Each server bounds what it accepts itself. What others accept or seal in the same database it learns when the
    sealer counts, once half of a bound is reached. `on_pressure` is called then, so that sealing starts at once.
    """

    def __init__(self, run_bytes: int, all_bytes: int) -> None:
        self.on_pressure: Callable[[], None] = lambda: None
        self._run_bytes = run_bytes
        self._all_bytes = all_bytes
        self._held: dict[str, int] = {}
        self._total = 0
        self._counted: set[str] = set()
        self._refused: set[str] = set()
        self._crowded = False
        self._lock = Lock()

    def admit(self, run_id: str, size: int) -> None:
        """Admit reports of `size` bytes. An empty journal admits anything, however large.

        Raises:
            JournalFull: there is no room beside what waits; all of it is sealed now.
        """
        with self._lock:
            held, total = self._held.get(run_id, 0), self._total
            of_run = held > 0 and held + size > self._run_bytes
            of_all = total > 0 and total + size > self._all_bytes
            if of_run:
                self._refused.add(run_id)
            elif of_all:
                self._crowded = True
            else:
                self._put(run_id, held + size)
            pressed = of_all or self._must_seal(run_id)
        if pressed:
            self.on_pressure()
        if of_run or of_all:
            whose, waits, limit = (
                ("this run", held, self._run_bytes) if of_run else ("all runs", total, self._all_bytes)
            )
            raise JournalFull(
                f"{waits} bytes of {whose} wait to be sealed, at most {limit}; send these reports again later",
                limit=limit,
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )

    def must_seal(self, run_id: str) -> bool:
        """Whether to seal the run now, without waiting for missing ranks: a bound is reached, or soon will be."""
        with self._lock:
            return self._must_seal(run_id)

    def needs_count(self, run_id: str) -> bool:
        """Whether to count the run in the database: it never was counted, or a bound is near."""
        with self._lock:
            return run_id not in self._counted or self._must_seal(run_id)

    def count(self, run_id: str, size: int) -> None:
        """Correct the run's unsealed bytes to what the database says."""
        with self._lock:
            self._put(run_id, size)
            self._counted.add(run_id)

    def end_round(self) -> None:
        """All that was due has been sealed: forget which runs were refused; they may try again."""
        with self._lock:
            self._refused.clear()
            self._crowded = False

    def waiting(self) -> list[str]:
        """Runs that, as far as this server knows, have unsealed reports."""
        with self._lock:
            return list(self._held)

    def _must_seal(self, run_id: str) -> bool:
        """When all runs together hold too much, the runs that hold at least half of the mean are sealed."""
        held = self._held.get(run_id, 0)
        near = self._crowded or 2 * self._total >= self._all_bytes
        large = 2 * held * len(self._held) >= self._total
        return run_id in self._refused or 2 * held >= self._run_bytes or (held > 0 and near and large)

    def _put(self, run_id: str, size: int) -> None:
        self._total += size - self._held.pop(run_id, 0)
        if size:
            self._held[run_id] = size
