"""Send now, or keep on disk until the server answers: order, acknowledgement and the meaning of refusals.

It decides for each envelope: sent, kept on disk, or given up, and which answer of the server means what. That each
report arrives exactly once, in order, is fixed (`tests/agent_delivery/test_delivery.py`, `test_laws.py`). Pauses
and limits are `DeliveryLimits`'.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, Literal

import msgspec

from collage_agent.run_settings import DeliveryLimits, is_second_writers
from collage_agent.transport.envelope import Envelope, Transport
from collage_agent.transport.report_counts import Place, ReportCounts
from collage_agent.transport.spool import SpoolFile, join_gap
from collage_monitor.backoff import Backoff
from collage_monitor.errors import (
    CollageError,
    NotAuthorised,
    NotFound,
    ServerRefusal,
    ServerUnreachable,
    Unavailable,
)
from collage_monitor.wire import BatchAnswer, ReportBatch, ReportGap, RunCreate

__all__ = ["Delivery"]

_LOG = logging.getLogger("collage_agent")
_RETRY_LATER: Final = (ServerUnreachable, Unavailable, NotAuthorised)
_REGISTRATIONS: Final = ("run", "attempt", "stream")
_MADE_IN_A_RUN: Final = ("attempt", "stream")
"""Who writes beside the training waits with these until the training has registered the run."""


class Delivery:
    """Takes envelopes in order and never raises.

    While the spool holds envelopes, newer ones queue up behind them, so the server sees one order. A report is
    done with once it is acknowledged or counted as dropped; the next batch of its stream then names its seq as a
    gap, so that the server does not wait for it. Without a transport everything stays in the spool.
    """

    def __init__(
        self,
        transport: Transport | None,
        spool: SpoolFile,
        limits: DeliveryLimits,
        counts: ReportCounts,
        *,
        wait: Callable[[float], bool] = lambda seconds: True,
        on_unreachable: Callable[[CollageError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spool = spool
        self.counts = counts
        self.stopped: str | None = None
        """Why nothing is sent any more, as a reason for dropping."""
        self.older_spools_first = False
        """Whether spools of earlier processes must be sent first; until then everything is kept in the spool."""
        self.last_error: CollageError | None = None
        """Why the last message must be sent again later; None if it was accepted."""
        self._transport = transport
        self._wait = wait
        self._on_unreachable = on_unreachable
        self._clock = clock
        self._next_try = 0.0
        self._backoff = Backoff(limits.first_pause_seconds, limits.longest_pause_seconds)
        self._registrations: dict[str, Envelope] = {}
        self._warned: set[str] = set()
        self._gaps: defaultdict[str, list[ReportGap]] = defaultdict(list)
        self._source: Literal["pending", "spooled"] = "pending"

    def send(self, envelope: Envelope) -> None:
        """Deliver an envelope, or keep it behind those that wait."""
        self._source = "pending"
        if self._discard(envelope):
            return
        if envelope.kind in _REGISTRATIONS:
            self._registrations[envelope.kind] = envelope
        if envelope.kind == "attempt":
            # The stream so far is an older attempt's.
            self._registrations.pop("stream", None)
        must_wait = self._transport is None or self.older_spools_first or not self.spool.is_empty or self.is_waiting
        left = envelope if must_wait else self._deliver(envelope)
        if left is not None:
            self._keep(left)

    def drain(self, envelopes: int, *, now: bool = False) -> bool:
        """Send up to `envelopes` of the spool, unless a pause is on (`now` ends it); True if some went."""
        if self._transport is None or self.older_spools_first or (self.is_waiting and not now):
            return False
        some = False
        self._source = "spooled"
        for _ in range(envelopes):
            envelope = self.spool.peek()
            self._drop_damaged()
            if envelope is None:
                break
            left = self._deliver(envelope)
            if left is not None:
                self.spool.leave(left)
                break
            self.spool.advance()
            some = True
        return some

    @property
    def is_waiting(self) -> bool:
        """Whether sending is paused, because the server did not take the last message."""
        return self.pause_seconds > 0.0

    @property
    def pause_seconds(self) -> float:
        """Seconds left of the pause, 0 outside one."""
        return max(0.0, self._next_try - self._clock())

    def _deliver(self, envelope: Envelope) -> Envelope | None:
        """The envelope to send again later; None when all of it is acknowledged, or refused and counted."""
        if self._discard(envelope):
            return None
        answer = self._answer(self._with_gaps(envelope))
        if isinstance(answer, ServerRefusal) and answer.status == 404 and envelope.kind == "reports":
            answer = self._answer_once_registered(envelope, answer)
        body = envelope.body
        if answer is None:
            return envelope
        if isinstance(answer, BatchAnswer):
            self._forget_gaps(envelope)
            self._acknowledged(envelope, answer)
        elif answer.status == 413 and isinstance(body, ReportBatch) and len(body.reports) > 1:
            return self._deliver_halves(envelope, body)
        else:
            self._refused(envelope, answer)
        if envelope.kind not in {"run", "attempt"}:
            # A server may accept these two every time, and still refuse the stream that follows.
            self._resume()
        return None

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
            if "transport" not in self._warned:
                self._warned.add("transport")
                _LOG.exception("the transport failed (said once)")
            self._pause(ServerUnreachable(f"{type(error).__name__}: {error}"))
        return None

    def _answer_once_registered(
        self, envelope: Envelope, refusal: ServerRefusal
    ) -> BatchAnswer | ServerRefusal | None:
        """The answer after run, attempt and stream were registered again, with a server that has lost them.

        It is the `refusal` of the reports where the server does not take a registration.
        """
        if not self._registrations:
            return refusal
        for known in self._registrations.values():
            answer = self._answer(_allowing_resume(known))
            if not isinstance(answer, BatchAnswer):
                return None if answer is None else refusal
        self._warn_once(
            "forgotten",
            f"the server knew run {envelope.run_id} no more, and has it again now: its data were lost or restored "
            "from an older back-up; what it had acknowledged before may be missing there",
        )
        return self._answer(self._with_gaps(envelope))

    def _deliver_halves(self, envelope: Envelope, body: ReportBatch) -> Envelope | None:
        """As `_deliver`; if one half must be sent later, later envelopes wait with it."""
        middle = len(body.reports) // 2
        first = msgspec.structs.replace(body, reports=body.reports[:middle])
        second = msgspec.structs.replace(body, reports=body.reports[middle:], gaps=[])
        left = self._deliver(replace(envelope, body=first))
        if left is None:
            return self._deliver(replace(envelope, body=second))
        assert isinstance(left.body, ReportBatch)
        both = msgspec.structs.replace(left.body, reports=[*left.body.reports, *second.reports])
        return replace(envelope, body=both)

    def _refused(self, envelope: Envelope, error: ServerRefusal) -> None:
        if isinstance(error, NotFound) and error.status == 410:
            self._stop(envelope, "run_deleted", f"run {envelope.run_id} was deleted on the server: sending stops")
        elif envelope.kind == "run":
            self._stop(envelope, "run_refused", f"the server refuses run {envelope.run_id}: {_in_words(error)}")
        else:
            self._drop(envelope, f"refused_{error.status}", f"the server refuses a message: {_in_words(error)}")

    def _acknowledged(self, envelope: Envelope, answer: BatchAnswer) -> None:
        if answer.rejected:
            self._count(len(answer.rejected), "dropped", "rejected")
            self._warn_once("rejected", f"the server rejects a report: {answer.rejected[0].message}")
            for entry in answer.rejected:
                if entry.seq is not None:
                    gap = ReportGap(first_seq=entry.seq, last_seq=entry.seq, reason="rejected")
                    join_gap(self._gaps[envelope.stream_id], gap)
        self._count(envelope.report_count - len(answer.rejected), "sent")

    def _count(self, reports: int, target: Place, reason: str = "") -> None:
        """Count the outcome of reports, new ones or ones from the spool."""
        source: Place = self._source
        if self.spool.taken_over and source == "spooled":
            # Reports that another process left are not counted yet.
            self.counts.add(reports)
            source = "pending"
        self.counts.move(reports, source, target, reason)

    def _keep(self, envelope: Envelope) -> None:
        try:
            begins = self.spool.is_empty
            if begins:
                # Each file is complete without what the server knew when it was written.
                for known in self._registrations.values():
                    self.spool.append(_allowing_resume(known))
            if not (begins and envelope.kind in self._registrations):
                self.spool.append(self._with_gaps(envelope))
                self._forget_gaps(envelope)
                if self._source == "pending":
                    self.counts.move(envelope.report_count, "pending", "spooled")
        except OSError as error:
            self._drop(envelope, "spool_failed", f"reports cannot be kept in {self.spool.path}: {error}")
        # The spool keeps their numbers itself.
        gave_way, self.spool.gave_way = self.spool.gave_way, []
        self._count_lost(gave_way, f"{self.spool.path} is full: its oldest reports gave way")

    def _drop_damaged(self) -> None:
        if self.spool.damaged:
            damaged, self.spool.damaged = self.spool.damaged, []
            self._count_lost([gap for _, gap in damaged], f"{self.spool.path} was damaged: some reports are lost")
            for stream_id, gap in damaged:
                self._gaps[stream_id].append(gap)
        if self.spool.is_empty and not self.spool.taken_over:
            # Reports at a damaged end have no readable number.
            self.counts.move(self.counts.spooled, "spooled", "dropped", "spool_damaged")

    def _count_lost(self, gaps: Iterable[ReportGap], text: str) -> None:
        for gap in gaps:
            count = gap.last_seq - gap.first_seq + 1
            if self.spool.taken_over:
                self._count(count, "dropped", gap.reason)
            else:
                self.counts.move(count, "spooled", "dropped", gap.reason)
            self._warn_once(gap.reason, text)

    def _with_gaps(self, envelope: Envelope) -> Envelope:
        """A batch of reports, with the gaps not yet sent to the server; other messages unchanged."""
        gaps = self._gaps.get(envelope.stream_id)
        if not gaps or not isinstance(envelope.body, ReportBatch):
            return envelope
        body = msgspec.structs.replace(envelope.body, gaps=[*envelope.body.gaps, *gaps])
        return replace(envelope, body=body)

    def _forget_gaps(self, envelope: Envelope) -> None:
        if isinstance(envelope.body, ReportBatch):
            self._gaps.pop(envelope.stream_id, None)

    def _pause(self, error: CollageError) -> None:
        if self.last_error is None:
            self._on_unreachable(error)
        self.last_error = error
        if isinstance(error, NotAuthorised):
            # Another token will not appear within seconds.
            self._backoff.slow_down()
        asked = error.retry_after_seconds if isinstance(error, ServerRefusal) else None
        self._next_try = self._clock() + self._backoff.pause(asked)

    def _resume(self) -> None:
        self.last_error = None
        self._next_try = 0.0
        self._backoff.reset()

    def _discard(self, envelope: Envelope) -> bool:
        """Count an envelope as dropped when sending has stopped for good."""
        if self.stopped:
            self._drop(envelope, self.stopped)
        return self.stopped is not None

    def _stop(self, envelope: Envelope, reason: str, text: str) -> None:
        self.stopped = reason
        self._drop(envelope, reason, text)

    def _drop(self, envelope: Envelope, reason: str, text: str = "") -> None:
        if isinstance(envelope.body, ReportBatch):
            self._count(envelope.report_count, "dropped", reason)
            if not self.stopped:
                gaps = self._gaps[envelope.stream_id] = [*envelope.body.gaps, *self._gaps[envelope.stream_id]]
                for report in envelope.body.reports:
                    join_gap(gaps, ReportGap(first_seq=report.seq, last_seq=report.seq, reason=reason))
        if text:
            self._warn_once(reason, text)

    def _warn_once(self, reason: str, text: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            _LOG.warning("%s (said once; see run.reports_dropped)", text)


def _in_words(error: ServerRefusal) -> str:
    return f"{error.status} {error.code}, {error}"


def _allowing_resume(envelope: Envelope) -> Envelope:
    """A registration that may be repeated: `resume` only restricts the first one."""
    if not isinstance(envelope.body, RunCreate) or envelope.body.resume == "allow":
        return envelope
    return replace(envelope, body=msgspec.structs.replace(envelope.body, resume="allow"))
