"""Coarse columns kept in memory, because all curves of a run read the same few.

A column's key describes its chunks in the reader's snapshot. Sealing a late part or dropping a level changes the
key, so a stale column is never found. Without this cache a curve of 100,000 points costs 1.7 times the CPU of the
whole question, 50 runs of 10,000 points 1.55 times.

`reading/snapshot.py` owns it within a share of the memory budget, `points.py` reads through it. Emptying it changes
no answer, so keys and bounds are free.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import replace
from threading import Lock
from typing import Any

from cachetools import LRUCache
from numpy.typing import NDArray

from collage_server.store.chunks.point_merging import POINT_COLUMNS, AttemptPoints

__all__ = ["ColumnCache"]


class ColumnCache:
    """Points of attempts with the columns read so far; the least recently used dropped beyond a number of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._tables: LRUCache[Hashable, AttemptPoints] = LRUCache(limit_bytes, getsizeof=_bytes)
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        """What is kept."""
        return int(self._tables.currsize)

    def get(self, place: Hashable, totals: Collection[str], metrics: Collection[str]) -> AttemptPoints | None:
        """The table kept for a place, if it has these totals, and the extremes of these metrics."""
        with self._lock:
            table = self._tables.get(place)
            if table is None or not table.totals.keys() >= set(totals):
                return None
            if not table.extremes.keys() >= set(metrics):
                return None
        chosen = {metric: table.extremes[metric] for metric in metrics}
        return replace(table, totals={key: table.totals[key] for key in totals}, extremes=chosen)

    def put(self, place: Hashable, table: AttemptPoints) -> None:
        """Keep a copy of the table's columns beside those that are kept for the place already."""
        own = _copied(table)
        with self._lock:
            old = self._tables.pop(place, None)
            if old is not None:
                own = replace(own, totals=old.totals | own.totals, extremes=old.extremes | own.extremes)
            if _bytes(own) <= self._tables.maxsize:
                self._tables[place] = own


def _copied(table: AttemptPoints) -> AttemptPoints:
    """Arrays of their own, that nobody can write to."""
    counted: dict[str, Any] = {name: _frozen(getattr(table, name)) for name in POINT_COLUMNS}
    totals = {key: _frozen(array) for key, array in table.totals.items()}
    extremes = {key: (_frozen(low), _frozen(high)) for key, (low, high) in table.extremes.items()}
    return replace(table, **counted, totals=totals, extremes=extremes)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    own = array.copy()
    own.flags.writeable = False
    return own


def _bytes(table: AttemptPoints) -> int:
    return 8 * len(table.steps) * (5 + len(table.totals) + 2 * len(table.extremes))
