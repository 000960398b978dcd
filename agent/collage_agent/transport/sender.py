"""Sends a log's messages in order; decides which answer of the server means what.

`Sender` sends a process's own log as well as one that another process left. That each report arrives exactly once,
in order, is fixed (`tests/agent_delivery/test_delivery.py`, `test_laws.py`). Pauses and limits are
`DeliveryLimits`'.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from collage_agent.run_settings import DeliveryLimits, is_second_writers
from collage_agent.transport.envelope import Envelope, Transport
from collage_agent.transport.report_log import ReportLog, abandoned_spools, waiting_spools
from collage_monitor.backoff import Backoff
from collage_monitor.errors import (
    CollageError,
    NotAuthorised,
    NotFound,
    ServerRefusal,
    ServerUnreachable,
    Unavailable,
)
from collage_monitor.wire import BatchAnswer

__all__ = ["FolderOutcome", "LeftLogs", "LogOutcome", "Sender", "send_folder"]

_LOG = logging.getLogger("collage_agent")
_RETRY_LATER: Final = (ServerUnreachable, Unavailable, NotAuthorised)
_MADE_IN_A_RUN: Final = ("attempt", "stream")
"""Who writes beside the training waits with these until the training has registered the run."""
_MESSAGES_AT_ONCE: Final = 20


class Sender:
    """Sends what is in a log, in its order, and never raises.

    A message stays the log's first until it is acknowledged or given up. Without a transport everything stays in
    the log, as it does while `held()`.
    """

    def __init__(
        self,
        transport: Transport | None,
        log: ReportLog,
        limits: DeliveryLimits,
        *,
        wait: Callable[[float], bool] = lambda seconds: True,
        held: Callable[[], bool] = lambda: False,
        on_unreachable: Callable[[CollageError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = log
        self.stopped: str | None = None
        """Why nothing is sent any more, as a reason for dropping."""
        self.last_error: CollageError | None = None
        """Why the last message must be sent again later; None if it was accepted."""
        self._transport = transport
        self._wait = wait
        self._held = held
        self._on_unreachable = on_unreachable
        self._clock = clock
        self._next_try = 0.0
        self._backoff = Backoff(limits.first_pause_seconds, limits.longest_pause_seconds)

    def take(self, envelope: Envelope) -> None:
        """Send a message, or keep it on disk behind those that wait."""
        self.log.append(envelope)
        while not self.log.bytes_left and self.is_ready and self._send_first():
            pass
        self.log.keep()

    def drain(self, *, now: bool = False) -> bool:
        """Send some messages, unless a pause is on (`now` ends it); True if some went."""
        went = False
        for _ in range(_MESSAGES_AT_ONCE):
            if not (self.is_ready or (now and self._may_send)) or not self._send_first():
                break
            went = True
        return went

    def send_all(self, may_wait: Callable[[Sender], bool], deadline: float = math.inf) -> bool:
        """Send until nothing is left, which is True; a message that is not taken `may_wait` for another try."""
        while not self.log.is_empty and self._clock() < deadline:
            if not self.drain(now=True) and not may_wait(self):
                break
        return self.log.is_empty

    @property
    def is_ready(self) -> bool:
        """Whether something can be sent now."""
        return self._may_send and self.pause_seconds == 0.0

    @property
    def pause_seconds(self) -> float:
        """Seconds left of the pause after a message that the server did not take, 0 outside one."""
        return 0.0 if self.stopped else max(0.0, self._next_try - self._clock())

    @property
    def _may_send(self) -> bool:
        return not self.log.is_empty and self._transport is not None and not self._held()

    def _send_first(self) -> bool:
        """Settle the log's first message; False if there is none, or it must be sent again later."""
        first = self.log.first()
        if first is None:
            return False
        if self.stopped:
            self.log.drop(self.stopped)
            return True
        answer = self._answer(first)
        if isinstance(answer, ServerRefusal) and answer.status == 404 and first.kind == "reports":
            answer = self._answer_once_registered(first, answer)
        if answer is None:
            return False
        if isinstance(answer, BatchAnswer):
            if answer.rejected:
                self.log.warn_once("rejected", f"the server rejects a report: {answer.rejected[0].message}")
            self.log.acknowledge(answer.rejected)
        elif answer.status == 413 and first.report_count > 1:
            self.log.split()
            return True
        else:
            self._refused(first, answer)
        if first.kind not in {"run", "attempt"}:
            # A server may accept these two each time and still refuse the stream after them.
            self.last_error = None
            self._next_try = 0.0
            self._backoff.reset()
        return True

    def _answer(self, envelope: Envelope) -> BatchAnswer | ServerRefusal | None:
        """The server's final answer to a message; None, and sending pauses, if it must be sent again later."""
        assert self._transport is not None
        try:
            return self._transport.send(envelope, self._wait)
        except _RETRY_LATER as error:
            self._pause(error)
        except ServerRefusal as error:
            may_wait = envelope.kind in _MADE_IN_A_RUN and is_second_writers(envelope.stream_id)
            if not (may_wait and error.status == 404):
                return error
            text = f"the server knows no run {envelope.run_id} yet: is run_id right, and has its training begun?"
            self._pause(NotFound(text, status=404))
        except Exception as error:
            # An unexpected exception of a transport must not end the worker.
            if self.log.is_new("transport"):
                _LOG.exception("the transport failed (said once)")
            self._pause(ServerUnreachable(f"{type(error).__name__}: {error}"))
        return None

    def _answer_once_registered(
        self, envelope: Envelope, refusal: ServerRefusal
    ) -> BatchAnswer | ServerRefusal | None:
        """The answer after run, attempt and stream were registered again, with a server that has lost them.

        It is the `refusal` of the reports where the server does not take a registration.
        """
        if not self.log.registrations:
            return refusal
        for known in self.log.registrations.values():
            answer = self._answer(known)
            if not isinstance(answer, BatchAnswer):
                return None if answer is None else refusal
        self.log.warn_once(
            "forgotten",
            f"the server knew run {envelope.run_id} no more, and has it again now: its data were lost or restored "
            "from an older back-up; what it had acknowledged before may be missing there",
        )
        return self._answer(envelope)

    def _refused(self, envelope: Envelope, error: ServerRefusal) -> None:
        """Give up the log's first message, and all that follows if the run is refused."""
        said = f"{error.status} {error.code}, {error}"
        if isinstance(error, NotFound) and error.status == 410:
            self.stopped, text = "run_deleted", f"run {envelope.run_id} was deleted on the server: sending stops"
        elif envelope.kind == "run":
            self.stopped, text = "run_refused", f"the server refuses run {envelope.run_id}: {said}"
        else:
            text = f"the server refuses a message: {said}"
        reason = self.stopped or f"refused_{error.status}"
        self.log.warn_once(reason, text)
        self.log.drop(reason)

    def _pause(self, error: CollageError) -> None:
        if self.last_error is None:
            self._on_unreachable(error)
        self.last_error = error
        if isinstance(error, NotAuthorised):
            # Another token will not appear within seconds.
            self._backoff.slow_down()
        asked = error.retry_after_seconds if isinstance(error, ServerRefusal) else None
        self._next_try = self._clock() + self._backoff.pause(asked)


