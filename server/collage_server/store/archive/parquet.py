"""What is in an archived file: layer totals of one run's chunks at one level, as any engine reads Parquet.

Rows are sorted by layer and step; a row group holds some layers, so that one is read without most others.
Columns are what a row is of (`layer`, `name`, `first_step`, `step`, `time`, `ranks`, `points`), then one
float64 column a statistic under its key, null where nobody reported it. At coarse levels there are "minimum METRIC"
and "maximum METRIC", too. Sums are byte-stream-split and compressed with zstd.

The file's metadata say in `collage` which parts of which chunks it holds, in the order of its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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

from collage_server.store.chunks.blobs import PointRows
from collage_server.store.records import FloatArray, IntArray

__all__ = [
    "Contents",
    "Footer",
    "HeldPart",
    "OF_A_ROW",
    "Rows",
    "copy_points",
    "layers_in_group",
    "read_layers",
    "write_layers",
]

_ROWS_A_GROUP: Final = 2**14
"""Of fewer, all layers together cost more to read; of more, one layer alone."""
_READ_BYTES: Final = 2**24
"""Of row groups that are decoded at a time."""
_MEMORY_A_BYTE: Final = 12
"""Of a footer, once read: measured, 11.7."""
_FORMAT: Final = 1
_METADATA: Final = b"collage"
OF_A_ROW: Final = {
    "layer": pa.int32(),
    "name": pa.string(),
    "first_step": pa.int64(),
    "step": pa.int64(),
    "time": pa.timestamp("us", tz="UTC"),
    "ranks": pa.int32(),
    "points": pa.int32(),
}
"""What a row is of, in the order of the columns."""
_TAIL_BYTES: Final = 8
"""The length of the footer and a mark."""


class HeldPart(NamedTuple):
    """A part of a chunk in a file: how many of its points."""

    chunk: int
    part: int
    points: int


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds, as its metadata say."""

    run_id: str
    attempt: int
    level: int
    parts: tuple[HeldPart, ...]
    layers: int
    layers_a_group: int
    format: int = _FORMAT

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
    schema = _schema(keys)
    with _writer(file, schema, keys) as writer:
        writer.add_key_value_metadata({_METADATA: msgspec.json.encode(contents)})
        first = 0
        for totals in groups:
            count = totals.shape[2]
            writer.write_table(_table(schema, points, names, first, totals), row_group_size=count * totals.shape[1])
            first += count
    return _footer_of(file)


def copy_points(file: Path, source: pa.NativeFile, chunks: Collection[int], before: int) -> None:
    """Write the points of some chunks of a file, before a step, to another one, which has no metadata of ours."""
    opened = pq.ParquetFile(source, pre_buffer=False)
    contents = _decode_contents(opened.metadata.metadata[_METADATA])
    held = np.concatenate([np.full(part.points, part.chunk in chunks) for part in contents.parts])
    keys = [name for name in opened.schema_arrow.names if name not in OF_A_ROW]
    with _writer(file, opened.schema_arrow.remove_metadata(), keys) as writer:
        for group in range(opened.num_row_groups):
            table = opened.read_row_group(group, use_threads=False).replace_schema_metadata()
            steps = table.column("step").to_numpy()
            kept = table.filter(np.tile(held, len(steps) // len(held)) & (steps < before))
            writer.write_table(kept, row_group_size=max(len(kept), 1))


def _writer(file: Path, schema: pa.Schema, keys: Sequence[str]) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=list(OF_A_ROW),
        use_byte_stream_split=list(keys),
        write_statistics=list(OF_A_ROW),
        store_schema=False,
    )


def _schema(keys: Sequence[str]) -> pa.Schema:
    of_a_row = (pa.field(name, kind, nullable=False) for name, kind in OF_A_ROW.items())
    return pa.schema([*of_a_row, *(pa.field(key, pa.float64()) for key in keys)])


def _table(schema: pa.Schema, points: PointRows, names: Sequence[str], first: int, totals: FloatArray) -> pa.Table:
    count, width = totals.shape[1], totals.shape[2]
    layers = np.arange(first, first + width, dtype=np.int32)
    moments = np.rint(points.times * 1e6).astype(np.int64)
    of_points: dict[str, NDArray[Any]] = {
        "first_step": points.first_steps,
        "step": points.steps,
        "time": moments,
        "ranks": points.ranks.astype(np.int32),
        "points": points.counts.astype(np.int32),
    }
    indices = np.repeat(np.arange(width, dtype=np.int32), count)
    named = pa.DictionaryArray.from_arrays(indices, pa.array(list(names[first : first + width]), pa.string()))
    columns = [
        pa.array(np.repeat(layers, count)),
        named.dictionary_decode(),
        *(pa.array(np.tile(values, width), OF_A_ROW[name]) for name, values in of_points.items()),
        # NaN is what nobody reported: null, for whoever reads the file with other tools.
        *(pa.array(np.ascontiguousarray(values.T).reshape(-1), from_pandas=True) for values in totals),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _footer_of(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(-_TAIL_BYTES, 2)
        length = int.from_bytes(opened.read(_TAIL_BYTES)[:4], "little")
        opened.seek(-_TAIL_BYTES - length, 2)
        return opened.read()


@dataclass(frozen=True, eq=False)
class Footer:
    """A file's footer, read: what it holds, and where each column of each row group is."""

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
        keys = frozenset(metadata.schema.names).difference(OF_A_ROW)
        return cls(contents, metadata, keys, cls.bytes_of(data))

    @staticmethod
    def bytes_of(data: bytes) -> int:
        """About what it will take in memory."""
        return _MEMORY_A_BYTE * len(data)


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

    What the file does not have stays as it is there. Row groups without any of the layers are not touched.
    """
    held, contents = [key for key in targets if key in footer.keys], footer.contents
    group_of = np.where(layers < contents.layers, layers // contents.layers_a_group, -1)
    groups = np.unique(group_of[group_of >= 0])
    if not held or not len(groups):
        return
    file = pq.ParquetFile(source, metadata=footer.metadata, pre_buffer=False)
    group_bytes = 8 * len(held) * contents.layers_a_group * contents.points
    at_once = max(_READ_BYTES // max(group_bytes, 1), 1)
    for start in range(0, len(groups), at_once):
        some = groups[start : start + at_once]
        table = file.read_row_groups(some.tolist(), columns=held, use_threads=False)
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
