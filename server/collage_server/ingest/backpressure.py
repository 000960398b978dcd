"""Back-pressure: bounds the reports in the journal that wait to be sealed. Beyond it agents keep their reports.

An agent that is refused comes again, so bounds may change freely (`tests/server/test_bounds.py`). Bodies that are
not answered yet are bounded by `memory_budget.BodyBudget`.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final

from collage_server.errors import JournalFull

__all__ = ["JournalBounds"]

_RETRY_AFTER_SECONDS: Final = 2


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
