"""The format of an archived file: layer totals of one run's chunks at one level, readable by any Parquet engine.

Rows are sorted by layer and step; a row group holds some layers, so that one is read without most others. The first
columns identify a row (`layer`, `name`, `first_step`, `step`, `time`, `ranks`, `points`). Then comes one float64
column per statistic under its key, null where no rank reported it. At coarse levels there are "minimum METRIC" and
"maximum METRIC", too. Sums are byte-stream-split and compressed with zstd.

A file of the model's totals has a column `rank` in place of the layer, -1 for all ranks together; they are read as
layers are.

The file's metadata say in `collage` which parts of which chunks it holds, in the order of its rows.

Each page has a CRC, which `read_groups` checks. Older files have none: their pages are read unchecked.
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
    "OF_A_ROW",
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
"""Of fewer, all layers together cost more to read; of more, one layer alone."""
_READ_BYTES: Final = 2**24
"""Of row groups that are decoded at a time."""
_MEMORY_A_BYTE: Final = 12
"""Of a footer, once read: measured, 11.7."""
_FORMAT: Final = 1
_METADATA: Final = b"collage"
_OF_A_POINT: Final = {
    "first_step": pa.int64(),
    "step": pa.int64(),
    "time": pa.timestamp("us", tz="UTC"),
    "ranks": pa.int32(),
    "points": pa.int32(),
}
OF_A_ROW: Final = {"layer": pa.int32(), "name": pa.string(), **_OF_A_POINT}
"""What a row is of, in the order of the columns."""
_OF_A_RANK: Final = {"rank": pa.int64(), **_OF_A_POINT}
"""The same in a file of the model's totals."""
_TAIL_BYTES: Final = 8
"""The length of the footer and a mark."""


class HeldPart(NamedTuple):
    """A part of a chunk in a file: how many of its points."""

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

    `ranks`: of the model's totals, whose each "layer" is, -1 for all together. `series`: of logged values, in the
    order of the rows.
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
        """Each part with the first of its rows."""
        starts = accumulate((part.points for part in self.parts), initial=0)
        return list(zip(self.parts, starts, strict=False))


_decode_contents: Final = msgspec.json.Decoder(Contents).decode


