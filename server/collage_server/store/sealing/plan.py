"""What to seal next: which reports of which attempt become a part of which chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from sqlalchemy import Connection, func, select

from collage_server.store import schema
from collage_server.store.chunks.blocks import read_point_rows
from collage_server.store.chunks.directory import LEVELS, ChunkInfo, read_chunk_infos
from collage_server.store.contract import SealLimits
from collage_server.store.reading.run_view import RunView
from collage_server.store.runs.latest import waited_for

__all__ = ["Journal", "SealPlan", "plan_seal", "read_journal"]


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

    def numbers(self) -> dict[str, list[int]]:
        """The reports' seq by stream, both sorted."""
        found: dict[str, list[int]] = defaultdict(list)
        for stream_id, seq in sorted(self.reports):
            found[stream_id].append(seq)
        return found


@dataclass(frozen=True)
class _Entry:
    stream_id: str
    seq: int
    step: int
    measured: bool
    bytes: int


@dataclass(frozen=True, eq=False)
class Journal:
    """What one look found in a run's journal, without the blocks: of each stream the oldest rows, so many at most.

    `leftovers` (stream_id, seq) stand in chunks already: a sealing was interrupted before it deleted them.
    `entries` are the others by attempt; `ready`, by attempt, is the step that every live rank has passed and the
    look covers, None when the attempt is over. `crowded` attempts have streams with more rows than were looked at.
    """

    leftovers: list[tuple[str, int]]
    entries: dict[int, list[_Entry]]
    ready: dict[int, int | None]
    crowded: frozenset[int]

    def without(self, reports: frozenset[tuple[str, int]]) -> Journal:
        """What is left when these are sealed."""
        left = {
            attempt: [entry for entry in members if (entry.stream_id, entry.seq) not in reports]
            for attempt, members in self.entries.items()
        }
        return Journal(
            [], {attempt: members for attempt, members in left.items() if members}, self.ready, self.crowded
        )


