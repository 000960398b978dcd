"""What ingest counts about itself, for /metrics."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

__all__ = ["COMMIT_BUCKETS", "IngestCounters"]

COMMIT_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds, in seconds, of the histogram of commit durations."""


@dataclass
class IngestCounters:
    """Reports by outcome, and commits by duration. Thread-safe."""

    reports: dict[str, int] = field(
        default_factory=lambda: {"accepted": 0, "duplicate": 0, "rejected": 0, "late": 0}
    )
    commits: list[int] = field(default_factory=lambda: [0] * (len(COMMIT_BUCKETS) + 1))
    commit_seconds: float = 0.0
    _lock: Lock = field(default_factory=Lock)

    def count(self, *, accepted: int = 0, duplicates: int = 0, rejected: int = 0, late: int = 0) -> None:
        """Add outcomes of reports."""
        with self._lock:
            self.reports["accepted"] += accepted
            self.reports["duplicate"] += duplicates
            self.reports["rejected"] += rejected
            self.reports["late"] += late

    def committed(self, seconds: float) -> None:
        """Add one commit."""
        with self._lock:
            self.commits[bisect_left(COMMIT_BUCKETS, seconds)] += 1
            self.commit_seconds += seconds
