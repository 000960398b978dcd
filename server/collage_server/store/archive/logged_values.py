"""Files of logged values: what the streams of an attempt have logged, one name after the other.

Columns are `stream`, `name`, `step`, `time` (Unix seconds) and `value`: one row a step, the last word on it. A row
group holds whole names, so that one is read without most others.

`sealing/archiving.py` writes them, `archive_reader.py` reads them. Files never change, so columns and the order of
series are fixed, and values come back whatever the size of a row group
(`tests/server/store/test_archive_contents.py`); the store's contract holds over files (`test_archived.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby, repeat
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from collage_server.store.archive.parquet import (
    Contents,
    Footer,
    LoggedSeries,
    metadata_of,
    read_footer,
    read_groups,
)
from collage_server.store.records import FloatArray

__all__ = ["read_logged", "write_logged"]

_ROWS_A_GROUP: Final = 2**15
"""At least; free: who reads goes by what the file says of its groups."""
_NUMBERS: Final = ("step", "time", "value")
_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("time", pa.float64(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)


def write_logged(file: Path, contents: Contents, tables: Iterable[FloatArray]) -> bytes:
    """Write a file; its footer. `tables`: [3][values] steps, times, values of each of the contents' series."""
    with pq.ParquetWriter(
        file,
        _SCHEMA,
        compression="zstd",
        compression_level=1,
        use_dictionary=["stream", "name"],
        column_encoding={"step": "DELTA_BINARY_PACKED", "time": "BYTE_STREAM_SPLIT", "value": "BYTE_STREAM_SPLIT"},
        write_statistics=["name", "step"],
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        writer.add_key_value_metadata(metadata_of(contents))
        waiting = iter(tables)
        for _, members in groupby(_placed(contents, repeat(_ROWS_A_GROUP)), lambda place: place[1]):
            series = [held for held, *_ in members]
            steps, times, values = np.concatenate([next(waiting) for _ in series], axis=1)
            columns = [
                _repeated([held.stream_id for held in series], series),
                _repeated([held.name for held in series], series),
                pa.array(steps.astype(np.int64)),
                pa.array(times),
                pa.array(values),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA), row_group_size=max(len(steps), 1))
    return read_footer(file)


def _repeated(words: Sequence[str], series: Sequence[LoggedSeries]) -> pa.Array:
    indices = np.repeat(np.arange(len(words), dtype=np.int32), [held.values for held in series])
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(words), pa.string())).dictionary_decode()


def _placed(contents: Contents, rows: Iterable[int]) -> Iterator[tuple[LoggedSeries, int, int]]:
    """Each series with its row group, and the first of its rows in that. rows: after which each group is full."""
    group = row = 0
    full = iter(rows)
    most = next(full)
    for series in contents.series:
        if row >= most:
            group, row, most = group + 1, 0, next(full)
        yield series, group, row
        row += series.values


def read_logged(
    source: pa.NativeFile, footer: Footer, wanted: Collection[LoggedSeries]
) -> Iterator[tuple[LoggedSeries, FloatArray]]:
    """[3][values] steps, times and values of some of the series."""
    rows = (footer.metadata.row_group(group).num_rows for group in range(footer.metadata.num_row_groups))
    by_group: dict[int, list[tuple[LoggedSeries, int]]] = {}
    for series, group, row in _placed(footer.contents, rows):
        if series in wanted:
            by_group.setdefault(group, []).append((series, row))
    tables = read_groups(source, footer, ([group] for group in by_group), _NUMBERS)
    for members, table in zip(by_group.values(), tables, strict=True):
        numbers = np.stack([table.column(name).to_numpy().astype(np.float64) for name in _NUMBERS])
        for series, row in members:
            yield series, numbers[:, row : row + series.values]
