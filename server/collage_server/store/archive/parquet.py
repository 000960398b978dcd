"""The format of an archived file: layer totals of one run's chunks at one level, readable by any Parquet engine.

Rows are sorted by layer and step; a row group holds some layers, so that one is read without most others. The first
columns identify a row (`layer`, `name`, `first_step`, `step`, `time`, `ranks`, `points`). Then comes one float64
column per statistic under its key, null where no rank reported it. At coarse levels there are "minimum METRIC" and
"maximum METRIC", too. Sums are byte-stream-split and compressed with zstd.

A file of the model's totals has a column `rank` in place of the layer columns, -1 for all ranks together, and is
read in the same way. The metadata entry `collage` lists the parts of chunks that a file holds, in the order of its
rows. Each page has a CRC, which `read_groups` checks. Older files have none: their pages are read unchecked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from collage_server.errors import DamagedFile
from collage_server.store.chunks.blobs import PointRows
from collage_server.store.records import FloatArray, IntArray, Points

__all__ = [
    "Contents",
    "Footer",
    "HeldPart",
    "LoggedSeries",
    "ROW_COLUMNS",
    "Rows",
    "check_pages",
    "copy_points",
    "layers_in_group",
    "metadata_of",
    "read_footer",
    "read_groups",
    "read_layers",
    "write_layers",
    "write_points",
]

_ROWS_A_GROUP: Final = 2**14
"""With fewer rows, reading all layers costs more; with more rows, reading one layer does."""
_READ_BYTES: Final = 2**24
"""How much of the row groups is decoded at a time."""
_MEMORY_A_BYTE: Final = 12
"""Memory for each byte of a footer, once parsed; 11.7 was measured."""
_FORMAT: Final = 1
_METADATA: Final = b"collage"
_POINT_COLUMNS: Final = {
    "first_step": pa.int64(),
    "step": pa.int64(),
    "time": pa.timestamp("us", tz="UTC"),
    "ranks": pa.int32(),
    "points": pa.int32(),
}
ROW_COLUMNS: Final = {"layer": pa.int32(), "name": pa.string(), **_POINT_COLUMNS}
"""The columns that identify a row, in order."""
_RANK_ROW_COLUMNS: Final = {"rank": pa.int64(), **_POINT_COLUMNS}
"""The same, for a file of the model's totals."""
_TAIL_BYTES: Final = 8
"""At a file's end: the length of the footer, and a mark."""


class HeldPart(NamedTuple):
    """A part of a chunk in a file, and how many points of it the file holds."""

    chunk: int
    part: int
    points: int


