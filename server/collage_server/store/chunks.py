"""Chunks as rows: reading and writing points, model totals, layer totals and scalars."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, Row, Table, func, select

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
    columns = (
        func.count().label("parts"),
        func.sum(table.c.point_count).label("points"),
        func.min(table.c.first_step).label("first_step"),
        func.max(table.c.last_step).label("last_step"),
    )
    statement = select(table.c.attempt, table.c.chunk, table.c.level, *columns).where(table.c.run_id == run_id)
    grouped: dict[tuple[int, int], list[Row[Any]]] = defaultdict(list)
    for row in connection.execute(statement.group_by(table.c.attempt, table.c.chunk, table.c.level)):
        grouped[row.attempt, row.chunk].append(row)
    infos = []
    for (attempt, chunk), members in sorted(grouped.items()):
        finest = min(members, key=lambda row: row.level)
        infos.append(
            ChunkInfo(
                attempt=attempt,
                chunk=chunk,
                parts=finest.parts if finest.level == 1 else 0,
                count=finest.level * int(finest.points),
                first_step=finest.first_step,
                last_step=finest.last_step,
                levels=frozenset(row.level for row in members),
            )
        )
    return infos


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
    positions: dict[bytes, list[tuple[int, int]]] = {}
    for row in rows:
        place = points.where.get((row.chunk, row.part))
        if place is None:
            continue
        if row.entries not in positions:
            held = {int(entry): index for index, entry in enumerate(int_array(row.entries))}
            positions[row.entries] = [
                (target, held[entry]) for target, entry in enumerate(keys.values()) if entry in held
            ]
        found = positions[row.entries]
        block = np.frombuffer(row.data, dtype=_FLOAT).reshape(-1, row.point_count)
        values[[target for target, _ in found], place] = block[[source for _, source in found]]
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
