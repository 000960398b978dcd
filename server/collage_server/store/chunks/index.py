"""Which chunks a run has, at which levels, over which steps: read without their points."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Select, case, func, select

from collage_server.store import schema
from collage_server.store.rows import among

__all__ = ["LEVELS", "ChunkInfo", "read_chunk_infos"]

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
