"""What ingest counts about itself, for /metrics."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

__all__ = ["IngestCounters"]

_OUTCOMES: Final = ("accepted", "duplicate", "rejected", "late")
_COMMIT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class IngestCounters:
    """Reports by outcome, and commits by duration, in a registry of their own. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        reports = Counter(
            "collage_server_reports", "Reports received, by outcome.", ["outcome"], registry=self.registry
        )
        self._reports = {outcome: reports.labels(outcome) for outcome in _OUTCOMES}
        self._commits = Histogram(
            "collage_server_commit_seconds",
            "Duration of the commits that make reports durable.",
            buckets=_COMMIT_SECONDS,
            registry=self.registry,
        )

    def count(self, *, accepted: int = 0, duplicates: int = 0, rejected: int = 0, late: int = 0) -> None:
        """Add outcomes of reports."""
        for outcome, count in zip(_OUTCOMES, (accepted, duplicates, rejected, late), strict=True):
            self._reports[outcome].inc(count)

    def committed(self, seconds: float) -> None:
        """Add one commit."""
        self._commits.observe(seconds)
