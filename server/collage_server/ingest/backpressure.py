"""Back-pressure: limits what is accepted, so that nothing waits for long. Beyond them agents keep their reports.

It bounds request bodies that are read but not yet answered, and reports in the journal that wait to be sealed.

`api/bodies.py` leases bytes for bodies, the writer for the journal. A refused agent keeps its reports and sends
them again, so bounds may change freely (`tests/server/test_bounds.py`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
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

    `bytes` counts whole bodies that are not answered yet, `arriving` the received part of others. Both together
    stay within `limit`. Whole bodies are admitted up to `allowed`. It falls by a share when reports wait longer
    than `wait_seconds` for their commit, and grows by a share of the bytes acknowledged in time.

    A holder (a token or project) gets at most half of the budget alone, a third when another one is active, so
    there is always room for one more. A single body passes when nothing else is in flight, however small the
    budget.
    """

    def __init__(
        self, limit: int, *, wait_seconds: float = 0.25, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.allowed = limit
        self.bytes = 0
        self.arriving = 0
        self.held_by: Counter[str] = Counter()
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

    def admit(self, size: int) -> None:
        """Raise Busy if a body of `size` bytes would not fit. Reserves nothing; bytes count as they arrive.

        Raises:
            Busy: whole bodies that wait leave no room for it.
        """
        if self.bytes and self.bytes + size > self.allowed:
            raise _busy(self.bytes, self.allowed)

    def receive(self, holders: Sequence[str]) -> BudgetLease:
        """A lease that holds nothing yet, and grows with what arrives, within the share of each holder."""
        return BudgetLease(self, holders)


class BudgetLease:
    """One request's part of the budget."""

    def __init__(self, budget: InFlightBudget, holders: Sequence[str]) -> None:
        self.size = 0
        self.arrived = 0
        self._budget = budget
        self._holders = holders

    def __enter__(self) -> BudgetLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hold(arrived=0, size=0)

    def arrive(self, size: int) -> None:
        """Hold `size` more bytes of a body that is not whole yet.

        Raises:
            Busy: they do not fit beside what others hold, or beyond a holder's share.
        """
        self._require_room(size)
        self._hold(arrived=self.arrived + size, size=self.size)

    def resize(self, size: int) -> None:
        """Hold `size` bytes from now on for a whole body.

        Raises:
            Busy: they do not fit beside what others hold.
        """
        self._require_room(size - self.size - self.arrived)
        self._hold(arrived=0, size=size)

    def _require_room(self, more: int) -> None:
        budget = self._budget
        held = budget.bytes + budget.arriving
        if more <= 0 or held == self.size + self.arrived:
            return
        if held + more > budget.limit:
            raise _busy(held - self.size - self.arrived, budget.limit)
        for holder in self._holders:
            if budget.held_by[holder] + more > budget.limit - held:
                raise Busy(
                    f"{holder} holds {budget.held_by[holder]} bytes of bodies in flight, and the rest of "
                    f"{budget.limit} is kept for others; send this one again later",
                    limit=budget.limit,
                    retry_after_seconds=1,
                )

    def _hold(self, *, arrived: int, size: int) -> None:
        budget = self._budget
        budget.arriving += arrived - self.arrived
        budget.bytes += size - self.size
        more = arrived + size - self.arrived - self.size
        for holder in self._holders if more else ():
            budget.held_by[holder] += more
            if not budget.held_by[holder]:
                del budget.held_by[holder]
        self.arrived, self.size = arrived, size


def _busy(others: int, limit: int) -> Busy:
    return Busy(
        f"{others} bytes of other bodies are in flight, at most {limit} in all now; send this one again later",
        limit=limit,
        retry_after_seconds=1,
    )


class JournalBounds:
    """Bytes of unsealed reports by run, as far as this server knows, counted as `REPORT_BYTES` does. Thread-safe.

    Each server bounds the reports that it accepts itself. Once half of a bound is reached, the sealer's count shows
    what other servers accept or seal in the same database. `on_pressure` is called then, so that sealing starts at
    once.
    """

    def __init__(self, run_bytes: int, all_bytes: int) -> None:
        self.on_pressure: Callable[[], None] = lambda: None
        self._run_bytes = run_bytes
        self._all_bytes = all_bytes
        self._held: dict[str, int] = {}
        self._total = 0
        self._counted: set[str] = set()
        self._refused: set[str] = set()
        self._all_runs_full = False
        self._lock = Lock()

    @property
    def total(self) -> int:
        """Bytes of unsealed reports of all runs, as far as this server knows."""
        return self._total

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
                self._all_runs_full = True
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

    def take_back(self, run_id: str, size: int) -> None:
        """Give back bytes that were admitted and not stored: their commit failed, or some reports were known
        already."""
        with self._lock:
            self._put(run_id, max(self._held.get(run_id, 0) - size, 0))

    def must_seal(self, run_id: str) -> bool:
        """Whether to seal the run now, without waiting for missing ranks: a bound is reached, or soon will be."""
        with self._lock:
            return self._must_seal(run_id)

    def needs_count(self, run_id: str) -> bool:
        """Whether to count the run in the database: it was never counted, or a bound is near."""
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
            self._all_runs_full = False

    def waiting(self) -> list[str]:
        """Runs that, as far as this server knows, have unsealed reports."""
        with self._lock:
            return list(self._held)

    def _must_seal(self, run_id: str) -> bool:
        """When all runs together hold too much, the runs that hold at least half of the mean are sealed."""
        held = self._held.get(run_id, 0)
        near = self._all_runs_full or 2 * self._total >= self._all_bytes
        large = 2 * held * len(self._held) >= self._total
        return run_id in self._refused or 2 * held >= self._run_bytes or (held > 0 and near and large)

    def _put(self, run_id: str, size: int) -> None:
        self._total += size - self._held.pop(run_id, 0)
        if size:
            self._held[run_id] = size