def read_journal(
    connection: Connection, view: RunView, limits: SealLimits, *, closed: bool, stale_after_seconds: float
) -> Journal:
    """One look. `closed`: the run is over, its tail is sealed too."""
    leftovers: list[tuple[str, int]] = []
    entries: dict[int, list[_Entry]] = defaultdict(list)
    covered: dict[int, int] = {}
    most = max(2 * limits.points, 2 * limits.rows // max(len(view.streams), 1))
    for stream in view.streams.values():
        rows = _oldest(connection, view.run_id, stream.stream_id, most)
        done = {entry.seq for entry in rows if view.sealed(stream.stream_id, entry.seq)}
        leftovers += [(stream.stream_id, seq) for seq in done]
        if len(rows) > len(done):
            entries[stream.attempt] += [entry for entry in rows if entry.seq not in done]
        if len(rows) == most:
            # More rows of the last step may stand beyond the look.
            last = max(entry.step for entry in rows)
            last -= last > min(entry.step for entry in rows)
            covered[stream.attempt] = min(last, covered.get(stream.attempt, last))
    newest = max(entries, default=0)
    ready: dict[int, int | None] = {}
    for attempt in entries:
        over = closed or attempt < newest
        bounds = [] if over else [_ready_step(connection, view, attempt, stale_after_seconds)]
        bounds += [covered[attempt]] if attempt in covered else []
        ready[attempt] = min(bounds, default=None)
    return Journal(leftovers, entries, ready, frozenset(covered))


def _oldest(connection: Connection, run_id: str, stream_id: str, most: int) -> list[_Entry]:
    """A stream's oldest rows, in the key's order: a long queue is not read to its end."""
    table = schema.report
    size = func.coalesce(func.length(table.c.statistics), 0) + func.coalesce(func.length(table.c.model), 0)
    rows = connection.execute(
        select(table.c.seq, table.c.step, table.c.model.is_not(None), size)
        .where(table.c.run_id == run_id, table.c.stream_id == stream_id)
        .order_by(table.c.seq)
        .limit(most)
    )
    return [_Entry(stream_id, seq, step, bool(measured), length) for seq, step, measured, length in rows]


def plan_seal(connection: Connection, view: RunView, journal: Journal, limits: SealLimits) -> SealPlan | None:
    """The next part to make, None when nothing is due."""
    infos = read_chunk_infos(connection, [view.run_id])[view.run_id]
    for attempt, members in sorted(journal.entries.items()):
        own = [info for info in infos if info.attempt == attempt]
        ready = journal.ready[attempt]
        plan = _late(attempt, members, own, limits, ready is None)
        room = _room(connection, view.run_id, own, limits)
        plan = plan or _next(attempt, members, own, room, limits, ready, attempt in journal.crowded)
        if plan is not None:
            return plan
    return None


def _ready_step(connection: Connection, view: RunView, attempt: int, stale_after_seconds: float) -> int:
    """The step that every rank of the attempt has passed; who is silent or measures no more holds nobody back."""
    table = schema.run_latest
    rows = connection.execute(
        select(table).where(
            table.c.run_id == view.run_id, table.c.attempt == attempt, table.c.last_report_at.is_not(None)
        )
    ).all()
    if not rows:
        return -1
    live = waited_for(connection, view.run_id, attempt, rows, stale_after_seconds)
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


def _room(connection: Connection, run_id: str, infos: Sequence[ChunkInfo], limits: SealLimits) -> int:
    """Measured points for which the newest chunk has room; late parts tell of steps that it holds already."""
    if not infos or infos[-1].levels != {LEVELS[0]}:
        return 0
    newest = infos[-1]
    held = newest.point_count
    if newest.parts > 1:
        points = read_point_rows(connection, LEVELS[0], {(run_id, newest.attempt): [newest.chunk]})
        held = len(np.unique(points.steps))
    return max(limits.points - held, 0)


def _next(
    attempt: int,
    entries: Sequence[_Entry],
    infos: Sequence[ChunkInfo],
    room: int,
    limits: SealLimits,
    ready: int | None,
    crowded: bool,
) -> SealPlan | None:
    """The reports after the last sealed step: all that are due, as far as the chunk has `room` (0: a new chunk)."""
    open_chunk = infos[-1] if room else None
    after = infos[-1].last_step if infos else -1
    fresh = [entry for entry in entries if entry.step > after and (ready is None or entry.step <= ready)]
    if not fresh:
        return None
    crowded = crowded or len(fresh) >= limits.rows
    cutoff = _cutoff(fresh, room or limits.points, limits, over=ready is None, crowded=crowded)
    if cutoff is None:
        return None
    chosen = [entry for entry in fresh if entry.step <= cutoff]
    chunk = open_chunk.chunk if open_chunk else (infos[-1].chunk + 1 if infos else 0)
    return _plan(attempt, chunk, open_chunk.parts if open_chunk else 0, chosen, open_chunk)


def _cutoff(fresh: Sequence[_Entry], room: int, limits: SealLimits, *, over: bool, crowded: bool) -> int | None:
    """The last step to seal: where the chunk is full, or the bytes are; everything when the attempt is over.

    Otherwise whole multiples of `part_points`, so that parts are alike; less only when too many rows wait.
    """
    sizes: dict[int, int] = defaultdict(int)
    for entry in fresh:
        if entry.measured:
            sizes[entry.step] += entry.bytes
    steps = sorted(sizes)[:room]
    for step, total in zip(steps, accumulate(sizes[step] for step in steps), strict=True):
        if total >= limits.bytes:
            return step
    if len(steps) == room:
        return steps[-1]
    if over or (crowded and not steps):
        return max(entry.step for entry in fresh)
    parts = len(steps) // limits.part_points
    if parts:
        return steps[parts * limits.part_points - 1]
    return steps[-1] if crowded else None


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
