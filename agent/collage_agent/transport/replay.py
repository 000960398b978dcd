"""Sends what earlier processes left in their spools: beside a run's own reports, or all at once by `sync`.

Order within a stream is fixed, and a spool is removed only once all of it is acknowledged or given up
(`tests/agent_delivery/test_replay.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from collage_agent.run_settings import DeliveryLimits, is_second_writers
from collage_agent.transport.delivery import Delivery
from collage_agent.transport.envelope import Transport
from collage_agent.transport.report_counts import ReportCounts
from collage_agent.transport.spool import SpoolFile, abandoned_spools, waiting_spools
from collage_monitor.errors import CollageError, NotAuthorised, NotFound

__all__ = ["Replay", "ReplayOutcome", "SpoolOutcome", "send_spools"]

_LOG = logging.getLogger("collage_agent")
_ENVELOPES_AT_ONCE = 50


class Replay:
    """Takes over one abandoned spool after the other, oldest first, under its old stream and in its old order."""

    def __init__(
        self,
        folder: Path,
        own: Path,
        transport: Transport,
        limits: DeliveryLimits,
        wait: Callable[[float], bool],
        on_unreachable: Callable[[CollageError], None] = lambda error: None,
    ) -> None:
        self._own = own
        self._on_unreachable = on_unreachable
        self._transport = transport
        self._limits = limits
        self._wait = wait
        self._files: Iterator[SpoolFile] = abandoned_spools(folder, own)
        self.current: Delivery | None = None
        """Sends the current spool."""
        self._done = False

    @property
    def is_ready(self) -> bool:
        """Whether calling `step` now may send something."""
        return not self._done and (self.current is None or not self.current.is_waiting)

    @property
    def must_go_first(self) -> bool:
        """Whether the current spool belongs to this run.

        Its attempt is older than this process's, and the server orders attempts by arrival: if this process's
        attempt arrived first, the older one would hide it. A second writer's attempt never hides a training's.
        """
        self._open_next()
        if self.current is None or self.current.spool.path.parent != self._own.parent:
            return False
        return is_second_writers(self._own.stem) or not is_second_writers(self.current.spool.path.stem)

    def step(self, envelopes: int) -> bool:
        """Send up to `envelopes`; False when nothing is left, or the server does not take it now."""
        self._open_next()
        if self.current is None:
            return False
        went = self.current.drain(envelopes)
        if not self.current.spool.is_empty:
            if isinstance(self.current.last_error, NotFound) and not self.must_go_first:
                # A second writer's, of a run that is not there yet: left to a later process.
                self._leave_current()
                return True
            return went
        _LOG.info("sent %d reports left in %s", self.current.counts.sent, self.current.spool.path)
        self.current.spool.close()
        self.current = None
        return True

    def _open_next(self) -> None:
        if self.current is not None or self._done:
            return
        spool = next(self._files, None)
        if spool is None:
            self._done = True
        else:
            self.current = Delivery(
                self._transport,
                spool,
                self._limits,
                ReportCounts(),
                wait=self._wait,
                on_unreachable=self._on_unreachable,
            )

    def close(self) -> None:
        """Leave the rest to the next run."""
        self._done = True
        self._leave_current()

    def _leave_current(self) -> None:
        if self.current is not None:
            self.current.spool.close()
            self.current = None


@dataclass
class SpoolOutcome:
    """The outcome of one spool file."""

    run_id: str
    stream_id: str
    sent: int
    dropped: dict[str, int]
    bytes_left: int


@dataclass
class ReplayOutcome:
    """The outcome of a folder's spools. `in_use` counts spools whose process is alive and sends them itself."""

    spools: list[SpoolOutcome] = field(default_factory=list)
    in_use: int = 0
    error: str | None = None


def send_spools(
    folder: Path,
    transport: Transport,
    seconds: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> ReplayOutcome:
    """Send every spool that nobody holds, oldest first; stops where the server does not take one in time."""
    outcome = ReplayOutcome()
    deadline = clock() + seconds

    def wait(pause: float) -> bool:
        sleep(min(pause, max(0.0, deadline - clock())))
        return clock() >= deadline

    for spool in abandoned_spools(folder, folder):
        delivery = Delivery(transport, spool, DeliveryLimits(), ReportCounts(), wait=wait, clock=clock)
        while not spool.is_empty:
            if delivery.drain(_ENVELOPES_AT_ONCE, now=True):
                continue
            if isinstance(delivery.last_error, NotAuthorised | NotFound) or (
                delivery.last_error and wait(delivery.pause_seconds)
            ):
                break
        counts, path = delivery.counts, spool.path
        outcome.spools.append(
            SpoolOutcome(path.parent.name, path.stem, counts.sent, counts.dropped, spool.bytes_left)
        )
        spool.close()
        if delivery.last_error is not None:
            outcome.error = str(delivery.last_error)
            if not isinstance(delivery.last_error, NotFound):
                break
    else:
        outcome.in_use = len(waiting_spools(folder))
    return outcome
