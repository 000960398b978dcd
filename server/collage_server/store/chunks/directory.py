"""Which chunks runs have: what reading and sealing look at before they touch a block."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Final, NamedTuple

from cachetools import LRUCache
from sqlalchemy import Connection, case, func, select

from collage_server.store import schema

__all__ = ["LEVELS", "ChunkInfo", "Directories", "read_chunk_infos"]

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


def read_chunk_infos(connection: Connection, run_ids: Sequence[str]) -> dict[str, list[ChunkInfo]]:
    """What chunks each run has, oldest first."""
    table = schema.point_chunk
    held = [func.sum(case((table.c.level == level, table.c.point_count), else_=0)) for level in LEVELS]
    columns = (
        func.sum(case((table.c.level == 1, 1), else_=0)),
        func.min(table.c.first_step),
        func.max(table.c.last_step),
        *held,
    )
    rows = connection.execute(
        select(table.c.run_id, table.c.attempt, table.c.chunk, *columns)
        .where(table.c.run_id.in_(run_ids))
        .group_by(table.c.run_id, table.c.attempt, table.c.chunk)
        .order_by(table.c.run_id, table.c.attempt, table.c.chunk)
    ).all()
    found: dict[str, list[ChunkInfo]] = {run_id: [] for run_id in run_ids}
    for run_id, attempt, chunk, parts, first_step, last_step, fine, middle, coarse in rows:
        count = int(LEVELS[1] * middle or fine or LEVELS[2] * coarse)
        levels = _LEVELS_OF[fine > 0, middle > 0, coarse > 0]
        found[run_id].append(ChunkInfo(attempt, chunk, int(parts), count, first_step, last_step, levels))
    return found


class Directories:
    """Chunk infos kept in memory, up to a number of chunks.

    Parts come only together with ranges of reports that they seal, and levels only go: as long as a run has the
    same ranges and as many rows, its chunks are the same.
    """

    def __init__(self, limit: int) -> None:
        self._kept: LRUCache[str, tuple[object, Sequence[ChunkInfo]]] = LRUCache(limit, getsizeof=_chunks)
        self._lock = Lock()

    def read(self, connection: Connection, sealed: Mapping[str, object]) -> dict[str, Sequence[ChunkInfo]]:
        """What chunks each run has, oldest first; `sealed` is, by run, what tells its sealed ranges from others."""
        table = schema.point_chunk
        counted = select(table.c.run_id, func.count()).where(table.c.run_id.in_(sealed)).group_by(table.c.run_id)
        counts = {row[0]: row[1] for row in connection.execute(counted)}
        states = {run_id: (ranges, counts.get(run_id, 0)) for run_id, ranges in sealed.items()}
        with self._lock:
            kept = {run_id: self._kept.get(run_id) for run_id in sealed}
        found = {run_id: held[1] for run_id, held in kept.items() if held and held[0] == states[run_id]}
        if missing := [run_id for run_id in sealed if run_id not in found]:
            fresh = read_chunk_infos(connection, missing)
            found |= fresh
            with self._lock:
                for run_id, infos in fresh.items():
                    if len(infos) < self._kept.maxsize:
                        self._kept[run_id] = (states[run_id], infos)
        return found


def _chunks(kept: tuple[object, Sequence[ChunkInfo]]) -> int:
    return 1 + len(kept[1])
