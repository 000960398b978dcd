"""Back-pressure: bytes of request bodies that are read but not yet answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from collage_server.errors import Busy

__all__ = ["Held", "InFlight"]


class InFlight:
    """A budget of bytes; used on the event loop only, so without a lock."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0

    @contextmanager
    def hold(self, size: int) -> Iterator[Held]:
        """Take `size` bytes from the budget while the context lasts.

        A single body always passes when nothing else is in flight, however small the budget.

        Raises:
            Busy: they do not fit.
        """
        held = Held(self)
        held.resize(size)
        try:
            yield held
        finally:
            self.bytes -= held.size


class Held:
    """One request's part of the budget."""

    def __init__(self, budget: InFlight) -> None:
        self.size = 0
        self._budget = budget

    def resize(self, size: int) -> None:
        """Hold so many bytes from now on.

        Raises:
            Busy: they do not fit beside what others hold.
        """
        others = self._budget.bytes - self.size
        if size > self.size and others and others + size > self._budget.limit:
            raise Busy(
                f"{others} bytes of other bodies are in flight, at most {self._budget.limit} in all; "
                "send this one again later",
                limit=self._budget.limit,
                retry_after_seconds=1,
            )
        self._budget.bytes = others + size
        self.size = size
