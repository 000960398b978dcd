"""Chunks as rows: reading and writing points, model totals, layer totals and scalars."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, Row, Table, case, func, select

from collage_server.store import schema
from collage_server.store.contract import FloatArray, IntArray
from collage_server.store.rows import int_array, int_bytes

__all__ = [
    "ALL_RANKS",
    "LEVELS",
    "ChunkInfo",
    "PointRows",
    "maximum_key",
    "minimum_key",
    "pack_points",
    "read_chunk_infos",
    "read_layer_data",
    "read_model_data",
    "read_point_rows",
]

ALL_RANKS: Final = -1
LEVELS: Final = (1, 16, 256)
"""Measured points that one point of a level merges."""

_FLOAT: Final = np.dtype("<f8")
_INT: Final = np.dtype("<i8")
_SLICED_LAYERS: Final = 4
_LEVELS_OF: Final = {
    held: frozenset(level for level, there in zip(LEVELS, held, strict=True) if there)
    for held in itertools.product((False, True), repeat=len(LEVELS))
}


def minimum_key(metric: str) -> str:
    """The entry under which the metric's minimum over single steps stands at coarse levels."""
    return f"minimum {metric}"


def maximum_key(metric: str) -> str:
    """The entry under which the metric's maximum over single steps stands at coarse levels."""
    return f"maximum {metric}"


@dataclass(frozen=True)
class ChunkInfo:
    """One chunk of an attempt, all parts together; `levels` are those that it has.

    A frozen chunk has lost its level 1 to retention: `parts` is 0 and `count` what its coarse points stand for.
    """

    attempt: int
    chunk: int
    parts: int
    count: int
    first_step: int
    last_step: int
    levels: frozenset[int]

    @property
    def frozen(self) -> bool:
        """Whether only coarse levels are left."""
        return 1 not in self.levels


def read_chunk_infos(connection: Connection, run_id: str) -> list[ChunkInfo]:
    """What chunks the run has, oldest first."""
    table = schema.point_chunk
    held = [func.sum(case((table.c.level == level, table.c.point_count), else_=0)) for level in LEVELS]
    columns = (
        func.sum(case((table.c.level == 1, 1), else_=0)),
        func.min(table.c.first_step),
        func.max(table.c.last_step),
        *held,
    )
    rows = connection.execute(
        select(table.c.attempt, table.c.chunk, *columns)
        .where(table.c.run_id == run_id)
        .group_by(table.c.attempt, table.c.chunk)
        .order_by(table.c.attempt, table.c.chunk)
    ).all()
    return [
        ChunkInfo(
            attempt=attempt,
            chunk=chunk,
            parts=int(parts),
            count=next(level * int(count) for level, count in zip(LEVELS, counts, strict=True) if count),
            first_step=first_step,
            last_step=last_step,
            levels=_LEVELS_OF[tuple(map(bool, counts))],
        )
        for attempt, chunk, parts, first_step, last_step, *counts in rows
    ]


@dataclass(frozen=True, eq=False)
class PointRows:
    """Points of several chunks of one attempt and level, in order of chunk and part; `where` finds each part's."""

    where: dict[tuple[int, int], slice]
    first_steps: IntArray
    steps: IntArray
    times: FloatArray
    ranks: IntArray
    counts: IntArray


def pack_points(
    first_steps: IntArray, steps: IntArray, times: FloatArray, ranks: IntArray, counts: IntArray
) -> bytes:
    """The packed `points` of a row."""
    ends = (np.ascontiguousarray(times, dtype=_FLOAT).tobytes(), int_bytes(ranks), int_bytes(counts))
    return b"".join((int_bytes(first_steps), int_bytes(steps), *ends))


def read_point_rows(
    connection: Connection, run_id: str, attempt: int, level: int, chunks: Collection[int]
) -> PointRows:
    """The points of these chunks at a level."""
    rows = _select(connection, schema.point_chunk, run_id, attempt, level, chunks, ("point_count", "points"))
    where, start = {}, 0
    for row in rows:
        where[row.chunk, row.part] = slice(start, start + row.point_count)
        start += row.point_count
    packed = [np.frombuffer(row.points, dtype=_INT).reshape(5, row.point_count) for row in rows]
    joined = np.concatenate([*packed, np.zeros((5, 0), dtype=_INT)], axis=1).astype(np.int64, copy=False)
    return PointRows(where, joined[0], joined[1], joined[2].copy().view(np.float64), joined[3], joined[4])


