"""Which chunks a run has; and coarse columns kept in memory, because all curves of a run read the same few.

The key of a column is what the reader's snapshot says of its chunks: sealing a late part or dropping a level
changes the key, so a stale column is never found. Without this cache a curve of 100,000 points costs 1.7 times
the CPU of the whole question, 50 runs of 10,000 points 1.55 times.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from functools import cache
from threading import Lock
from typing import Any, Final, NamedTuple

from cachetools import LRUCache
from numpy.typing import NDArray
from sqlalchemy import Connection, Select, case, func, select

from collage_server.store import schema
from collage_server.store.chunks.tables import COUNTED, AttemptPoints
from collage_server.store.rows import among

__all__ = ["ColumnCache", "ChunkInfo", "LEVELS", "read_chunk_infos"]

LEVELS: Final = (1, 16, 256)
"""Measured points that one point of a level merges."""
_LEVELS_OF: Final = {
    held: frozenset(level for level, there in zip(LEVELS, held, strict=True) if there)
    for held in itertools.product((False, True), repeat=len(LEVELS))
}


class ChunkInfo(NamedTuple):
    """One chunk of an attempt, all parts together; `levels` are those that it has.

    `point_count` is what its coarse points stand for; before it has some, points of late parts count again. A
    frozen chunk has lost its level 1 to retention: `parts` is 0.
    """

    attempt: int
    chunk: int
    parts: int
    point_count: int
    first_step: int
    last_step: int
    levels: frozenset[int]

    @property
    def frozen(self) -> bool:
        """Whether only coarse levels are left."""
        return 1 not in self.levels


@cache
def _chunks_of_runs() -> Select[Any]:
    table = schema.point_chunk
    held = [func.sum(case((table.c.level == level, table.c.point_count), else_=0)) for level in LEVELS]
    columns = (
        func.sum(case((table.c.level == 1, 1), else_=0)),
        func.min(table.c.first_step),
        func.max(table.c.last_step),
        *held,
    )
    place = (table.c.run_id, table.c.attempt, table.c.chunk)
    return select(*place, *columns).where(among(table.c.run_id)).group_by(*place).order_by(*place)


def read_chunk_infos(connection: Connection, run_ids: Sequence[str]) -> dict[str, list[ChunkInfo]]:
    """What chunks each run has, oldest first."""
    rows = connection.execute(_chunks_of_runs(), {"run_ids": list(run_ids)}).all()
    found: dict[str, list[ChunkInfo]] = {run_id: [] for run_id in run_ids}
    for run_id, attempt, chunk, parts, first_step, last_step, fine, middle, coarse in rows:
        count = int(LEVELS[1] * middle or fine or LEVELS[2] * coarse)
        levels = _LEVELS_OF[fine > 0, middle > 0, coarse > 0]
        found[run_id].append(ChunkInfo(attempt, chunk, int(parts), count, first_step, last_step, levels))
    return found


class ColumnCache:
    """Points of attempts with the columns read so far; the least recently used dropped beyond a number of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._tables: LRUCache[Hashable, AttemptPoints] = LRUCache(limit_bytes, getsizeof=_bytes)
        self._lock = Lock()

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
    counted: dict[str, Any] = {name: _frozen(getattr(table, name)) for name in COUNTED}
    totals = {key: _frozen(array) for key, array in table.totals.items()}
    extremes = {key: (_frozen(low), _frozen(high)) for key, (low, high) in table.extremes.items()}
    return replace(table, **counted, totals=totals, extremes=extremes)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    own = array.copy()
    own.flags.writeable = False
    return own


def _bytes(table: AttemptPoints) -> int:
    return 8 * len(table.steps) * (5 + len(table.totals) + 2 * len(table.extremes))