class LoggedSeries(NamedTuple):
    """A stream's values under one name in a file of logged values: the number of its rows."""

    stream_id: str
    name: str
    values: int


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file, from its metadata.

    ranks: in a file of the model's totals, the rank that each "layer" stands for, -1 for all together. series: in a
    file of logged values, its series in the order of the rows.
    """

    run_id: str
    attempt: int
    level: int
    parts: tuple[HeldPart, ...] = ()
    layers: int = 0
    layers_a_group: int = 1
    format: int = _FORMAT
    ranks: tuple[int, ...] = ()
    series: tuple[LoggedSeries, ...] = ()

    @property
    def points(self) -> int:
        """Rows of each layer."""
        return sum(part.points for part in self.parts)

    def places(self) -> list[tuple[HeldPart, int]]:
        """Each part with its first row."""
        starts = accumulate((part.points for part in self.parts), initial=0)
        return list(zip(self.parts, starts, strict=False))


_decode_contents: Final = msgspec.json.Decoder(Contents).decode


def layers_in_group(points: int) -> int:
    """How many layers a row group holds, if each has this many points."""
    return max(_ROWS_A_GROUP // max(points, 1), 1)


def write_layers(
    file: Path,
    contents: Contents,
    points: PointRows,
    names: Sequence[str],
    keys: Sequence[str],
    groups: Iterable[FloatArray],
) -> bytes:
    """Write a file, and return its footer, which the database keeps beside the path.

    points: of all parts, in their order. names: of all layers. groups: for each row group, the totals
    [keys, points, layers] of its layers, fastest if the points of a layer are contiguous.
    """
    row_columns = _RANK_ROW_COLUMNS if contents.ranks else ROW_COLUMNS
    schema = _schema(row_columns, keys)
    with _writer(file, schema, keys) as writer:
        writer.add_key_value_metadata(metadata_of(contents))
        first = 0
        for totals in groups:
            rows, count = totals.shape[1:]
            held = slice(first, first + count)
            identities = (
                _rank_column(contents.ranks[held], rows)
                if contents.ranks
                else _layer_columns(names[held], first, rows)
            )
            writer.write_table(_table(schema, identities, points, totals), row_group_size=count * rows)
            first += count
    return read_footer(file)


def write_points(file: Path, keys: Sequence[str], groups: Iterable[Points]) -> None:
    """Write points, one group of layers after the other, for other tools: the file has no metadata of ours."""
    schema = _schema(ROW_COLUMNS, keys)
    with _writer(file, schema, keys) as writer:
        first = 0
        for points in groups:
            rows, count = len(points.steps), len(points.layers)
            unknown = np.full((rows, count), np.nan)
            totals = np.stack([points.totals.get(key, unknown) for key in keys])
            table = _table(schema, _layer_columns(points.layers, first, rows), points, totals)
            writer.write_table(table, row_group_size=max(layers_in_group(rows) * rows, 1))
            first += count


def metadata_of(contents: Contents) -> dict[bytes, bytes]:
    """The metadata of a file."""
    return {_METADATA: msgspec.json.encode(contents)}


def copy_points(file: Path, source: pa.NativeFile, footer: Footer, chunks: Collection[int], before: int) -> None:
    """Copy the points of some chunks, before a step, to a file for other tools, without metadata of ours."""
    held = np.concatenate([np.full(part.points, part.chunk in chunks) for part in footer.contents.parts])
    schema = footer.metadata.schema.to_arrow_schema().remove_metadata()
    keys = [name for name in schema.names if name not in ROW_COLUMNS]
    groups = ([group] for group in range(footer.metadata.num_row_groups))
    with _writer(file, schema, keys) as writer:
        for read in read_groups(source, footer, groups, schema.names):
            table = read.replace_schema_metadata()
            steps = table.column("step").to_numpy()
            kept = table.filter(np.tile(held, len(steps) // len(held)) & (steps < before))
            writer.write_table(kept, row_group_size=max(len(kept), 1))


def _writer(file: Path, schema: pa.Schema, keys: Sequence[str]) -> pq.ParquetWriter:
    row_columns = schema.names[: len(schema) - len(keys)]
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=row_columns,
        use_byte_stream_split=list(keys),
        write_statistics=row_columns,
        write_page_checksum=True,
        store_schema=False,
    )


def _schema(row_columns: Mapping[str, pa.DataType], keys: Sequence[str]) -> pa.Schema:
    columns = (pa.field(name, kind, nullable=False) for name, kind in row_columns.items())
    return pa.schema([*columns, *(pa.field(key, pa.float64()) for key in keys)])


def _layer_columns(names: Sequence[str], first: int, points: int) -> list[pa.Array]:
    """The columns `layer` and `name` for consecutive layers that begin with number `first`."""
    layers = np.arange(first, first + len(names), dtype=np.int32)
    indices = np.repeat(np.arange(len(layers), dtype=np.int32), points)
    named = pa.DictionaryArray.from_arrays(indices, pa.array(list(names), pa.string()))
    return [pa.array(np.repeat(layers, points)), named.dictionary_decode()]


def _rank_column(ranks: Sequence[int], points: int) -> list[pa.Array]:
    """The column `rank`, `points` rows for each rank."""
    return [pa.array(np.repeat(np.array(ranks, dtype=np.int64), points))]


def _table(
    schema: pa.Schema, identities: list[pa.Array], points: PointRows | Points, totals: FloatArray
) -> pa.Table:
    width = totals.shape[2]
    moments = np.rint(points.times * 1e6).astype(np.int64)
    by_column: dict[str, NDArray[Any]] = {
        "first_step": points.first_steps,
        "step": points.steps,
        "time": moments,
        "ranks": points.ranks.astype(np.int32),
        "points": points.counts.astype(np.int32),
    }
    columns = [
        *identities,
        *(pa.array(np.tile(values, width), ROW_COLUMNS[name]) for name, values in by_column.items()),
        # NaN marks a total that no rank reported; other tools read it as null.
        *(pa.array(np.ascontiguousarray(values.T).reshape(-1), from_pandas=True) for values in totals),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def read_footer(file: Path) -> bytes:
    """Read the footer from a file's end."""
    with file.open("rb") as opened:
        opened.seek(-_TAIL_BYTES, 2)
        length = int.from_bytes(opened.read(_TAIL_BYTES)[:4], "little")
        opened.seek(-_TAIL_BYTES - length, 2)
        return opened.read()


