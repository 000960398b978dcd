"""A chunk's content at each level: a part's points of single steps, and the coarse ones of a whole chunk.

`seal.py` packs what is made here. Levels are those of `chunks/blobs.py`, and a level once stored is not made again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from sqlalchemy import Select, bindparam, func, select

from collage_server.store import schema
from collage_server.store.archive.archive_reader import ArchiveReader
from collage_server.store.chunks.blobs import LEVELS
from collage_server.store.chunks.point_merging import (
    POINT_COLUMNS,
    AttemptPoints,
    coarsen,
    join,
    layer_extremes,
    model_extremes,
)
from collage_server.store.reading.points import PointReading
from collage_server.store.reading.run_view import RunView
from collage_server.store.records import UNBOUNDED, FloatArray, IntArray, Points, Selection
from collage_server.store.sealing.seal_plan import SealLimits, SealPlan

__all__ = ["ChunkLevel", "chunk_of", "chunk_place", "coarse_levels", "reported"]

_NOBODY: Final = MappingProxyType(
    {"contributor_ranks": b"", "contributor_streams": None, "contributors": b"", "unfinished": None}
)


@dataclass(frozen=True, eq=False)
class ChunkLevel:
    """A chunk's content at one level: points, and totals of model, single ranks and layers by entry key.

    `contributors`: the columns of `point_chunk` that say who contributed; coarse levels leave them empty.
    """

    points: Points
    model: Mapping[str, FloatArray]
    ranks: Mapping[int, Mapping[str, FloatArray]]
    layers: Mapping[str, FloatArray]
    contributors: Mapping[str, bytes | None]


def reported(totals: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Those that are known anywhere: of a run that measures no layers, none by layer."""
    return {key: values for key, values in totals.items() if not np.isnan(values).all()}


def chunk_of(table: Any) -> tuple[Any, ...]:
    """Which rows are of the chunk that `chunk_place` gives when a statement, made once, is executed."""
    return (
        table.c.run_id == bindparam("run"),
        table.c.attempt == bindparam("of_attempt"),
        table.c.chunk == bindparam("of_chunk"),
    )


def chunk_place(run_id: str, plan: SealPlan) -> dict[str, Any]:
    """The parameters of `chunk_of`."""
    return {"run": run_id, "of_attempt": plan.attempt, "of_chunk": plan.chunk}


def _join_part(
    plan: SealPlan,
    old: Sequence[AttemptPoints],
    part: ChunkLevel,
    totals: Mapping[str, FloatArray],
    layers: Sequence[str] | None = None,
) -> Points:
    """The chunk's `old` points and those of the part, with these `totals`."""
    counted: dict[str, Any] = {name: getattr(part.points, name) for name in POINT_COLUMNS}
    own = AttemptPoints(attempt=plan.attempt, **counted, totals=dict(totals))
    return join([*old, own], lambda _: UNBOUNDED, Selection(), layers=layers)


def _whole_model(view: RunView, plan: SealPlan, part: ChunkLevel, archive: ArchiveReader) -> Points:
    """All points of the chunk so far, this part's joined in."""
    held = {(view.run_id, plan.attempt): plan.chunk_so_far}
    reading = PointReading(view.connection, {view.run_id: view}, None, Selection(), archive)
    old = reading.sealed_model(1, held)[view.run_id]
    return _join_part(plan, old, part, part.model)


def coarse_levels(
    view: RunView, plan: SealPlan, part: ChunkLevel, limits: SealLimits, archive: ArchiveReader
) -> dict[int, ChunkLevel]:
    """The chunk's coarse levels, made of all its parts, as soon as it is whole."""
    model = _whole_model(view, plan, part, archive)
    if len(model.steps) < limits.points:
        return {}
    levels = {}
    layers = _coarse_layers(view, plan, part, limits, archive)
    for level in LEVELS[1:]:
        points, stored = coarsen(model, level, limits.points, model_extremes(list(model.totals)))
        levels[level] = ChunkLevel(points, reported(stored), {}, layers[level], _NOBODY)
    return levels


def _coarse_layers(
    view: RunView, plan: SealPlan, part: ChunkLevel, limits: SealLimits, archive: ArchiveReader
) -> dict[int, dict[str, FloatArray]]:
    """The layers' stored columns by coarse level, made for some layers at a time, however many there are."""
    count, keys = _widest(view, plan, part, archive), view.statistics(None)
    held = {(view.run_id, plan.attempt): plan.chunk_so_far}
    reading = PointReading(view.connection, {view.run_id: view}, keys, Selection(), archive)
    width = max(limits.coarse_bytes // (8 * limits.points * max(len(keys), 1)), 1)
    found: dict[int, dict[str, list[FloatArray]]] = {level: defaultdict(list) for level in LEVELS[1:]}
    for start in range(0, count, width):
        positions = np.arange(start, min(start + width, count), dtype=np.int64)
        old = reading.sealed_layers(1, held, {view.run_id: positions}, neighbours=width < count)
        own = {key: _at(values, positions) for key, values in part.layers.items()}
        layers = _join_part(plan, old[view.run_id], part, own, [""] * len(positions))
        for level, stored in found.items():
            _, more = coarsen(layers, level, limits.points, layer_extremes(list(layers.totals)))
            for key, values in more.items():
                stored[key].append(values)
    return {
        level: reported({key: np.concatenate(parts, axis=1) for key, parts in stored.items()})
        for level, stored in found.items()
    }


def _widest(view: RunView, plan: SealPlan, part: ChunkLevel, archive: ArchiveReader) -> int:
    """So many of the dictionary's first layers stand in some part of the chunk."""
    own = max((values.shape[1] for values in part.layers.values()), default=0)
    if not plan.chunk_so_far:
        return own
    held = {(view.run_id, plan.attempt): plan.chunk_so_far}
    files = archive.find_segments(view.connection, LEVELS[0], held)
    archived = max((file.footer.contents.layers for file in files), default=0)
    stored = view.connection.execute(_widest_part(), chunk_place(view.run_id, plan)).scalar()
    return max(own, archived, stored or 0)


@cache
def _widest_part() -> Select[Any]:
    table = schema.layer_chunk
    return select(func.max(table.c.layer_count)).where(*chunk_of(table), table.c.level == LEVELS[0])


def _at(values: FloatArray, positions: IntArray) -> FloatArray:
    """[points, positions] of values [points, layers]; NaN beyond."""
    found = np.full((len(values), len(positions)), np.nan)
    there = positions < values.shape[1]
    found[:, there] = values[:, positions[there]]
    return found
