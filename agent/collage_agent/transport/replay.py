"""Sending what earlier processes left in their spools, a little at a time beside the run's own reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from collage_agent.settings import DeliveryLimits
from collage_agent.transport.delivery import Delivery
from collage_agent.transport.envelope import Transport
from collage_agent.transport.spool import SpoolFile, abandoned_spools

__all__ = ["Replay"]

_LOG = logging.getLogger("collage_agent")


class Replay:
    """Takes over one abandoned spool after the other, oldest first, under its old stream and in its old order."""

    def __init__(
        self, folder: Path, own: Path, transport: Transport, limits: DeliveryLimits, wait: Callable[[float], bool]
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._wait = wait
        self._files: Iterator[SpoolFile] = abandoned_spools(folder, own)
        self._delivery: Delivery | None = None
        self._done = False

    @property
    def can_go_on(self) -> bool:
        """Whether a `step` now may get something done."""
        return not self._done and (self._delivery is None or not self._delivery.is_waiting)

    def step(self, envelopes: int) -> bool:
        """Send up to `envelopes`; False when nothing is left, or the server does not take it now."""
        if self._delivery is None:
            spool = next(self._files, None)
            if spool is None:
                self._done = True
                return False
            self._delivery = Delivery(self._transport, spool, self._limits, wait=self._wait)
        went = self._delivery.drain(envelopes)
        if not self._delivery.spool.is_empty:
            return went
        _LOG.info("sent %d reports left in %s", self._delivery.sent, self._delivery.spool.path)
        self._delivery.spool.close()
        self._delivery = None
        return True

    def close(self) -> None:
        """Leave the rest to the next run."""
        self._done = True
        if self._delivery is not None:
            self._delivery.spool.close()
            self._delivery = None
