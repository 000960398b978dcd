"""The plan of a run's archived files: groups of chunks while it runs, and at its end the rest.

`archiving.py` carries it out. Sizes of groups are free; which chunks a file holds is stored in `segment`
(`tests/server/store/test_archived.py`).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from sqlalchemy import Connection, Table, select

from collage_server.store import schema
from collage_server.store.archive.segments import model_level
from collage_server.store.chunks.blobs import LEVELS, ChunkInfo, read_chunk_infos
from collage_server.store.records import UNBOUNDED, first_hidden_steps
from collage_server.store.row_helpers import require_run
from collage_server.store.runs.reported_state import all_ranks_are_through
from collage_server.store.runs.run_store import OF_ATTEMPTS, attempts_of_runs, rows_by_run

__all__ = ["FilePlan", "is_over", "plan_file", "rows_behind", "visible_attempts"]

_CHUNKS: Final = {1: 4, 16: 64}
"""Chunks of a file by level: with more a question about few of its points costs more, with fewer one about many."""
_MOST_CHUNKS: Final = 512
"""Of a file at any other level, and in one statement that deletes their rows."""
_Chunks = dict[tuple[int, int], set[int]]
"""(attempt, level) → numbers of chunks."""


@dataclass(frozen=True)
class FilePlan:
    """Chunks of an attempt that become a file at a level (`model_level`: of the model)."""

    attempt: int
    level: int
    chunks: tuple[int, ...]


def plan_file(connection: Connection, run_id: str, *, over: bool) -> FilePlan | None:
    """The next file to make of the run's chunks, None where none is due: layers first, then the model's totals."""
    infos = read_chunk_infos(connection, [run_id])[run_id]
    archived = _archived(connection, run_id)
    plan = next(_due(infos, _with_rows(connection, schema.layer_chunk, run_id), archived, over=over), None)
    if plan is None and over:
        visible = visible_attempts(connection, run_id)
        seen = [info for info in infos if info.attempt in visible]
        plan = next(_due_of_model(seen, _with_rows(connection, schema.model_chunk, run_id), archived), None)
    return plan


def _due(infos: Sequence[ChunkInfo], held: _Chunks, archived: _Chunks, *, over: bool) -> Iterator[FilePlan]:
    """The next files, oldest first: groups of whole chunks, and the rest of an attempt that has ended.

    Only chunks that hold layers (`held`) do, and are in no file yet.

    Its last chunk, which has no coarse levels, is a file of its own: coarse questions read it beside them.
    """
    newest = max((info.attempt for info in infos), default=0)
    for attempt, members in groupby(infos, lambda info: info.attempt):
        own = list(members)
        for level in LEVELS:
            left = held.get((attempt, level), set()) - archived.get((attempt, level), set())
            chunks = [info for info in own if level in info.levels and info.chunk in left]
            for plan in _groups(attempt, level, chunks):
                if over or attempt < newest or _is_whole(plan, own[-1].chunk):
                    yield plan


def _groups(attempt: int, level: int, infos: Sequence[ChunkInfo]) -> Iterator[FilePlan]:
    size = _CHUNKS.get(level, _MOST_CHUNKS)
    for _, members in groupby(infos, lambda info: (info.chunk // size, LEVELS[1] in info.levels)):
        yield FilePlan(attempt, level, tuple(info.chunk for info in members))


def _is_whole(plan: FilePlan, newest: int) -> bool:
    """Whether it has all chunks of its group, without the attempt's newest one."""
    return len(plan.chunks) == _CHUNKS.get(plan.level, _MOST_CHUNKS) and plan.chunks[-1] < newest


def _due_of_model(infos: Sequence[ChunkInfo], held: _Chunks, archived: _Chunks) -> Iterator[FilePlan]:
    """The same of the model's totals, once a run is over: few files, however long it was.

    The last chunk is apart: retention never drops it, and would keep all that stands beside it.
    """
    for level in LEVELS:
        for attempt, members in groupby(infos, lambda info: info.attempt):
            own = list(members)
            known = sorted(archived.get((attempt, model_level(level)), ()))
            left = held.get((attempt, level), set()).difference(known)
            chunks = [info.chunk for info in own if level in info.levels and info.chunk in left]
            # None may span points of another file.
            places = {
                chunk: (chunk == own[-1].chunk, chunk // _MOST_CHUNKS, bisect(known, chunk)) for chunk in chunks
            }
            for _, some in groupby(chunks, places.__getitem__):
                yield FilePlan(attempt, model_level(level), tuple(some))


def is_over(connection: Connection, run_id: str) -> bool:
    """Whether the run has ended, and all that its ranks sent is there."""
    return require_run(connection, run_id, "state").state != "running" and all_ranks_are_through(connection, run_id)


def visible_attempts(connection: Connection, run_id: str) -> set[int]:
    """Attempts that newer ones do not hide from their first step on."""
    rows = rows_by_run(connection, attempts_of_runs(), [run_id], *OF_ATTEMPTS)[run_id]
    bounds = first_hidden_steps([(row.attempt, row.measured_from) for row in rows])
    return {row.attempt for row in rows if bounds.get(row.attempt, UNBOUNDED) > row.first_step}


def rows_behind(level: int) -> Table:
    """The table whose rows files of a level take the place of."""
    return schema.layer_chunk if level > 0 else schema.model_chunk


def _with_rows(connection: Connection, table: Table, run_id: str) -> _Chunks:
    """Chunks that have rows in a table."""
    columns = (table.c.attempt, table.c.level, table.c.chunk)
    found: _Chunks = {}
    for attempt, level, chunk in connection.execute(select(*columns).where(table.c.run_id == run_id).distinct()):
        found.setdefault((attempt, level), set()).add(chunk)
    return found


def _archived(connection: Connection, run_id: str) -> _Chunks:
    """Chunks that stand in files."""
    table = schema.segment
    columns = (table.c.attempt, table.c.level, table.c.first_chunk, table.c.last_chunk)
    found: _Chunks = {}
    for attempt, level, first, last in connection.execute(select(*columns).where(table.c.run_id == run_id)):
        found.setdefault((attempt, level), set()).update(range(first, last + 1))
    return found