class LeftLogs:
    """Logs that other processes left, a sender for one after the other."""

    def __init__(self, logs: Iterator[ReportLog], own: Path, sender_of: Callable[[ReportLog], Sender]) -> None:
        self._own = own
        self._sender_of = sender_of
        self._logs = logs
        self._sender: Sender | None = None

    @property
    def sender(self) -> Sender | None:
        """Sends the oldest log of which something is left; None when there is none."""
        while self._sender is None or self._is_over(self._sender):
            self.close()
            log = next(self._logs, None)
            if log is None:
                return None
            self._sender = self._sender_of(log)
        return self._sender

    def must_go_first(self) -> bool:
        """Whether a log of the own run is left.

        Its attempt is older than this process's, and the server orders attempts by arrival: if this process's
        attempt arrived first, the older one would hide it. A second writer's attempt never hides a training's.
        """
        sender = self.sender
        return sender is not None and self._goes_first(sender.log)

    def close(self) -> None:
        """Let go of the current log."""
        if self._sender is not None:
            _LOG.info("sent %d reports left in %s", self._sender.log.counts.sent, self._sender.log.path)
            self._sender.log.close()
            self._sender = None

    def forget(self) -> None:
        """In a forked child: leave the file to the parent."""
        if self._sender is not None:
            self._sender.log.forget()

    def _goes_first(self, log: ReportLog) -> bool:
        if log.path.parent != self._own.parent:
            return False
        return is_second_writers(self._own.stem) or not is_second_writers(log.path.stem)

    def _is_over(self, sender: Sender) -> bool:
        """Whether all is sent, or it is a second writer's, of a run that is not there yet: left to a later
        process."""
        return sender.log.is_empty or (isinstance(sender.last_error, NotFound) and not self._goes_first(sender.log))


@dataclass
class LogOutcome:
    """The outcome of one log."""

    run_id: str
    stream_id: str
    sent: int
    dropped: dict[str, int]
    bytes_left: int


@dataclass
class FolderOutcome:
    """The outcome of a folder's logs. `in_use` counts those whose process is alive and sends them itself."""

    spools: list[LogOutcome] = field(default_factory=list)
    in_use: int = 0
    error: str | None = None


def send_folder(
    folder: Path,
    transport: Transport,
    seconds: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> FolderOutcome:
    """Send every log that nobody holds, oldest first; stops where the server does not take one in time."""
    outcome = FolderOutcome()
    deadline = clock() + seconds

    def wait(pause: float) -> bool:
        sleep(min(pause, max(0.0, deadline - clock())))
        return clock() >= deadline

    def may_wait(sender: Sender) -> bool:
        is_final = sender.last_error is None or isinstance(sender.last_error, NotAuthorised | NotFound)
        return not is_final and not wait(sender.pause_seconds)

    for log in abandoned_spools(folder, folder):
        sender = Sender(transport, log, DeliveryLimits(), wait=wait, clock=clock)
        sender.send_all(may_wait)
        path, counts = log.path, log.counts
        outcome.spools.append(LogOutcome(path.parent.name, path.stem, counts.sent, counts.dropped, log.bytes_left))
        log.close()
        if sender.last_error is not None:
            outcome.error = str(sender.last_error)
            if not isinstance(sender.last_error, NotFound):
                return outcome
    outcome.in_use = len(waiting_spools(folder))
    return outcome
