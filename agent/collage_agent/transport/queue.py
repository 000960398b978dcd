"""The bounded queue between the training thread and the worker: putting never blocks, the oldest goes first."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, Protocol, TypeVar

__all__ = ["BoundedQueue", "Weighed"]


class Weighed(Protocol):
    """Something with a memory size. Items of size 0 are control items: never dropped and not counted."""

    @property
    def size_bytes(self) -> int:
        """Memory that the item keeps alive."""


_Item = TypeVar("_Item", bound=Weighed)


class BoundedQueue(Generic[_Item]):
    """First in, first out, at most `items` items and `size_bytes` bytes; `dropped` counts what did not fit.

    The lock is held for a few operations only, by both sides, so the training thread never waits for the network,
    the disk or the device.
    """

    def __init__(self, items: int, size_bytes: int) -> None:
        self._limit_items = items
        self._limit_bytes = size_bytes
        self._ready = threading.Condition(threading.Lock())
        self._items: deque[_Item] = deque()
        self._bytes = 0
        self._urgent = False
        self.dropped = 0

    def put(self, item: _Item) -> None:
        """Append an item; when there is no room the oldest ones that may be dropped give way."""
        with self._ready:
            self._items.append(item)
            self._bytes += item.size_bytes
            self._make_room()
            if len(self._items) == 1 or self._half_full():
                self._ready.notify()

    def take(self, limit: int) -> list[_Item]:
        """Up to `limit` items, oldest first; none when there are none."""
        with self._ready:
            taken = [self._items.popleft() for _ in range(min(limit, len(self._items)))]
            self._bytes -= sum(item.size_bytes for item in taken)
            return taken

    def wait_for_items(self, linger_seconds: float, longest_seconds: float) -> None:
        """Wait for a first item, at most `longest_seconds`, then `linger_seconds` for company; `wake` ends both."""
        with self._ready:
            self._ready.wait_for(lambda: bool(self._items) or self._urgent, longest_seconds)
            if self._items:
                self._ready.wait_for(lambda: self._urgent or self._half_full(), linger_seconds)

    def wake(self) -> None:
        """From now on nobody waits: the run is ending."""
        with self._ready:
            self._urgent = True
            self._ready.notify_all()

    def __len__(self) -> int:
        with self._ready:
            return len(self._items)

    def _half_full(self) -> bool:
        return 2 * len(self._items) >= self._limit_items or 2 * self._bytes >= self._limit_bytes

    def _make_room(self) -> None:
        kept: list[_Item] = []
        while self._items and (self._bytes > self._limit_bytes or len(self._items) > self._limit_items):
            oldest = self._items.popleft()
            if oldest.size_bytes == 0:
                kept.append(oldest)
            else:
                self._bytes -= oldest.size_bytes
                self.dropped += 1
        self._items.extendleft(reversed(kept))
