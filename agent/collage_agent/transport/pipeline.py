"""The queue of a process's reports, and the daemon thread that delivers them.

`run.py` puts items in; the thread makes reports of them (`stream_sender.py`) and sends them (`sender.py`). It owns
the thread's life: fork, interpreter exit and the deadline of `finish` (`tests/agent_delivery/`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Literal

from collage_agent.launch.identity import Identity
from collage_agent.mirrors.mirroring import Mirrors
from collage_agent.run_settings import Resume, Settings
from collage_agent.transport.envelope import WORKER_THREAD_NAME, Transport
from collage_agent.transport.http import HttpTransport
from collage_agent.transport.queue import BoundedQueue
from collage_agent.transport.report_counts import ReportCounts
from collage_agent.transport.report_log import ReportLog, abandoned_spools, spool_path
from collage_agent.transport.sender import LeftLogs, Sender
from collage_agent.transport.stream_sender import StreamSender
from collage_monitor.errors import CollageError, Unavailable

__all__ = ["DeliveryPipeline", "FinalState"]

_LOG = logging.getLogger("collage_agent")
_IDLE_SECONDS: Final = 1.0

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
        self._limits = limits
        self._resume = resume
        self.queue = BoundedQueue(
            limits.queue_steps, limits.queue_bytes, limits.step_seconds, self.counts, before_first_step=self.begin
        )
        self._ending = threading.Event()
        path = spool_path(settings.folder, identity.run_id, identity.stream_id)
        others: Iterator[ReportLog] = iter(())
        if settings.mode == "offline":
            transport = None
        elif transport is None:
            others = abandoned_spools(settings.folder, path)
            transport = HttpTransport(
                settings.address, lambda: settings.token, limits, check_first=settings.server_url is None
            )
        self._transport = transport
        sender = partial(Sender, transport, limits=limits, wait=self._ending.wait, on_unreachable=on_unreachable)
        self._left = LeftLogs(others, path, sender)
        self._own = sender(log=ReportLog(path, limits.spool_bytes, self.counts), held=self._left.must_go_first)
        self._stream = StreamSender(settings, identity, self._own, self._mirrors.take)
        self._begun = self._went = False
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
        self._own.log.forget()
        self._left.forget()

    def _run(self) -> None:
        self._guarded(lambda: self._stream.register_run(self._resume))
        while not self._ending.is_set():
            self.queue.wait_for_steps(self._limits.linger_seconds, 0.0 if self._went else _IDLE_SECONDS)
            self._round()
        while len(self.queue):
            self._round()
        self._guarded(lambda: self._stream.finish(self._state))
        self._mirrors.close()
        self._guarded(self._flush)
        self._guarded(self._close)
        self.cpu_seconds = time.thread_time()

    def _round(self) -> None:
        entries = self.queue.take(self._limits.batch_reports)
        if entries:
            self._guarded(lambda: self._stream.take(entries))
        self._guarded(self._send_left)
        self.cpu_seconds = time.thread_time()

    def _send_left(self) -> bool:
        """Send some of what is on disk; True if some went, so that there may be more."""
        self._went = False
        self._went = any(sender.drain() for sender in self._senders())
        return self._went

    def _senders(self) -> Iterator[Sender]:
        """Those whose turn it is: a log of this run that must go first, else the own, and behind it all others."""
        if not self._left.must_go_first():
            yield self._own
        if self._own.last_error is None and (left := self._left.sender) is not None:
            yield left

    def _flush(self) -> None:
        """Send what is left within the deadline; of other runs only what is taken at once."""
        while self._left.must_go_first() and (older := self._left.sender) is not None:
            if not older.send_all(self._may_wait, self._deadline):
                break
        if self._own.send_all(self._may_wait, self._deadline):
            while time.monotonic() < self._deadline and self._send_left():
                pass

    def _may_wait(self, sender: Sender) -> bool:
        """A busy server is asked again before the deadline; an unreachable one was tried once, however lately it
        failed: the end of the run cuts earlier tries short."""
        pause = sender.pause_seconds
        fits = isinstance(sender.last_error, Unavailable) and time.monotonic() + pause < self._deadline
        if fits:
            time.sleep(pause)
        return fits

    def _close(self) -> None:
        self._left.close()
        self._own.log.close()
        if self._transport is not None:
            self._transport.close()

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            if type(error) not in self._logged_types:
                self._logged_types.add(type(error))
                _LOG.exception("delivering reports failed; training goes on (said once)")
