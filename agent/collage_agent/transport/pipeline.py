"""The queue of a process's reports, and the daemon thread that delivers them.

`run.py` puts items in; the thread makes reports of them (`stream_sender.py`) and delivers them (`delivery.py`). It
owns the thread's life: fork, interpreter exit and the deadline of `finish` (`tests/agent_delivery/`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Literal

from collage_agent.launch.identity import Identity
from collage_agent.mirrors.mirroring import Mirrors
from collage_agent.run_settings import Resume, Settings
from collage_agent.transport.delivery import Delivery
from collage_agent.transport.envelope import WORKER_THREAD_NAME, Transport
from collage_agent.transport.http import HttpTransport
from collage_agent.transport.queue import BoundedQueue
from collage_agent.transport.replay import Replay
from collage_agent.transport.report_counts import ReportCounts
from collage_agent.transport.spool import SpoolFile, spool_path
from collage_agent.transport.stream_sender import StreamSender
from collage_monitor.errors import CollageError, Unavailable

__all__ = ["DeliveryPipeline", "FinalState"]

_LOG = logging.getLogger("collage_agent")
_IDLE_SECONDS: Final = 1.0
_ENVELOPES_PER_CYCLE: Final = 20

FinalState = Literal["finished", "failed"] | None


class DeliveryPipeline:
    """Delivers the entries of its `queue` on a thread of its own; the training thread only adds them.

    The thread starts with `begin`, or with the first step in the queue. A given transport is used as it is.
    Otherwise online mode makes one for the server, which then also gets the reports of earlier processes in the
    same folder. Offline mode has none.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        transport: Transport | None,
        *,
        resume: Resume,
        on_unreachable: Callable[[CollageError], None],
        mirrors: Mirrors | None = None,
    ) -> None:
        limits = settings.limits
        self._mirrors = Mirrors() if mirrors is None else mirrors
        self.counts = ReportCounts()
        self.cpu_seconds = 0.0
        """CPU that the thread has used, brought up to date after each round."""
        self._spool = SpoolFile(
            spool_path(settings.folder, identity.run_id, identity.stream_id), limits.spool_bytes
        )
        self._limits = limits
        self._resume = resume
        self.queue = BoundedQueue(
            limits.queue_steps, limits.queue_bytes, limits.step_seconds, self.counts, before_first_step=self.begin
        )
        self._ending = threading.Event()
        self._replay: Replay | None = None
        if settings.mode == "offline":
            transport = None
        elif transport is None:
            transport = HttpTransport(
                settings.address, lambda: settings.token, limits, check_first=settings.server_url is None
            )
            self._replay = Replay(
                settings.folder, self._spool.path, transport, limits, self._ending.wait, on_unreachable
            )
        self._transport = transport
        self._delivery = Delivery(
            transport, self._spool, limits, self.counts, wait=self._ending.wait, on_unreachable=on_unreachable
        )
        self._sender = StreamSender(settings, identity, self._delivery, self._mirrors.take)
        self._begun = False
        self._deadline = 0.0
        self._state: FinalState = None
        self._logged_types: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._run, name=WORKER_THREAD_NAME, daemon=True)

    def begin(self) -> None:
        """Start the thread, which registers the run; once."""
        if not self._begun:
            self._begun = True
            self._thread.start()

    def finish(self, state: FinalState, seconds: float | None = None) -> bool:
        """Flush and end, within `seconds` (None: `limits.finish_seconds`); True when nothing is left to do."""
        if not self._begun:
            return True
        allowed = self._limits.finish_seconds if seconds is None else seconds
        if not self._ending.is_set():
            self._state = state
            self._deadline = time.monotonic() + allowed
            self._ending.set()
            self.queue.wake()
        self._thread.join(allowed)
        self._mirrors.join(self._deadline)
        return not self._thread.is_alive()

    def forget(self) -> None:
        """In a forked child: drop what belongs to the parent, without touching its locks."""
        self._spool.forget()

    def _run(self) -> None:
        self._guarded(self._hold_behind_older_spools)
        self._guarded(lambda: self._sender.register_run(self._resume))
        while not self._ending.is_set():
            self.queue.wait_for_steps(self._limits.linger_seconds, self._longest_wait())
            self._round()
        while len(self.queue):
            self._round()
        self._guarded(lambda: self._sender.finish(self._state))
        self._mirrors.close()
        self._guarded(self._flush)
        self._guarded(self._close)
        self.cpu_seconds = time.thread_time()

    def _round(self) -> None:
        entries = self.queue.take(self._limits.batch_reports)
        if entries:
            self._guarded(lambda: self._sender.take(entries))
        self._guarded(lambda: self._delivery.drain(_ENVELOPES_PER_CYCLE))
        self._guarded(self._send_older_spools)
        self.cpu_seconds = time.thread_time()

    def _longest_wait(self) -> float:
        """Seconds to wait for the next item: 0 while spooled reports can be sent."""
        delivery = self._delivery
        own_work = not (delivery.spool.is_empty or delivery.is_waiting or delivery.older_spools_first)
        return 0.0 if self._transport is not None and (own_work or self._may_replay()) else _IDLE_SECONDS

    def _may_replay(self) -> bool:
        replay = self._replay
        return replay is not None and replay.is_ready and self._delivery.last_error is None

    def _send_older_spools(self) -> bool:
        went = self._replay is not None and self._may_replay() and self._replay.step(_ENVELOPES_PER_CYCLE)
        self._hold_behind_older_spools()
        return went

    def _hold_behind_older_spools(self) -> None:
        self._delivery.older_spools_first = self._replay is not None and self._replay.must_go_first

    def _flush(self) -> None:
        while self._replay is not None and self._replay.must_go_first:
            assert self._replay.current is not None
            if not self._send_all(self._replay.current):
                break
            self._replay.step(_ENVELOPES_PER_CYCLE)
        self._hold_behind_older_spools()
        self._send_all(self._delivery)
        while time.monotonic() < self._deadline and self._send_older_spools():
            pass

    def _send_all(self, delivery: Delivery) -> bool:
        """Empty a spool; True when it is empty.

        A busy server is retried until the deadline; an unreachable one is tried once, however lately it failed: the
        end of the run cuts earlier tries short.
        """
        while not delivery.spool.is_empty:
            if time.monotonic() > self._deadline:
                return False
            if delivery.drain(_ENVELOPES_PER_CYCLE, now=True):
                continue
            resumes_in_time = time.monotonic() + delivery.pause_seconds < self._deadline
            if not (isinstance(delivery.last_error, Unavailable) and resumes_in_time):
                # What was left may have been a torn end, of which nothing goes.
                return delivery.spool.is_empty
            time.sleep(delivery.pause_seconds)
        return True

    def _close(self) -> None:
        if self._replay is not None:
            self._replay.close()
        self._spool.close()
        if self._transport is not None:
            self._transport.close()

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            if type(error) not in self._logged_types:
                self._logged_types.add(type(error))
                _LOG.exception("delivering reports failed; training goes on (said once)")
