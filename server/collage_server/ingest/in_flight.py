"""Back-pressure: bytes of request bodies that are read but not yet answered, so few that none waits for long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from collage_server.errors import Busy

__all__ = ["Held", "InFlight"]


_LEAST: Final = 2**20
_CUT: Final = 0.7
_GROWTH: Final = 0.1


class InFlight:
    """A budget of bytes; used on the event loop only, so without a lock.

    At most `limit`, and at any moment `allowed`: less when reports have lately waited longer than `wait_seconds`
    for their commit, whatever the reason, and more again as they do not. It falls by a share, and grows by a share
    of what is acknowledged in time.
    """

    def __init__(
        self, limit: int, *, wait_seconds: float = 0.25, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.allowed = limit
        self.bytes = 0
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._next_cut = -math.inf

    def waited(self, seconds: float, size: int) -> None:
        """Learn from a body that was acknowledged so long after it had been read; it still holds its room."""
        if seconds <= self._wait_seconds:
            self.allowed = min(self.limit, self.allowed + int(_GROWTH * size))
        elif self._clock() >= self._next_cut:
            # Those in flight now were let in before this cut: they tell nothing about it.
            self._next_cut = self._clock() + seconds
            self.allowed = min(self.limit, max(_LEAST, int(_CUT * min(self.allowed, self.bytes))))

    def hold(self, size: int) -> Held:
        """Take `size` bytes from the budget while the context that is entered lasts.

        A single body always passes when nothing else is in flight, however small the budget.

        Raises:
            Busy: they do not fit (on entering).
        """
        return Held(self, size)


class Held:
    """One request's part of the budget."""

    def __init__(self, budget: InFlight, asked: int) -> None:
        self.size = 0
        self._budget = budget
        self._asked = asked

    def __enter__(self) -> Held:
        self.resize(self._asked)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.bytes -= self.size

    def resize(self, size: int) -> None:
        """Hold so many bytes from now on.

        Raises:
            Busy: they do not fit beside what others hold.
        """
        others = self._budget.bytes - self.size
        if size > self.size and others and others + size > self._budget.allowed:
            raise Busy(
                f"{others} bytes of other bodies are in flight, at most {self._budget.allowed} in all now; "
                "send this one again later",
                limit=self._budget.allowed,
                retry_after_seconds=1,
            )
        self._budget.bytes = others + size
        self.size = size