def read_model_data(
    connection: Connection,
    run_id: str,
    attempt: int,
    level: int,
    points: PointRows,
    keys: Mapping[str, int],
    rank: int = ALL_RANKS,
) -> dict[str, FloatArray]:
    """Totals [points] by key (`keys`: key → entry); NaN where a part does not hold the key."""
    chunks = {chunk for chunk, _ in points.where}
    filters = {"rank": rank}
    rows = _select(
        connection, schema.model_chunk, run_id, attempt, level, chunks, ("point_count", "entries", "data"), filters
    )
    values = np.full((len(keys), len(points.steps)), np.nan)
    alike: dict[tuple[bytes, int], list[Row[Any]]] = defaultdict(list)
    for row in rows:
        if (row.chunk, row.part) in points.where:
            alike[row.entries, row.point_count].append(row)
    for (entries, count), members in alike.items():
        held = {int(entry): index for index, entry in enumerate(int_array(entries))}
        found = [(target, held[entry]) for target, entry in enumerate(keys.values()) if entry in held]
        block = np.frombuffer(b"".join(row.data for row in members), dtype=_FLOAT).reshape(len(members), -1, count)
        starts = np.array([points.where[row.chunk, row.part].start for row in members])
        places = (starts[:, None] + np.arange(count)).ravel()
        for target, source in found:
            values[target, places] = block[:, source].ravel()
    return dict(zip(keys, values, strict=True))


def read_layer_data(
    connection: Connection,
    run_id: str,
    attempt: int,
    level: int,
    points: PointRows,
    keys: Mapping[str, int],
    positions: IntArray,
) -> dict[str, FloatArray]:
    """Totals [points, layers] by key, of the layers at these positions; few layers are read as slices."""
    values = {key: np.full((len(points.steps), len(positions)), np.nan) for key in keys}
    names = {entry: key for key, entry in keys.items()}
    chunks = {chunk for chunk, _ in points.where}
    sliced = len(positions) <= _SLICED_LAYERS
    for index, group in enumerate(positions.tolist() if sliced else [None]):
        table = schema.layer_chunk
        data: Any = table.c.data
        if group is not None:
            data = func.substr(table.c.data, 8 * table.c.point_count * group + 1, 8 * table.c.point_count).label(
                "data"
            )
        columns = ("entry", "point_count", "layer_count", data)
        filters = {"entry": list(names)}
        for row in _select(connection, table, run_id, attempt, level, chunks, columns, filters):
            place = points.where.get((row.chunk, row.part))
            if place is None or not row.data:
                continue
            block = np.frombuffer(row.data, dtype=_FLOAT).reshape(-1, row.point_count)
            if group is not None:
                values[names[row.entry]][place, index] = block[0]
            else:
                held = positions < row.layer_count
                values[names[row.entry]][place, held] = block[positions[held]].T
    return values


def _select(
    connection: Connection,
    table: Table,
    run_id: str,
    attempt: int,
    level: int,
    chunks: Collection[int],
    columns: Sequence[Any],
    filters: Mapping[str, Any] | None = None,
) -> Sequence[Row[Any]]:
    """Rows of these chunks in order of chunk and part."""
    if not chunks:
        return []
    wanted = [table.c[column] if isinstance(column, str) else column for column in columns]
    statement = select(table.c.chunk, table.c.part, *wanted).where(
        table.c.run_id == run_id,
        table.c.attempt == attempt,
        table.c.level == level,
        table.c.chunk.between(min(chunks), max(chunks)),
    )
    for name, value in (filters or {}).items():
        column = table.c[name]
        statement = statement.where(column.in_(value) if isinstance(value, list) else column == value)
    rows = connection.execute(statement.order_by(table.c.chunk, table.c.part)).all()
    return [row for row in rows if row.chunk in chunks]
