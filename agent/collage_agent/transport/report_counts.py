"""The one object that counts the outcomes of a process's reports.

The pipeline owns it, and the queue, the spool and the delivery move reports in it; a run's `reports_…` read it. The
sum that its class states is a law (`tests/agent_delivery/test_laws.py`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final, Literal

__all__ = ["Place", "ReportCounts", "given_up"]

Place = Literal["pending", "spooled", "sent", "dropped"]
_WHY: Final = {
    "no_number": "their step had no number yet",
    "queue_full": "more came than could be sent or kept",
    "run_deleted": "the run was deleted on the server",
    "run_refused": "the server refuses the run",
    "spool_failed": "they could not be written to the data folder",
    "spool_full": "the data folder's limit was reached",
    "rejected": "the server rejects them",
    "worker_error": "an error, which the log holds",
}
"""Why reports are given up, in a reader's words; a refusal names its HTTP status."""


def given_up(dropped: Mapping[str, int]) -> str:
    """How many reports were given up, and why: "3 (the server refuses the run)"."""
    refused = "refused with status "
    return ", ".join(
        f"{count} ({_WHY.get(reason) or reason.replace('refused_', refused)})" for reason, count in dropped.items()
    )


class ReportCounts:
    """Each report is in one place: made = pending + spooled + sent + dropped, at any moment and for any thread.

    A report counts as soon as its step is first reported on the training thread: first as one for the step, later
    as several if one cannot hold everything.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: Counter[Place] = Counter()
        self._reasons: Counter[str] = Counter()

    def add(self, reports: int = 1) -> None:
        """New ones, on their way."""
        with self._lock:
            self._places["pending"] += reports

    def move(self, reports: int, source: Place, target: Place, reason: str = "") -> None:
        """Move reports from one count to another, never more than there are; `reason` says why they were
        dropped."""
        with self._lock:
            moved = min(reports, self._places[source])
            self._places[source] -= moved
            self._places[target] += moved
            if target == "dropped" and moved:
                self._reasons[reason] += moved

    def drop(self, reason: str, reports: int = 1) -> None:
        """Give up reports on their way."""
        self.move(reports, "pending", "dropped", reason)

    @property
    def made(self) -> int:
        """All of them."""
        with self._lock:
            return self._places.total()

    @property
    def pending(self) -> int:
        """In the queue, or being sent."""
        return self._places["pending"]

    @property
    def spooled(self) -> int:
        """On disk, waiting for the server."""
        return self._places["spooled"]

    @property
    def sent(self) -> int:
        """Acknowledged by the server, stored now or before."""
        return self._places["sent"]

    @property
    def dropped(self) -> dict[str, int]:
        """Given up, by reason."""
        with self._lock:
            return dict(self._reasons)
