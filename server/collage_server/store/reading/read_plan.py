"""What to read of a run: the chunks to read with their levels, and the unsealed reports.

`points.py` carries the plan out. The choice of a level is free as long as enough points are left
(`Selection.points`); what is hidden is `run_view.py`'s. That enough points are left, and that answers do not depend
on sealing, is held by `tests/server/test_axes.py`; frozen chunks by `tests/server/store/life.py`, run by
`test_life_sqlite.py` and others.

A point of level n merges n measured points. A frozen chunk has lost level 1 to retention. A late report is
unsealed, though its chunk is sealed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import numpy as np

from collage_server.store.chunks.blobs import LEVELS, ChunkInfo, minimum_key
from collage_server.store.chunks.contributors import Contributors, read_contributors
from collage_server.store.reading.run_view import RunView
from collage_server.store.reading.unsealed import UnsealedReports
from collage_server.store.records import UNBOUNDED, IntArray, Selection

__all__ = ["ReadPlan", "plan_read"]

_COARSE_FROM: Final = {16: 8, 256: 128}
"""A level is used when more than so many measured points fall on one wanted: at least half of them are left."""


@dataclass(frozen=True)
class ReadPlan:
    """Chunks by attempt and level, unsealed reports by attempt, and who stands in the chunks that have late ones.

    `infos` says of the same chunks what the snapshot knows of them.
    """

    chunks: dict[tuple[int, int], list[int]]
    unsealed: UnsealedReports
    contributors: dict[int, Contributors]
    infos: dict[tuple[int, int], tuple[ChunkInfo, ...]]

    @property
    def sealed_points(self) -> int:
        """How many points the chunks hold at their levels."""
        points = 0
        for (_, level), infos in self.infos.items():
            for info in infos:
                points += -(-info.point_count // level)
        return points


def plan_read(
    view: RunView, unsealed: UnsealedReports, selection: Selection, infos: Sequence[ChunkInfo]
) -> ReadPlan:
    """Coarse levels if few points are wanted; level 1 at the ends of a range and where reports came late."""
    unsealed = _without_frozen(unsealed, infos)
    late = {(attempt, chunk) for attempt, rows in unsealed.items() for chunk in _late_chunks(attempt, rows, infos)}
    inside, cut = _inside(view, infos, selection)
    level = _level(view, inside, unsealed, selection)
    fine = cut | late
    chosen: dict[tuple[int, int], list[ChunkInfo]] = defaultdict(list)
    for info in inside:
        wanted = 1 if fine and (info.attempt, info.chunk) in fine else level
        chosen[info.attempt, _available_level(info, wanted)].append(info)
    chunks = {place: [info.chunk for info in members] for place, members in chosen.items()}
    contributors: dict[int, Contributors] = {
        attempt: read_contributors(
            view.connection,
            view.run_id,
            attempt,
            [chunk for owner, chunk in late if owner == attempt],
            selection.rank,
        )
        for attempt in {attempt for attempt, _ in late}
    }
    return ReadPlan(chunks, unsealed, contributors, {place: tuple(members) for place, members in chosen.items()})


def _available_level(info: ChunkInfo, wanted: int) -> int:
    """The coarsest level that the chunk has up to the one wanted; a frozen chunk may only have coarser ones."""
    if wanted in info.levels:
        return wanted
    return max((level for level in info.levels if level <= wanted), default=min(info.levels))


def _without_frozen(unsealed: UnsealedReports, infos: Sequence[ChunkInfo]) -> UnsealedReports:
    """Without reports that came too late: their steps are frozen into coarse points."""
    frozen: dict[int, list[ChunkInfo]] = defaultdict(list)
    for info in infos if unsealed else ():
        if info.frozen:
            frozen[info.attempt].append(info)
    if not frozen:
        return unsealed
    return {
        attempt: list(compress(rows, _place(_steps(rows), frozen[attempt]) < 0))
        for attempt, rows in unsealed.items()
    }


def _steps(rows: Sequence[Any]) -> IntArray:
    return np.array([row.step for row in rows], dtype=np.int64)


def _late_chunks(attempt: int, rows: Sequence[Any], infos: Sequence[ChunkInfo]) -> set[int]:
    """Chunks in whose steps some reports are not sealed yet."""
    own = [info for info in infos if info.attempt == attempt]
    return {own[place].chunk for place in np.unique(_place(_steps(rows), own)).tolist() if place >= 0}


def _place(steps: IntArray, infos: Sequence[ChunkInfo]) -> IntArray:
    """For each step, which of these chunks of one attempt (oldest first) it falls into; −1: into none."""
    first = np.array([info.first_step for info in infos] + [UNBOUNDED], dtype=np.int64)
    last = np.array([info.last_step for info in infos], dtype=np.int64)
    place = np.searchsorted(last, steps)
    return np.where(first[place] <= steps, place, -1)


def _inside(
    view: RunView, infos: Sequence[ChunkInfo], selection: Selection
) -> tuple[Sequence[ChunkInfo], set[tuple[int, int]]]:
    """Chunks with requested and visible points, and those among them that are cut."""
    first, last = selection.first_step or 0, selection.last_step
    end = UNBOUNDED if last is None else last + 1
    ends = {attempt: min(view.first_hidden_step(attempt), end) for attempt in {info.attempt for info in infos}}
    if first == 0 and all(bound == UNBOUNDED for bound in ends.values()):
        return infos, set()
    inside = [info for info in infos if info.last_step >= first and info.first_step < ends[info.attempt]]
    cut = {
        (info.attempt, info.chunk)
        for info in inside
        if info.first_step < first or info.last_step >= ends[info.attempt]
    }
    return inside, cut


def _level(view: RunView, infos: Iterable[ChunkInfo], unsealed: UnsealedReports, selection: Selection) -> int:
    """The coarsest level that still leaves at least half of the points wanted."""
    several = selection.rank is not None and any(view.ranks(info.attempt) != {selection.rank} for info in infos)
    lacking = any(minimum_key(metric) not in view.entries for metric in selection.extremes_of)
    if selection.points is None or several or lacking:
        return 1
    measured = sum(info.point_count for info in infos)
    measured += sum(len(np.unique(_steps(rows))) for rows in unsealed.values())
    bucket = -(-measured // selection.points)
    return max((level for level in LEVELS if level == 1 or bucket > _COARSE_FROM[level]), default=1)
