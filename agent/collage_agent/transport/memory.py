"""A transport that keeps what it is given: for tests, and for looking at what would be sent."""

from __future__ import annotations

import threading
from collections.abc import Callable

from collage_agent.transport.envelope import Body, Envelope
from collage_monitor.wire import BatchAnswer, Report, ReportBatch

__all__ = ["MemoryTransport"]


class MemoryTransport:
    """Keeps every message, decoded from its encoded form, and acknowledges it; answers duplicates as a server does.

    `envelopes` also tell project, run and stream of each message.
    """

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []
        self._seen: set[tuple[str, str, int]] = set()
        self._lock = threading.Lock()

    @property
    def messages(self) -> list[Body]:
        """All messages in the order in which they arrived."""
        with self._lock:
            return [envelope.body for envelope in self.envelopes]

    @property
    def reports(self) -> list[Report]:
        """All reports in the order in which they arrived, duplicates included."""
        return [
            report for message in self.messages if isinstance(message, ReportBatch) for report in message.reports
        ]

    def send(self, envelope: Envelope, wait: Callable[[float], bool]) -> BatchAnswer:
        """Keep the message; duplicates are those reports whose (run, stream, seq) was here before."""
        arrived = Envelope.from_bytes(envelope.to_bytes())
        with self._lock:
            self.envelopes.append(arrived)
            if not isinstance(arrived.body, ReportBatch):
                return BatchAnswer(accepted=0, duplicates=0)
            keys = [(arrived.run_id, arrived.stream_id, report.seq) for report in arrived.body.reports]
            fresh = set(keys) - self._seen
            self._seen |= fresh
            return BatchAnswer(accepted=len(fresh), duplicates=len(keys) - len(fresh))

    def close(self) -> None:
        """Nothing to let go of."""
