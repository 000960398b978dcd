"""Work beside the requests: a thread that looks, once an interval, whether there is something to do."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Event, Thread
from typing import Final

__all__ = ["Background"]

_LOG: Final = logging.getLogger(__name__)


class Background(ABC):
    """A daemon thread that looks every `interval_seconds`; a look that fails is logged, the next one tries again.

    It may be stopped at any point without harm: a look asks `stopping` between slices of its work.
    """

    def __init__(self, name: str, *, interval_seconds: float) -> None:
        self.stopping = Event()
        self._woken = Event()
        self._name = name
        self._interval_seconds = interval_seconds
        self._thread: Thread | None = None

    @abstractmethod
    def look(self) -> None:
        """Do what is due."""

    def start(self) -> None:
        """Start the thread."""
        self.stopping.clear()
        self._thread = Thread(target=self._run, name=f"collage-{self._name}", daemon=True)
        self._thread.start()

    def stop(self, deadline_seconds: float) -> None:
        """End after the slice at hand, or leave it unfinished at the deadline."""
        self.stopping.set()
        self.wake()
        if self._thread is not None:
            self._thread.join(deadline_seconds)
            self._thread = None

    def wake(self) -> None:
        """Look now, whatever is left of the interval."""
        self._woken.set()

    def attempt(self, work: Callable[[], object]) -> None:
        """Do it; what fails is logged and ends nothing."""
        try:
            work()
        except Exception:
            _LOG.exception("%s failed; the next look tries again", self._name)

    def _run(self) -> None:
        while not self.stopping.is_set():
            self._woken.wait(self._interval_seconds)
            self._woken.clear()
            if not self.stopping.is_set():
                self.attempt(self.look)
