"""Chunks as rows: points, model totals and layer totals of several runs, each kind in one statement.

Columns are contiguous over all requested runs; one attempt of one run is a slice.
Sealing writes with `pack_*`, `reading` reads with `read_*`; together they define the stored format.

The format is fixed: chunks of earlier releases are read for good, and another form needs a migration.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Select, TextClause, case, func, select, text

from collage_server.store import schema
from collage_server.store.records import FloatArray, IntArray
from collage_server.store.row_checks import (
    CHECK_BYTES,
    are_layers_whole,
    chunk_name,
    damaged_rows,
    is_whole,
    require_points,
)
from collage_server.store.row_helpers import among, given_rows, int_array, int_bytes, rows_given, shape_of

__all__ = [
    "ALL_RANKS",
    "BLOBS_OPENED",
    "ChunkInfo",
    "Chunks",
    "LEVELS",
    "PointRows",
    "maximum_key",
    "minimum_key",
    "pack_points",
    "pack_totals",
    "packed",
    "read_chunk_infos",
    "read_layer_data",
    "read_model_data",
    "read_point_rows",
    "unpack_numbers",
    "unpack_points",
]

Chunks = Mapping[tuple[str, int], Sequence[int]]
"""(run_id, attempt) → the numbers of some of its chunks."""
Part = tuple[str, int, int, int]
"""(run_id, attempt, chunk, part)"""

LEVELS: Final = (1, 16, 256)
"""Measured points that one point of a level merges."""
_LEVELS_OF: Final = {
    held: frozenset(level for level, there in zip(LEVELS, held, strict=True) if there)
    for held in itertools.product((False, True), repeat=len(LEVELS))
}
ALL_RANKS: Final = -1
BLOBS_OPENED: Final = "blobs opened"
"""What a connection's `info` keeps of how many blobs were ever opened through its handles."""
_FLOAT: Final = np.dtype("<f8")
_LEAST_PACKED_BYTES: Final = 2**13
_INT: Final = np.dtype("<i8")
_SLICED_LAYERS: Final = 4
_SPANS_A_STATEMENT: Final = 1000
_ROWS_A_BATCH: Final = 128
_BATCH_BYTES: Final = 2**24
"""Of blobs that stand in memory at once, beside what is made of them; one row at least."""
_FETCHED_AT_ONCE: Final = 2**25
"""Beyond that PostgreSQL's driver, which takes a whole answer into memory, fetches it batch by batch."""
_POINTS_A_CHUNK: Final = 256
_DAMAGED: Final = b"?"
"""Read of a row whose size is not that of its counts."""
_PLACE: Final = ("run_id", "attempt", "chunk", "part")


def minimum_key(metric: str) -> str:
    """The entry under which the metric's minimum over single steps stands at coarse levels."""
    return f"minimum {metric}"


def maximum_key(metric: str) -> str:
    """The entry under which the metric's maximum over single steps stands at coarse levels."""
    return f"maximum {metric}"


def _layers_of(row: Sequence[Any], level: int, *, first: int) -> FloatArray | None:
    """Totals [layers, points] of a row of `_layer_rows`, from this layer on; None where they are not what was
    written."""
    run_id, attempt, chunk, part, entry, count, layers, _, data, checks = row[:10]
    if count <= 0 or len(data) % (8 * count):
        return None
    array = np.frombuffer(data, dtype=_FLOAT).reshape(-1, count)
    place = (run_id, attempt, level, chunk, part, entry, count, layers)
    return array if are_layers_whole(checks, array, first, *place) else None


@dataclass(frozen=True, eq=False)
class PointRows:
    """Points of several chunks at one level, in order of run, attempt, chunk and part.

    `where` finds the first point of each part, `owners` all points of an attempt of a run.
    """

    where: dict[Part, int]
    owners: dict[tuple[str, int], slice]
    first_steps: IntArray
    steps: IntArray
    times: FloatArray
    ranks: IntArray
    counts: IntArray

    def name_of(self, part: Part, level: int) -> str:
        """What an error calls a part of a chunk."""
        start = self.where[part]
        end = min((place for place in self.where.values() if place > start), default=len(self.steps))
        return chunk_name(level, *part[2:], int(self.first_steps[start]), int(self.steps[end - 1]))


