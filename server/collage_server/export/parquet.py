"""Parquet: the wide table in columns, a row group a batch of steps. Needs the extra `parquet` (pyarrow)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from collage_server.errors import Unprocessable
from collage_server.export.steps import ExportPlan
from collage_server.export.table import TableRows, column_names, read_rows
from collage_server.store import Store

__all__ = ["parquet_bytes"]


def parquet_bytes(store: Store, plan: ExportPlan) -> Iterator[bytes]:
    """The export, a row group at a time; absent values are null.

    Raises:
        Unprocessable: pyarrow is not installed here.
    """
    if find_spec("pyarrow") is None:
        raise Unprocessable(
            "Parquet needs pyarrow, which this server does not have; pip install 'collage-monitor[parquet]' "
            "there, or ask for format=csv or format=jsonl",
            field="format",
        )
    return _write(store, plan)


def _write(store: Store, plan: ExportPlan) -> Iterator[bytes]:
    pyarrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    names = column_names(plan)
    places = [("step", pyarrow.int64()), ("first_step", pyarrow.int64()), ("time", pyarrow.float64())]
    places += [("ranks", pyarrow.int64()), ("layer", pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))]
    places += [("rank", pyarrow.int64())] if plan.ranks else []
    schema = pyarrow.schema(places + [(name, pyarrow.float64()) for name in names])
    sink = _Sink()
    with parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
        for columns in read_rows(store, plan):
            writer.write_table(_table(pyarrow, schema, columns, names))
            yield sink.taken()
    yield sink.taken()


def _table(pyarrow: Any, schema: Any, columns: TableRows, names: list[str]) -> Any:
    arrays = [columns.steps, columns.first_steps, columns.times, columns.ranks]
    layers = pyarrow.array([name or None for name in columns.layers], pyarrow.string())
    built = [*map(pyarrow.array, arrays), layers.dictionary_encode()]
    if "rank" in schema.names:
        built.append(pyarrow.array([columns.rank] * len(columns.layers), pyarrow.int64()))
    for name in names:
        values, there = columns.values[name]
        built.append(pyarrow.array(values, mask=~there))
    return pyarrow.Table.from_arrays(built, schema=schema)


class _Sink(io.RawIOBase):
    """A file that only grows, and whose beginning is taken away as it is written."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._written = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._written += len(part)
        return len(part)

    def taken(self) -> bytes:
        """What was written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