@dataclass(frozen=True, eq=False)
class Footer:
    """A parsed footer: the content of the file, and the position of each column of each row group."""

    contents: Contents
    metadata: pq.FileMetaData
    keys: frozenset[str]
    memory_bytes: int
    """Its approximate size in memory."""

    @classmethod
    def of(cls, data: bytes) -> Footer:
        """Read the bytes that `write_layers` returned."""
        metadata = pq.read_metadata(BytesIO(data))
        contents = _decode_contents(metadata.metadata[_METADATA])
        keys = frozenset(metadata.schema.names).difference(ROW_COLUMNS, _RANK_ROW_COLUMNS)
        return cls(contents, metadata, keys, cls.bytes_of(data))

    @staticmethod
    def bytes_of(data: bytes) -> int:
        """Its approximate size in memory."""
        return _MEMORY_A_BYTE * len(data)


def read_groups(
    source: pa.NativeFile, footer: Footer, groups: Iterable[Sequence[int]], columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield these columns, some row groups at a time; each page is compared with its CRC.

    Raises:
        DamagedFile: a page differs from what was written, or is not there.
    """
    try:
        file = pq.ParquetFile(source, metadata=footer.metadata, pre_buffer=False, page_checksum_verification=True)
        for some in groups:
            yield file.read_row_groups(some, columns=columns, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise DamagedFile(str(error)) from error


def check_pages(file: Path, data: bytes) -> None:
    """Read a whole file and compare it with the footer that the database keeps.

    Raises:
        DamagedFile: a page, or the file's own footer, differs from what was written.
    """
    footer = Footer.of(data)
    with pa.OSFile(str(file)) as source:
        groups = ([group] for group in range(footer.metadata.num_row_groups))
        for _ in read_groups(source, footer, groups, footer.metadata.schema.names):
            pass
        source.seek(source.size() - len(data))
        if source.read() != data:
            raise DamagedFile("its footer differs from the database's")


class Rows(NamedTuple):
    """A stretch of points that is contiguous both in the file and in the target."""

    target: int
    row: int
    points: int


def read_layers(
    source: pa.NativeFile,
    footer: Footer,
    layers: IntArray,
    rows: Sequence[Rows],
    targets: Mapping[str, FloatArray],
) -> None:
    """Copy totals of some layers into `targets` [points, layers], one array for each key.

    Values that the file does not have are left unchanged. Only row groups with one of the layers are read.
    """
    held, contents = [key for key in targets if key in footer.keys], footer.contents
    group_of = np.where(layers < contents.layers, layers // contents.layers_a_group, -1)
    groups = np.unique(group_of[group_of >= 0])
    if not held or not len(groups):
        return
    group_bytes = 8 * len(held) * contents.layers_a_group * contents.points
    at_once = max(_READ_BYTES // max(group_bytes, 1), 1)
    read = [groups[start : start + at_once].tolist() for start in range(0, len(groups), at_once)]
    for some, table in zip(read, read_groups(source, footer, read, held), strict=True):
        wanted = np.flatnonzero(np.isin(group_of, some))
        of_wanted = group_of[wanted]
        places = layers[wanted] + contents.layers_a_group * (np.searchsorted(some, of_wanted) - of_wanted)
        from_layers, to_layers = _slice_of(places), _slice_of(wanted)
        for key in held:
            block = table.column(key).to_numpy().reshape(-1, contents.points)
            for target, row, points in rows:
                values = block[from_layers, row : row + points]
                targets[key][target : target + points, to_layers] = values.T


def _slice_of(places: IntArray) -> slice | IntArray:
    """Consecutive places as a slice, with which numpy copies only once; others unchanged."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if np.array_equal(places, np.arange(first, last + 1)) else places
