"""How often each address has failed lately, for rate limits by address."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from time import monotonic

__all__ = ["RecentFailures"]


class RecentFailures:
    """Counts each address's failures within the last `seconds`. Thread-safe.

    Beyond `most_addresses`, the addresses whose last failure is oldest are forgotten.
    """

    def __init__(self, seconds: float, most_addresses: int) -> None:
        self._seconds = seconds
        self._most_addresses = most_addresses
        self._moments: OrderedDict[str | None, list[float]] = OrderedDict()
        self._lock = Lock()

    def add(self, address: str | None) -> None:
        """Note a failure of this address, now."""
        with self._lock:
            self._moments[address] = [*self._recent(address), monotonic()]
            self._moments.move_to_end(address)
            if len(self._moments) > self._most_addresses:
                self._moments.popitem(last=False)

    def count(self, address: str | None) -> int:
        """How many failures of this address are recent."""
        with self._lock:
            return len(self._recent(address))

    def _recent(self, address: str | None) -> list[float]:
        after = monotonic() - self._seconds
        return [moment for moment in self._moments.get(address, ()) if moment > after]
