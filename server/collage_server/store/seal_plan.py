"""What to seal next: which reports of which attempt become a part of which chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from collage_server.store import schema
from collage_server.store.chunks import ChunkInfo, read_chunk_infos
from collage_server.store.contract import SealLimits
from collage_server.store.run_view import RunView

__all__ = ["SealPlan", "leftovers", "plan_seal"]


@dataclass(frozen=True, eq=False)
class SealPlan:
    """Reports (stream_id, seq) that become one part of a chunk; `info` is the chunk so far, None for a new one."""

    attempt: int
    chunk: int
    part: int
    first_step: int
    last_step: int
    reports: frozenset[tuple[str, int]]
    info: ChunkInfo | None


@dataclass(frozen=True)
class _Entry:
    stream_id: str
    seq: int
    step: int
    measured: bool
    bytes: int


def leftovers(connection: Connection, view: RunView) -> list[tuple[str, int]]:
    """Journal rows that stand in chunks already: a sealing that was interrupted before it deleted them."""
    table = schema.report
    rows = connection.execute(select(table.c.stream_id, table.c.seq).where(table.c.run_id == view.run_id))
    return [(row.stream_id, row.seq) for row in rows if view.sealed(row.stream_id, row.seq)]


def plan_seal(
    connection: Connection, view: RunView, limits: SealLimits, *, closed: bool, stale_after_seconds: float
) -> SealPlan | None:
    """The next part to make, None when nothing is due. `closed`: the run is over, its tail is sealed too."""
    entries = _journal(connection, view)
    infos = read_chunk_infos(connection, view.run_id)
    newest = max(entries, default=0)
    for attempt, members in sorted(entries.items()):
        own = [info for info in infos if info.attempt == attempt]
        over = closed or attempt < newest
        ready = None if over else _ready_step(connection, view, attempt, stale_after_seconds)
        plan = _late(attempt, members, own, limits, over) or _next(attempt, members, own, limits, over, ready)
        if plan is not None:
            return plan
    return None


def _journal(connection: Connection, view: RunView) -> dict[int, list[_Entry]]:
    """Unsealed reports by attempt, without their blocks."""
    table = schema.report
    size = func.coalesce(func.length(table.c.statistics), 0) + func.coalesce(func.length(table.c.model), 0)
    columns = (table.c.stream_id, table.c.seq, table.c.step, table.c.model.is_not(None).label("measured"))
    rows: Sequence[Row[Any]] = connection.execute(
        select(*columns, size.label("bytes")).where(table.c.run_id == view.run_id)
    ).all()
    found: dict[int, list[_Entry]] = defaultdict(list)
    for row in rows:
        stream = view.streams.get(row.stream_id)
        if stream is not None and not view.sealed(row.stream_id, row.seq):
            found[stream.attempt].append(_Entry(row.stream_id, row.seq, row.step, bool(row.measured), row.bytes))
    return found


def _ready_step(connection: Connection, view: RunView, attempt: int, stale_after_seconds: float) -> int:
    """The step that every live rank of the attempt has passed; silent ranks hold nobody back."""
    table = schema.run_latest
    rows = connection.execute(
        select(table.c.measured_step, table.c.last_step, table.c.last_report_at).where(
            table.c.run_id == view.run_id, table.c.attempt == attempt, table.c.last_report_at.is_not(None)
        )
    ).all()
    if not rows:
        return -1
    freshest = max(row.last_report_at for row in rows)
    live = [row for row in rows if row.last_report_at >= freshest - stale_after_seconds]
    measuring = [row.measured_step for row in live if row.measured_step is not None]
    return int(min(measuring) if measuring else min(row.last_step for row in live) - 1)


def _late(
    attempt: int, entries: Sequence[_Entry], infos: Sequence[ChunkInfo], limits: SealLimits, over: bool
) -> SealPlan | None:
    """Reports of steps that are sealed already: a part of their own, once there are enough of them."""
    if not infos:
        return None
    late = [entry for entry in entries if entry.step <= infos[-1].last_step]
    if not late or (len(late) < limits.late_rows and not over):
        return None
    info = next(info for info in infos if min(entry.step for entry in late) <= info.last_step)
    chosen = [entry for entry in late if entry.step <= info.last_step]
    return _plan(attempt, info.chunk, info.parts, chosen, info)


def _next(
    attempt: int,
    entries: Sequence[_Entry],
    infos: Sequence[ChunkInfo],
    limits: SealLimits,
    over: bool,
    ready: int | None,
) -> SealPlan | None:
    """The reports after the last sealed step: as many measured points as make a part, or what is due."""
    open_chunk = infos[-1] if infos and infos[-1].count < limits.points else None
    after = infos[-1].last_step if infos else -1
    fresh = [entry for entry in entries if entry.step > after and (ready is None or entry.step <= ready)]
    if not fresh:
        return None
    room = min(limits.points - (open_chunk.count if open_chunk else 0), limits.part_points)
    cutoff = _cutoff(fresh, room, limits, over)
    if cutoff is None:
        return None
    chosen = [entry for entry in fresh if entry.step <= cutoff]
    chunk = open_chunk.chunk if open_chunk else (infos[-1].chunk + 1 if infos else 0)
    return _plan(attempt, chunk, open_chunk.parts if open_chunk else 0, chosen, open_chunk)


def _cutoff(fresh: Sequence[_Entry], room: int, limits: SealLimits, over: bool) -> int | None:
    """The last step to seal: where the part is full, or the bytes are; everything when the attempt is over."""
    sizes: dict[int, int] = defaultdict(int)
    for entry in fresh:
        if entry.measured:
            sizes[entry.step] += entry.bytes
    total, cutoff = 0, None
    for count, step in enumerate(sorted(sizes), start=1):
        total += sizes[step]
        cutoff = step
        if count == room or total >= limits.bytes:
            return step
    if over or (not sizes and len(fresh) >= limits.rows):
        return max(entry.step for entry in fresh)
    return cutoff if len(fresh) >= limits.rows else None


def _plan(attempt: int, chunk: int, part: int, chosen: Sequence[_Entry], info: ChunkInfo | None) -> SealPlan:
    return SealPlan(
        attempt=attempt,
        chunk=chunk,
        part=part,
        first_step=min(entry.step for entry in chosen),
        last_step=max(entry.step for entry in chosen),
        reports=frozenset((entry.stream_id, entry.seq) for entry in chosen),
        info=info,
    )
