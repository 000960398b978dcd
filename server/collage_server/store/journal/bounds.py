"""The journal's bounds: how much may wait to be sealed, of one run and of all. Beyond them agents keep reports."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final

from collage_server.errors import JournalFull

__all__ = ["JournalBounds"]

_RETRY_AFTER_SECONDS: Final = 2


class JournalBounds:
    """What this server knows to wait, by run, in bytes as `REPORT_BYTES` counts them. Thread-safe.

    Each server bounds what it lets in itself: what others take in or seal on the same database it learns when the
    sealer counts, which is whenever half of a bound is reached. `on_pressure` is called when it is, so that sealing
    does not wait for its interval.
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
        """Take reports of so many bytes in. Whatever comes to an empty journal is taken, however large.

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
            pressed = of_all or self._presses(run_id)
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

    def presses(self, run_id: str) -> bool:
        """Whether the run is to be sealed now, whoever is waited for: there is no room, or soon will be none."""
        with self._lock:
            return self._presses(run_id)

    def uncertain(self, run_id: str) -> bool:
        """Whether the run is to be counted: it never was, or a bound is near."""
        with self._lock:
            return run_id not in self._counted or self._presses(run_id)

    def count(self, run_id: str, size: int) -> None:
        """So much of the run waits, as the database says."""
        with self._lock:
            self._put(run_id, size)
            self._counted.add(run_id)

    def looked(self) -> None:
        """All that was due has been sealed: what was refused may come again, and presses again if it must."""
        with self._lock:
            self._refused.clear()
            self._crowded = False

    def waiting(self) -> list[str]:
        """Runs of which something is taken to wait."""
        with self._lock:
            return list(self._held)

    def _presses(self, run_id: str) -> bool:
        """Where all runs together hold too much, those are sealed that hold half of the mean or more."""
        held = self._held.get(run_id, 0)
        near = self._crowded or 2 * self._total >= self._all_bytes
        large = 2 * held * len(self._held) >= self._total
        return run_id in self._refused or 2 * held >= self._run_bytes or (held > 0 and near and large)

    def _put(self, run_id: str, size: int) -> None:
        self._total += size - self._held.pop(run_id, 0)
        if size:
            self._held[run_id] = size