def layers_in_group(points: int) -> int:
    """How many layers of so many points a row group holds."""
    return max(_ROWS_A_GROUP // max(points, 1), 1)


def write_layers(
    file: Path,
    contents: Contents,
    points: PointRows,
    names: Sequence[str],
    keys: Sequence[str],
    groups: Iterable[FloatArray],
) -> bytes:
    """Write a file; its footer, to be kept beside its path.

    `groups`: totals [keys, points, layers] of each row group's layers, best with the points of each side by side.
    `names`: of all layers, as many as `contents` says. `points` are those of the parts, in their order.
    """
    of_a_row = _OF_A_RANK if contents.ranks else OF_A_ROW
    schema = _schema(of_a_row, keys)
    with _writer(file, schema, keys) as writer:
        writer.add_key_value_metadata(metadata_of(contents))
        first = 0
        for totals in groups:
            rows, count = totals.shape[1:]
            held = slice(first, first + count)
            of_rows = (
                _of_ranks(contents.ranks[held], rows) if contents.ranks else _of_layers(names[held], first, rows)
            )
            writer.write_table(_table(schema, of_rows, points, totals), row_group_size=count * rows)
            first += count
    return read_footer(file)


def write_points(file: Path, keys: Sequence[str], groups: Iterable[Points]) -> None:
    """Write points of some layers after the other, which no reader of ours asks for: without metadata of ours."""
    schema = _schema(OF_A_ROW, keys)
    with _writer(file, schema, keys) as writer:
        first = 0
        for points in groups:
            rows, count = len(points.steps), len(points.layers)
            unknown = np.full((rows, count), np.nan)
            totals = np.stack([points.totals.get(key, unknown) for key in keys])
            table = _table(schema, _of_layers(points.layers, first, rows), points, totals)
            writer.write_table(table, row_group_size=max(layers_in_group(rows) * rows, 1))
            first += count


def metadata_of(contents: Contents) -> dict[bytes, bytes]:
    """The metadata of a file."""
    return {_METADATA: msgspec.json.encode(contents)}


def copy_points(file: Path, source: pa.NativeFile, footer: Footer, chunks: Collection[int], before: int) -> None:
    """Write the points of some chunks of a file, before a step, to another one, which has no metadata of ours."""
    held = np.concatenate([np.full(part.points, part.chunk in chunks) for part in footer.contents.parts])
    schema = footer.metadata.schema.to_arrow_schema().remove_metadata()
    keys = [name for name in schema.names if name not in OF_A_ROW]
    groups = ([group] for group in range(footer.metadata.num_row_groups))
    with _writer(file, schema, keys) as writer:
        for read in read_groups(source, footer, groups, schema.names):
            table = read.replace_schema_metadata()
            steps = table.column("step").to_numpy()
            kept = table.filter(np.tile(held, len(steps) // len(held)) & (steps < before))
            writer.write_table(kept, row_group_size=max(len(kept), 1))


def _writer(file: Path, schema: pa.Schema, keys: Sequence[str]) -> pq.ParquetWriter:
    of_a_row = schema.names[: len(schema) - len(keys)]
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=of_a_row,
        use_byte_stream_split=list(keys),
        write_statistics=of_a_row,
        write_page_checksum=True,
        store_schema=False,
    )


def _schema(of_a_row: Mapping[str, pa.DataType], keys: Sequence[str]) -> pa.Schema:
    columns = (pa.field(name, kind, nullable=False) for name, kind in of_a_row.items())
    return pa.schema([*columns, *(pa.field(key, pa.float64()) for key in keys)])


def _of_layers(names: Sequence[str], first: int, points: int) -> list[pa.Array]:
    """The columns `layer` and `name` of the rows of these layers, which follow on each other from `first` on."""
    layers = np.arange(first, first + len(names), dtype=np.int32)
    indices = np.repeat(np.arange(len(layers), dtype=np.int32), points)
    named = pa.DictionaryArray.from_arrays(indices, pa.array(list(names), pa.string()))
    return [pa.array(np.repeat(layers, points)), named.dictionary_decode()]


def _of_ranks(ranks: Sequence[int], points: int) -> list[pa.Array]:
    """The column `rank`."""
    return [pa.array(np.repeat(np.array(ranks, dtype=np.int64), points))]


def _table(schema: pa.Schema, of_rows: list[pa.Array], points: PointRows | Points, totals: FloatArray) -> pa.Table:
    width = totals.shape[2]
    moments = np.rint(points.times * 1e6).astype(np.int64)
    of_points: dict[str, NDArray[Any]] = {
        "first_step": points.first_steps,
        "step": points.steps,
        "time": moments,
        "ranks": points.ranks.astype(np.int32),
        "points": points.counts.astype(np.int32),
    }
    columns = [
        *of_rows,
        *(pa.array(np.tile(values, width), OF_A_ROW[name]) for name, values in of_points.items()),
        # NaN is what nobody reported; other tools read it as null.
        *(pa.array(np.ascontiguousarray(values.T).reshape(-1), from_pandas=True) for values in totals),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def read_footer(file: Path) -> bytes:
    """A file's footer, as it stands at its end."""
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
    """About what it takes."""

    @classmethod
    def of(cls, data: bytes) -> Footer:
        """Read the bytes that `write_layers` returned."""
        metadata = pq.read_metadata(BytesIO(data))
        contents = _decode_contents(metadata.metadata[_METADATA])
        keys = frozenset(metadata.schema.names).difference(OF_A_ROW, _OF_A_RANK)
        return cls(contents, metadata, keys, cls.bytes_of(data))

    @staticmethod
    def bytes_of(data: bytes) -> int:
        """Its approximate size in memory."""
        return _MEMORY_A_BYTE * len(data)


def read_groups(
    source: pa.NativeFile, footer: Footer, groups: Iterable[Sequence[int]], columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Columns of some row groups at a time. Each page is compared with its CRC.

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
    """Read a whole file, whose footer is known from elsewhere.

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
    """Points that follow on each other both in a file and where they are wanted."""

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
    """Put totals of some layers into `targets` [points, layers] by key.

    Values that the file does not have are left unchanged. Row groups without any of the layers are not touched.
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
    """The same places as a slice where they follow on each other: numpy then copies them once."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if np.array_equal(places, np.arange(first, last + 1)) else places
