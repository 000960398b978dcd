"""Back-pressure: bytes of report bodies that are read but not yet acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from collage_server.errors import Busy

__all__ = ["InFlight"]


class InFlight:
    """A budget of bytes; used on the event loop only, so without a lock."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Take `size` bytes from the budget while the context lasts.

        A single body always passes when nothing else is in flight, however small the budget.

        Raises:
            Busy: they do not fit.
        """
        if self.bytes and self.bytes + size > self.limit:
            raise Busy(
                f"{self.bytes} bytes of reports are in flight, at most {self.limit}; send this batch again later",
                limit=self.limit,
                retry_after_seconds=1,
            )
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size