def pack_points(
    first_steps: IntArray, steps: IntArray, times: FloatArray, ranks: IntArray, counts: IntArray
) -> bytes:
    """The packed `points` of a row."""
    ends = (np.ascontiguousarray(times, dtype=_FLOAT).tobytes(), int_bytes(ranks), int_bytes(counts))
    return _packed(b"".join((int_bytes(first_steps), int_bytes(steps), *ends)))


def unpack_points(data: bytes, count: int) -> IntArray:
    """The five rows [5, points] of packed `points`; times are the bits of their floats."""
    return unpack_numbers(data, 5 * count).view(_INT).reshape(5, count)


def pack_totals(values: FloatArray) -> bytes:
    """Totals [entries, points] of single steps.

    Coarse levels, of which a question reads hundreds, stay as they are: decoding 256 points of 20 totals takes a
    fifth of a millisecond.
    """
    return _packed(np.ascontiguousarray(values, dtype=_FLOAT).tobytes())


def _unpack_totals(data: bytes, entries: int, points: int) -> FloatArray:
    """Totals [entries, points], whichever way they are stored."""
    return unpack_numbers(data, entries * points).view(_FLOAT).reshape(entries, points)


def _packed(plain: bytes) -> bytes:
    """As `packed`; as they are where they are few."""
    return plain if len(plain) < _LEAST_PACKED_BYTES else packed(plain)


def packed(plain: bytes) -> bytes:
    """Numbers of eight bytes, byte by byte and compressed; as they are where that is no shorter.

    Counts and constants take a quarter of a byte each, sums six or seven.
    """
    columns = np.frombuffer(plain, dtype=np.uint8).reshape(-1, 8)
    short = zlib.compress(columns.T.tobytes(), 1)
    return short if len(short) < len(plain) else plain


def unpack_numbers(data: bytes, numbers: int) -> NDArray[np.uint8]:
    """The bytes of so many numbers, whichever way they are stored."""
    if len(data) == 8 * numbers:
        return np.frombuffer(data, dtype=np.uint8)
    columns = np.frombuffer(zlib.decompress(data, bufsize=8 * numbers), dtype=np.uint8)
    return np.ascontiguousarray(columns.reshape(8, -1).T).reshape(-1)


def read_point_rows(connection: Connection, level: int, chunks: Chunks) -> PointRows:
    """The points of these chunks at a level."""
    names = ("level", "point_count", "first_step", "last_step", "checks", "points")
    batches = _select_rows(connection, "point_chunk", level, chunks, names)
    rows = sorted(itertools.chain.from_iterable(batches), key=itemgetter(0, 1, 2, 3))
    where: dict[Part, int] = {}
    owners: dict[tuple[str, int], slice] = {}
    start = 0
    for row in rows:
        require_points(row)
        where[tuple(row[:4])] = start
        first = owners[row[:2]].start if row[:2] in owners else start
        start += row.point_count
        owners[row[:2]] = slice(first, start)
    unpacked = (unpack_points(row.points, row.point_count) for row in rows)
    columns = np.concatenate([np.zeros((5, 0), dtype=_INT), *unpacked], axis=1)
    joined = columns.astype(np.int64, copy=False)
    return PointRows(where, owners, joined[0], joined[1], joined[2].view(_FLOAT), joined[3], joined[4])


def read_model_data(
    connection: Connection,
    level: int,
    chunks: Chunks,
    points: PointRows,
    entries: Mapping[str, Mapping[str, int]],
    keys: Sequence[str],
    rank: int = ALL_RANKS,
) -> FloatArray:
    """Totals [keys, points] of the model; NaN where a part lacks the key. `entries`: by run, key → entry."""
    values = np.full((len(keys), len(points.steps)), np.nan)
    columns = ("point_count", "entries", "checks", "data")
    batches = _select_rows(connection, "model_chunk", level, chunks, columns, "t.rank = :rank", {"rank": rank})
    for row in itertools.chain.from_iterable(batches):
        start, count, known = points.where.get(row[:4]), row.point_count, entries[row[0]]
        if start is None:
            continue
        run_id, attempt, chunk, part = row[:4]
        whole = is_whole(row.checks, run_id, attempt, level, chunk, part, rank, count, row.entries, row.data)
        if not whole:
            raise damaged_rows(run_id, points.name_of(row[:4], level))
        held = {entry: place for place, entry in enumerate(int_array(row.entries).tolist())}
        array = _unpack_totals(row.data, len(held), count)
        for target, key in enumerate(keys):
            if known.get(key) in held:
                values[target, start : start + count] = array[held[known[key]]]
    return values


