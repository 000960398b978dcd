"""The daemon thread that empties the queue: everything slow, blocking or synchronising happens here."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from collage_agent.settings import DeliveryLimits
from collage_agent.transport.courier import Courier
from collage_agent.transport.delivery import Delivery
from collage_agent.transport.envelope import WORKER_THREAD_NAME, Transport
from collage_agent.transport.queue import BoundedQueue
from collage_agent.transport.replay import Replay
from collage_agent.transport.reports import Item, Started
from collage_monitor.errors import ServerUnreachable, Unavailable

__all__ = ["Worker"]

_LOG = logging.getLogger("collage_agent")
_IDLE_SECONDS = 1.0
_ENVELOPES_PER_CYCLE = 20
_ANOTHER_TRY_AFTER_SECONDS = 2.0

FinalState = Literal["finished", "failed"] | None


class Worker:
    """Runs courier and delivery until it is told to end, then flushes within a deadline.

    `transport` None: everything goes to the spool. `replay` None: what earlier processes left stays where it is.
    """

    def __init__(
        self,
        queue: BoundedQueue[Item],
        courier: Courier,
        delivery: Delivery,
        transport: Transport | None,
        limits: DeliveryLimits,
        ending: threading.Event,
        replay: Replay | None,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self.cpu_seconds = 0.0
        """CPU that this thread has used, brought up to date after each round."""
        self._queue = queue
        self._courier = courier
        self._delivery = delivery
        self._transport = transport
        self._limits = limits
        self._ending = ending
        self._replay = replay
        self._deadline = 0.0
        self._named: set[type[Exception]] = set()
        self._state: FinalState = None
        self._thread = threading.Thread(target=self._run, name=WORKER_THREAD_NAME, daemon=True)

    def start(self, first: Callable[[], None]) -> None:
        """Start the thread; `first` runs on it before anything else."""
        self._first = first
        self._thread.start()

    def finish(self, state: FinalState, seconds: float) -> bool:
        """Flush everything and end; blocks the caller for at most `seconds`. True when all was settled in time."""
        if not self._ending.is_set():
            self._state = state
            self._deadline = time.monotonic() + seconds
            self._ending.set()
            self._queue.wake()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._guarded(self._hold_for_older)
        self._guarded(self._first)
        while not self._ending.is_set():
            self._queue.wait_for_items(self._limits.linger_seconds, self._pause_seconds())
            self._round()
        while len(self._queue):
            self._round()
        self._guarded(lambda: self._courier.finish(self._state))
        self._guarded(self._flush)
        self._guarded(self._close)
        self.cpu_seconds = time.thread_time()

    def _round(self) -> None:
        items = self._queue.take(self._limits.batch_reports)
        if items and not self._guarded(lambda: self._courier.take(items)):
            self.dropped["worker_error"] += sum(not isinstance(item, Started) for item in items)
        self._guarded(lambda: self._delivery.drain(_ENVELOPES_PER_CYCLE))
        self._guarded(self._send_older)
        self.cpu_seconds = time.thread_time()

    def _pause_seconds(self) -> float:
        """Longest wait for the next item: none while there is old work that can be done."""
        delivery = self._delivery
        own_work = not (delivery.spool.is_empty or delivery.is_waiting or delivery.held)
        return 0.0 if self._transport is not None and (own_work or self._may_replay()) else _IDLE_SECONDS

    def _may_replay(self) -> bool:
        replay = self._replay
        return replay is not None and replay.can_go_on and self._delivery.last_error is None

    def _send_older(self) -> bool:
        went = self._replay is not None and self._may_replay() and self._replay.step(_ENVELOPES_PER_CYCLE)
        self._hold_for_older()
        return went

    def _hold_for_older(self) -> None:
        self._delivery.held = self._replay is not None and self._replay.comes_first

    def _flush(self) -> None:
        while self._replay is not None and self._replay.comes_first:
            assert self._replay.current is not None
            if not self._send_all(self._replay.current):
                break
            self._replay.step(_ENVELOPES_PER_CYCLE)
        self._hold_for_older()
        self._send_all(self._delivery)
        while time.monotonic() < self._deadline and self._send_older():
            pass

    def _send_all(self, delivery: Delivery) -> bool:
        """Empty a spool; True when it is empty.

        A busy server gets until the deadline, an absent one a try, unless it has failed one this moment.
        """
        while not delivery.spool.is_empty:
            just_failed = delivery.seconds_since_failure < _ANOTHER_TRY_AFTER_SECONDS
            absent = isinstance(delivery.last_error, ServerUnreachable)
            if time.monotonic() > self._deadline or (absent and just_failed):
                return False
            if delivery.drain(_ENVELOPES_PER_CYCLE, now=True):
                continue
            resumes_in_time = time.monotonic() + delivery.pause_seconds < self._deadline
            if not (isinstance(delivery.last_error, Unavailable) and resumes_in_time):
                return False
            time.sleep(delivery.pause_seconds)
        return True

    def _close(self) -> None:
        if self._replay is not None:
            self._replay.close()
        self._delivery.spool.close()
        if self._transport is not None:
            self._transport.close()

    def _guarded(self, errand: Callable[[], object]) -> bool:
        try:
            errand()
        except Exception as error:
            if type(error) not in self._named:
                self._named.add(type(error))
                _LOG.exception("the delivering side failed at one of its errands; training goes on (said once)")
            return False
        return True
