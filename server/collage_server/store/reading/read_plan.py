"""What to read of a run: the chunks to read with their levels, and the unsealed reports.

`points.py` carries the plan out; `run_view.py` decides what is hidden. Any level will do that leaves enough points
(`Selection.points`). `tests/server/test_axes.py` checks this, and that answers do not depend on sealing;
`tests/server/store/life.py` checks frozen chunks.

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
"""A level is used if a requested point covers more measured points than this: half of those requested are left."""


@dataclass(frozen=True)
class ReadPlan:
    """Numbers of chunks by (attempt, level), and unsealed reports by attempt.

    contributors: by attempt, which ranks the chunks with late reports already contain. infos: the same chunks as
    the snapshot describes them.
    """

    chunks: dict[tuple[int, int], list[int]]
    unsealed: UnsealedReports
    contributors: dict[int, Contributors]
    infos: dict[tuple[int, int], tuple[ChunkInfo, ...]]

    @property
    def sealed_points(self) -> int:
        """How many points the chunks hold at the chosen levels."""
        return sum(-(-info.point_count // level) for (_, level), infos in self.infos.items() for info in infos)


def plan_read(
    view: RunView, unsealed: UnsealedReports, selection: Selection, infos: Sequence[ChunkInfo]
) -> ReadPlan:
    """Plan coarse levels if few points are requested, but level 1 at the ends of a range and for late reports."""
    unsealed = _without_frozen(unsealed, infos)
    late = {(attempt, chunk) for attempt, rows in unsealed.items() for chunk in _late_chunks(attempt, rows, infos)}
    inside, cut = _inside(view, infos, selection)
    level, fine = _level(view, inside, unsealed, selection), cut | late
    chosen: dict[tuple[int, int], list[ChunkInfo]] = defaultdict(list)
    for info in inside:
        wanted = 1 if (info.attempt, info.chunk) in fine else level
        chosen[info.attempt, _available_level(info, wanted)].append(info)
    return ReadPlan(
        chunks={place: [info.chunk for info in members] for place, members in chosen.items()},
        unsealed=unsealed,
        contributors=_contributors(view, late, selection),
        infos={place: tuple(members) for place, members in chosen.items()},
    )


def _contributors(view: RunView, late: set[tuple[int, int]], selection: Selection) -> dict[int, Contributors]:
    chunks: dict[int, list[int]] = defaultdict(list)
    for attempt, chunk in late:
        chunks[attempt].append(chunk)
    return {
        attempt: read_contributors(view.connection, view.run_id, attempt, numbers, selection.rank)
        for attempt, numbers in chunks.items()
    }


def _available_level(info: ChunkInfo, wanted: int) -> int:
    """The coarsest level of the chunk up to the wanted one; a frozen chunk may have coarser ones only."""
    if wanted in info.levels:
        return wanted
    return max((level for level in info.levels if level <= wanted), default=min(info.levels))


def _without_frozen(unsealed: UnsealedReports, infos: Sequence[ChunkInfo]) -> UnsealedReports:
    """Leave out reports that came too late, because their steps are frozen into coarse points."""
    frozen: dict[int, list[ChunkInfo]] = defaultdict(list)
    for info in infos if unsealed else ():
        if info.frozen:
            frozen[info.attempt].append(info)
    if not frozen:
        return unsealed
    return {
        attempt: list(compress(rows, _chunk_index(_steps(rows), frozen[attempt]) < 0))
        for attempt, rows in unsealed.items()
    }


def _steps(rows: Sequence[Any]) -> IntArray:
    return np.array([row.step for row in rows], dtype=np.int64)


def _late_chunks(attempt: int, rows: Sequence[Any], infos: Sequence[ChunkInfo]) -> set[int]:
    """Chunks whose range of steps contains unsealed reports."""
    own = [info for info in infos if info.attempt == attempt]
    return {own[place].chunk for place in np.unique(_chunk_index(_steps(rows), own)).tolist() if place >= 0}


def _chunk_index(steps: IntArray, infos: Sequence[ChunkInfo]) -> IntArray:
    """For each step, the index of the chunk that contains it, or −1; chunks of one attempt, oldest first."""
    first = np.array([info.first_step for info in infos] + [UNBOUNDED], dtype=np.int64)
    last = np.array([info.last_step for info in infos], dtype=np.int64)
    place = np.searchsorted(last, steps)
    return np.where(first[place] <= steps, place, -1)


def _inside(
    view: RunView, infos: Sequence[ChunkInfo], selection: Selection
) -> tuple[Sequence[ChunkInfo], set[tuple[int, int]]]:
    """Chunks with points that are requested and visible, and those of them that the range cuts."""
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
    """The coarsest level that leaves at least half of the requested points."""
    several = selection.rank is not None and any(view.ranks(info.attempt) != {selection.rank} for info in infos)
    lacking = any(minimum_key(metric) not in view.entries for metric in selection.extremes_of)
    if selection.points is None or several or lacking:
        return 1
    measured = sum(info.point_count for info in infos)
    measured += sum(len(np.unique(_steps(rows))) for rows in unsealed.values())
    bucket = -(-measured // selection.points)
    return max((level for level in LEVELS if level == 1 or bucket > _COARSE_FROM[level]), default=1)