def read_layer_data(
    connection: Connection,
    level: int,
    chunks: Chunks,
    points: PointRows,
    entries: Mapping[str, Mapping[str, int]],
    keys: Sequence[str],
    positions: Mapping[str, IntArray],
    *,
    neighbours: bool = False,
    by_layer: bool = False,
) -> FloatArray:
    """Totals [keys, points, layers] of the layers at these positions by run.

    Few layers are read as slices, and so are `neighbours`: layers that follow on each other. `by_layer`: the points
    of each layer stand side by side in memory, as they are stored, else the layers of each point.
    """
    width, count = len(next(iter(positions.values()), ())), len(points.steps)
    values = np.full((len(keys), width, count) if by_layer else (len(keys), count, width), np.nan)
    values = values.transpose(0, 2, 1) if by_layer else values
    if not width:
        return values
    targets = {
        (run, known[key]): target
        for run, known in entries.items()
        for target, key in enumerate(keys)
        if key in known
    }
    wanted: dict[str, list[int]] = defaultdict(list)
    for run, entry in targets:
        wanted[run].append(entry)
    sliced = neighbours or width <= _SLICED_LAYERS
    slices = [(0, width)] if neighbours or not sliced else [(index, 1) for index in range(width)]
    extra = {
        run: [(entry, int(positions[run][index]), size) for entry in numbers for index, size in slices]
        for run, numbers in wanted.items()
    }
    indices = {run: {int(held[index]): index for index, _ in slices} for run, held in positions.items()}
    for row in _layer_rows(connection, level, chunks, extra, sliced=sliced):
        start = points.where.get(row[:4])
        if start is None or not row[8]:
            continue
        run, entry, count, layers = row[0], row[4], row[5], row[6]
        array = _layers_of(row, level, first=row[7] if sliced else 0)
        if array is None:
            raise damaged_rows(run, points.name_of(row[:4], level))
        target = values[targets[run, entry], start : start + count]
        if sliced:
            index = indices[run][row[7]]
            target[:, index : index + len(array)] = array.T
        else:
            held = positions[run] < layers
            target[:, held] = array[positions[run][held]].T
    return values


