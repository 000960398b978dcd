"""What this server depends on: database, archive, identity provider, targets of messages. One state for each.

Whoever talks to one says `fails` or `works`; /readyz, /metrics, `status` and the log tell the state, the log once
for each change (`tests/server/test_background.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock

__all__ = ["Dependency"]

_LOG = logging.getLogger(__name__)


class Dependency:
    """Whether something answers, since when it does not, and its last error; any thread may say so."""

    def __init__(self, name: str, *, clock: Callable[[], float] = time.time) -> None:
        self.name = name
        self.away_since: float | None = None
        self.last_error = ""
        """For the log alone: it may name hosts and addresses."""
        self._clock = clock
        self._lock = Lock()

    @property
    def away_seconds(self) -> float:
        """For how long it has not answered; 0 while it does."""
        since = self.away_since
        return 0.0 if since is None else max(self._clock() - since, 0.0)

    def fails(self, error: str) -> None:
        """Begin an outage, or keep its newest error."""
        with self._lock:
            self.last_error, begins = " ".join(error.split()), self.away_since is None
            if begins:
                self.away_since = self._clock()
        if begins:
            _LOG.warning("%s does not answer: %s", self.name, self.last_error)

    def works(self) -> None:
        """End the outage, if there was one, and log for how long it lasted."""
        with self._lock:
            if self.away_since is None:
                return
            seconds, self.away_since = self.away_seconds, None
        _LOG.warning("%s answers again, after %.0f s; its last error: %s", self.name, seconds, self.last_error)
