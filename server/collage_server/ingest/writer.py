"""The one writer of a server process: it commits all reports that arrived during the previous commit, then
acknowledges them; what may wait in the journal; and the server's counters.

A dedicated thread, without lingering: an idle writer commits a lone report at once, a busy one groups what waits.

`api/reports.py` hands it groups and waits for their outcome. Exactly once, in the order of streams, is the store's
(`journal/report_journal.py`); how commits are grouped is free. So are the bounds of the journal: an agent that is
refused keeps its reports and comes again (`tests/server/test_bounds.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

from collage_server.errors import Busy, JournalFull, ServerError
from collage_server.store import GroupOutcome, ReportGroup, ReportJournal

__all__ = ["COMMIT_BYTES", "IngestCounters", "JournalBounds", "Writer"]

_LOG: Final = logging.getLogger(__name__)
COMMIT_BYTES = 16 * 2**20
"""The most bodies of reports that one commit takes; a benchmark sets it, to commit reports one by one."""
_REPORTS_A_COMMIT: Final = 5_000
_RETRY_AFTER_SECONDS: Final = 2
_EVALUATIONS: Final = ("newest", "overview")
_OUTCOMES: Final = ("accepted", "duplicate", "rejected", "late")
_COMMIT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, eq=False)
class _PendingGroup:
    group: ReportGroup
    answer: asyncio.Future[GroupOutcome]


class Writer:
    """Owns the only thread that appends reports. `submit` belongs to the event loop.

    `admit` gets the bytes of each commit before it begins, and may refuse it.
    """

    def __init__(
        self,
        journal: ReportJournal,
        counters: IngestCounters,
        *,
        clock: Callable[[], float],
        admit: Callable[[int], None] | None = None,
    ) -> None:
        self._journal = journal
        self._counters = counters
        self._clock = clock
        self._admit = admit
        self._queue: SimpleQueue[_PendingGroup | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running(self) -> bool:
        """Whether submissions are committed."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; answers are delivered on `loop`."""
        self._loop = loop
        self._thread = Thread(target=self._run, name="collage-writer", daemon=True)
        self._thread.start()

    async def stop(self, deadline_seconds: float) -> None:
        """Commit what waits, then end the thread; later submissions are refused."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._hand_over(None)
            await asyncio.to_thread(thread.join, deadline_seconds)

    def submit(self, group: ReportGroup) -> asyncio.Future[GroupOutcome]:
        """Queue a group; the future is done after the commit that holds it.

        Raises:
            Busy: the writer is not running (the server is going down).
        """
        if self._loop is None or not self.running:
            raise Busy("the server is going down; send this batch again later", retry_after_seconds=1)
        answer: asyncio.Future[GroupOutcome] = self._loop.create_future()
        self._hand_over(_PendingGroup(group, answer))
        return answer

    def _hand_over(self, entry: _PendingGroup | None) -> None:
        """Wake the thread after the tasks that are ready: sooner, it would only wait for the interpreter lock."""
        if self._loop is not None:
            self._loop.call_soon(self._queue.put, entry)

    def _run(self) -> None:
        going_on = True
        while going_on:
            batch, going_on = self._take()
            if batch:
                self._commit(batch)

    def _take(self) -> tuple[list[_PendingGroup], bool]:
        """Take the waiting groups, up to one commit's size; False when the writer is to end."""
        first = self._queue.get()
        batch: list[_PendingGroup] = []
        size = reports = 0
        entry = first
        while entry is not None:
            batch.append(entry)
            size += entry.group.body_bytes
            reports += len(entry.group.reports)
            if size >= COMMIT_BYTES or reports >= _REPORTS_A_COMMIT:
                return batch, True
            try:
                entry = self._queue.get_nowait()
            except Empty:
                return batch, True
        return batch, False

    def _commit(self, batch: list[_PendingGroup]) -> None:
        started = time.perf_counter()
        try:
            outcomes: list[GroupOutcome | BaseException] = list(self._append(batch))
        except Exception as error:
            _LOG.warning("a commit of %d groups failed: %s; trying them one by one", len(batch), error)
            outcomes = [self._append_alone(entry) for entry in batch]
        self._counters.committed(time.perf_counter() - started)
        for outcome in outcomes:
            if isinstance(outcome, GroupOutcome):
                self._counters.count(
                    accepted=outcome.accepted,
                    duplicate=outcome.duplicates,
                    late=len(outcome.late),
                    rejected=len(outcome.too_many_names),
                )
        self._deliver(batch, outcomes)

    def _append(self, batch: list[_PendingGroup]) -> list[GroupOutcome]:
        if self._admit is not None:
            self._admit(sum(entry.group.body_bytes for entry in batch))
        return self._journal.append([entry.group for entry in batch], self._clock())

    def _append_alone(self, entry: _PendingGroup) -> GroupOutcome | BaseException:
        """A bad group must not fail its neighbours."""
        try:
            return self._append([entry])[0]
        except ServerError as error:
            return error
        except Exception as error:
            _LOG.exception("reports of stream %s cannot be stored", entry.group.stream.stream_id)
            busy = Busy(
                f"the reports cannot be stored now ({type(error).__name__}); send them again later",
                retry_after_seconds=5,
            )
            busy.__cause__ = error
            return busy

    def _deliver(self, batch: list[_PendingGroup], outcomes: list[GroupOutcome | BaseException]) -> None:
        """One wake-up of the event loop for the whole commit."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_resolve, batch, outcomes)


def _resolve(batch: list[_PendingGroup], outcomes: list[GroupOutcome | BaseException]) -> None:
    for entry, outcome in zip(batch, outcomes, strict=True):
        if entry.answer.done():
            continue
        if isinstance(outcome, GroupOutcome):
            entry.answer.set_result(outcome)
        else:
            entry.answer.set_exception(outcome)


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


class IngestCounters:
    """Reports by outcome, and commits by duration, in a registry of their own. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        reports = Counter(
            "collage_server_reports", "Reports received, by outcome.", ["outcome"], registry=self.registry
        )
        self._reports = {outcome: reports.labels(outcome) for outcome in _OUTCOMES}
        cut = Counter(
            "collage_server_evaluations_cut",
            "Evaluations made of a run's newest part, or without its layers: the rest does not fit into --memory.",
            ["evaluation"],
            registry=self.registry,
        )
        self._cut = {name: cut.labels(name) for name in _EVALUATIONS}
        self._commits = Histogram(
            "collage_server_commit_seconds",
            "Duration of the commits that make reports durable.",
            buckets=_COMMIT_SECONDS,
            registry=self.registry,
        )

    def count(self, **reports: int) -> None:
        """Add reports by outcome, each one of "accepted", "duplicate", "rejected" and "late"."""
        for outcome, count in reports.items():
            if count:
                self._reports[outcome].inc(count)

    def cut(self, evaluation: Literal["newest", "overview"]) -> None:
        """Add an evaluation that was cut to fit into memory."""
        self._cut[evaluation].inc()

    def committed(self, seconds: float) -> None:
        """Add one commit."""
        self._commits.observe(seconds)