def _layer_rows(
    connection: Connection,
    level: int,
    chunks: Chunks,
    extra: Mapping[str, Sequence[tuple[int, int, int]]],
    *,
    sliced: bool,
) -> Iterator[Any]:
    """Rows (…, entry, point_count, layer_count, layer, data, checks) of spans (entry, layer, layers); `sliced`:
    only those.

    SQLite would fetch a whole blob to cut a slice out of it, but reads one in place through its handle. Without
    that, one layer of 10 runs costs 1.6 times the CPU of the whole question, with whole blobs 3.2 times.
    """
    in_place = sliced and connection.dialect.name == "sqlite"
    slice_of = "substr(t.data, 8 * t.point_count * w.layer + 1, 8 * t.point_count * w.layers)"
    content = "t.rowid" if in_place else slice_of if sliced else "t.data"
    checks = f"substr(t.checks, {CHECK_BYTES} * w.layer + 1, {CHECK_BYTES} * w.layers)" if sliced else "t.checks"
    columns = ("entry", "point_count", "layer_count", "w.layer", content, checks, "w.layers", "length(t.checks)")
    points = -(-_POINTS_A_CHUNK // level)
    widest = max(
        (size if sliced else layer + size for spans in extra.values() for _, layer, size in spans), default=0
    )
    batches = _select_rows(
        connection,
        "layer_chunk",
        level,
        chunks,
        columns,
        "t.entry = w.entry",
        spans=("entry", "layer", "layers"),
        extra=extra,
        row_bytes=0 if in_place else 8 * points * widest,
    )
    raw: Any = connection.connection.driver_connection
    opened = 0
    try:
        for row in itertools.chain.from_iterable(batches):
            if not in_place:
                yield row
            elif row[11] not in (None, CHECK_BYTES * row[6]):
                yield (*row[:8], _DAMAGED, row[9])
            elif row[7] < row[6]:
                opened += 1
                with raw.blobopen("layer_chunk", "data", row[8], readonly=True) as blob:
                    if len(blob) == 8 * row[5] * row[6]:
                        blob.seek(8 * row[5] * row[7])
                        data = blob.read(8 * row[5] * row[10])
                    else:
                        data = _DAMAGED
                yield (*row[:8], data, row[9])
    finally:
        if opened:
            connection.info[BLOBS_OPENED] = connection.info.get(BLOBS_OPENED, 0) + opened


def _select_rows(
    connection: Connection,
    table: str,
    level: int,
    chunks: Chunks,
    columns: Sequence[str],
    condition: str = "TRUE",
    parameters: Mapping[str, Any] | None = None,
    spans: Sequence[str] = (),
    extra: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
    row_bytes: int = 0,
) -> Iterator[Sequence[Any]]:
    """Rows (run_id, attempt, chunk, part, *columns) of these chunks, in batches, so that blobs can be freed early.

    A row has about `row_bytes` of blobs, if that is much.

    `extra` gives, by run, further values of each span under the names `spans`, for the condition.
    """
    wanted = [
        (run_id, attempt, numbers[0], numbers[-1], *more)
        for (run_id, attempt), numbers in chunks.items()
        if numbers
        for more in (extra.get(run_id, ()) if extra is not None else [()])
    ]
    held = {owner: set(numbers) for owner, numbers in chunks.items()}
    dialect, names = connection.dialect.name, ("run_id", "attempt", "first_chunk", "last_chunk", *spans)
    for start in range(0, len(wanted), _SPANS_A_STATEMENT):
        some = wanted[start : start + _SPANS_A_STATEMENT]
        statement = _statement(dialect, table, tuple(columns), condition, names, shape_of(dialect, some))
        given = {**rows_given(dialect, some), "level": level, **(parameters or {})}
        batch = min(max(_BATCH_BYTES // max(row_bytes, 1), 1), _ROWS_A_BATCH)
        is_large = row_bytes * len(some) * max(map(len, chunks.values())) > _FETCHED_AT_ONCE
        found = connection.execute(statement, given, execution_options={"yield_per": batch} if is_large else {})
        for rows in found.partitions(batch):
            yield [row for row in rows if row[2] in held[row[:2]]]


@lru_cache(maxsize=64)
def _statement(
    dialect: str, table: str, columns: Sequence[str], condition: str, names: Sequence[str], shape: int
) -> TextClause:
    shown = ", ".join(column if "." in column else f"t.{column}" for column in (*_PLACE, *columns))
    return text(
        f"WITH {given_rows(dialect, names, shape)} SELECT {shown} FROM w CROSS JOIN {table} t "
        "WHERE t.run_id = w.run_id AND t.attempt = w.attempt AND t.level = :level "
        f"AND t.chunk BETWEEN w.first_chunk AND w.last_chunk AND {condition}"
    ).execution_options(blobs=True)


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
    """The chunks of each run, oldest first."""
    rows = connection.execute(_chunks_of_runs(), {"run_ids": list(run_ids)}).all()
    found: dict[str, list[ChunkInfo]] = {run_id: [] for run_id in run_ids}
    for run_id, attempt, chunk, parts, first_step, last_step, fine, middle, coarse in rows:
        count = int(LEVELS[1] * middle or fine or LEVELS[2] * coarse)
        levels = _LEVELS_OF[fine > 0, middle > 0, coarse > 0]
        found[run_id].append(ChunkInfo(attempt, chunk, int(parts), count, first_step, last_step, levels))
    return found
