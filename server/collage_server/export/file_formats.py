"""A run as JSON lines, as CSV and as Parquet.

JSON lines: the run, its layers, one line per step, on request one per step and rank, one per event, and an end,
which counts the steps. It contains the stored totals, never ratios, so an import loses nothing.
`collage_monitor/importing/json_lines.py` reads them, and refuses any VERSION but its own: raise both.

CSV and Parquet: one wide table: one row per step for the model, one per step and layer, and on request one per step
and rank. Parquet has a row group a batch of steps, and needs the extra `parquet` (pyarrow).

`api/export.py` streams them, `step_batches.py` reads the run. Columns are added, never renamed: scripts read them
by name (`tests/server/life/test_export.py`).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from collage_monitor import wire
from collage_monitor.statistics import finish_all, has_interval, metric_keys
from collage_server.errors import Unprocessable
from collage_server.export.step_batches import ExportPlan, StepBatch, read_batches, read_ranks, take_memory
from collage_server.memory_budget import hold, released_afterwards, require, trim_heap
from collage_server.store import Points, Store

__all__ = [
    "TableRows",
    "VERSION",
    "column_names",
    "csv_bytes",
    "jsonl_bytes",
    "parquet_bytes",
    "read_rows",
]

_PLACES: Final = ("step", "first_step", "time", "ranks", "layer")
_RANK: Final = "rank"
_CELLS_AT_ONCE: Final = 2**16
_ROW_GROUP_CELLS: Final = 2**19
_CELL_BYTES: Final = 24
"""Of a row in memory: a number, whether it is there, and what it is finished from."""
_CHUNK_BYTES: Final = 1024
"""That Parquet's writer holds to its end of each column of each row group, as measured."""
_TEXT_BYTES: Final = 100
"""Of a cell while a page is made; a number of a line as well."""
_EVENTS_AT_ONCE: Final = 200
FloatArray = NDArray[np.float64]
VERSION: Final = 1
_ROOT: Final = "variance_product_root/"


@dataclass(frozen=True, eq=False)
class TableRows:
    """Some rows, oldest first, the model before its layers; with `rank`, rows of the model on that rank.

    Values are (numbers [rows], present [rows]).

    An undefined metric and an unreported statistic are absent; a logged NaN is present.
    """

    steps: NDArray[np.int64]
    first_steps: NDArray[np.int64]
    times: FloatArray
    ranks: NDArray[np.int64]
    layers: list[str]
    values: dict[str, tuple[FloatArray, NDArray[np.bool_]]]
    rank: int | None = None

    def between(self, first: int, end: int) -> TableRows:
        """Some of the rows."""
        some = slice(first, end)
        values = {name: (numbers[some], there[some]) for name, (numbers, there) in self.values.items()}
        places = (self.steps[some], self.first_steps[some], self.times[some], self.ranks[some])
        return TableRows(*places, self.layers[some], values, self.rank)


def _place_names(plan: ExportPlan) -> tuple[str, ...]:
    """The first columns; `layer` and `rank` are empty in the rows of the whole model, `rank` in those of layers."""
    return (*_PLACES, _RANK) if plan.ranks else _PLACES


def _scalar_columns(plan: ExportPlan) -> dict[str, str]:
    """Logged name → column; a name that a metric or statistic has, too, is set apart as `logged/NAME`."""
    taken = {*_PLACES, _RANK, *_computed(plan)}
    return {name: f"logged/{name}" if name in taken else name for name in plan.scalars}


def column_names(plan: ExportPlan) -> list[str]:
    """All columns after the places: logged scalars, metrics with their intervals, statistics."""
    return [*_scalar_columns(plan).values(), *_computed(plan)]


def _computed(plan: ExportPlan) -> list[str]:
    names = []
    for key in metric_keys(plan.statistics):
        names.append(key)
        if has_interval(key, plan.statistics):
            names += [f"{key}_low", f"{key}_high"]
    return list(dict.fromkeys([*names, *plan.statistics]))


def read_rows(store: Store, plan: ExportPlan, cells: int) -> Iterator[TableRows]:
    """The table, about so many cells at a time: all ranks merged, then each of them over the same steps."""
    scalars, computed = _scalar_columns(plan), _computed(plan)
    names = [layer.name for layer in plan.layers]
    columns = max(len(scalars) + len(computed), 1)

    def rows(batch: StepBatch, names: list[str]) -> Iterator[TableRows]:
        for some in batch.slices(max(cells // (columns * (1 + len(names))), 1)):
            with released_afterwards():
                hold(_CELL_BYTES * columns * (len(some.steps) + len(some.points.steps) * len(names)))
                yield _rows_of(some, names, scalars, computed)

    for batch in read_batches(store, plan):
        yield from rows(batch, names)
        for rank, points in read_ranks(store, plan, batch):
            alone = StepBatch(batch.selection, points.steps, points.times, points, {}, {})
            for found in rows(alone, []):
                yield replace(found, rank=rank)


@dataclass(frozen=True, eq=False)
class _RowOrder:
    """Where each row comes from: its step within the batch, and its layer, −1 for the model."""

    steps: NDArray[np.int64]
    layers: NDArray[np.int64]
    order: NDArray[np.intp]


def _order(batch: StepBatch, place: NDArray[np.intp], wide: int) -> _RowOrder:
    """The rows of the model and then those of the layers, put in order."""
    count = len(batch.steps)
    steps = np.concatenate([np.arange(count), np.repeat(place, wide)])
    layers = np.concatenate([np.full(count, -1), np.tile(np.arange(wide), len(place))])
    order = np.lexsort((layers, steps))
    return _RowOrder(steps[order], layers[order], order)


def _rows_of(batch: StepBatch, names: list[str], scalars: dict[str, str], computed: list[str]) -> TableRows:
    points = batch.points
    place = np.searchsorted(batch.steps, points.steps)
    rows = _order(batch, place, len(names) if batch.layers else 0)
    first_steps, ranks = batch.steps.copy(), np.zeros(len(batch.steps), dtype=np.int64)
    first_steps[place], ranks[place] = points.first_steps, points.ranks
    values = {column: _logged(batch, name, rows) for name, column in scalars.items()}
    titles = ["", *names]
    return TableRows(
        steps=batch.steps[rows.steps],
        first_steps=first_steps[rows.steps],
        times=batch.times[rows.steps],
        ranks=ranks[rows.steps],
        layers=[titles[index + 1] for index in rows.layers.tolist()],
        values=values | _measured(batch, place, rows, computed),
    )


def _logged(batch: StepBatch, name: str, rows: _RowOrder) -> tuple[FloatArray, NDArray[np.bool_]]:
    there = np.zeros(len(rows.order), dtype=bool)
    numbers = np.full(len(rows.order), np.nan)
    if name in batch.scalars:
        values, present = batch.scalars[name]
        model = rows.layers < 0
        numbers[model], there[model] = values[rows.steps[model]], present[rows.steps[model]]
    return numbers, there


def _measured(
    batch: StepBatch, place: NDArray[np.intp], rows: _RowOrder, computed: list[str]
) -> dict[str, tuple[FloatArray, NDArray[np.bool_]]]:
    model, layers = _finished(batch.points.totals), _finished(batch.layers)
    wide = (len(rows.order) - len(batch.steps)) // max(len(place), 1)
    values = {}
    for key in computed:
        stacked = np.full(len(batch.steps), np.nan)
        stacked[place] = model.get(key, np.nan)
        by_layer = np.full((len(place), wide), np.nan)
        by_layer[:] = layers.get(key, np.nan)
        joined = np.concatenate([stacked, by_layer.ravel()])[rows.order]
        values[key] = (joined, ~np.isnan(joined))
    return values


def _finished(totals: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    if not totals:
        return {}
    with np.errstate(divide="ignore", invalid="ignore"):
        return {**finish_all(totals), **totals}


def csv_bytes(store: Store, plan: ExportPlan) -> Generator[bytes, None, None]:
    """The export, some rows at a time; absent values are empty cells, non-finite ones as on the wire."""
    names = column_names(plan)
    yield _text([[*_place_names(plan), *names]])
    titles = {name: _text([[name]])[:-1] for name in ["", *(layer.name for layer in plan.layers)]}
    titles[""] = b""
    at_once = max(_CELLS_AT_ONCE // len(names), 1) if names else _CELLS_AT_ONCE
    for columns in read_rows(store, plan, _CELLS_AT_ONCE):
        for start in range(0, len(columns.layers), at_once):
            some = columns.between(start, start + at_once)
            with released_afterwards():
                hold(_TEXT_BYTES * len(names) * len(some.layers))
                yield b"\n".join([*_rows(plan, some, names, titles), b""])


def _rows(plan: ExportPlan, columns: TableRows, names: list[str], titles: Mapping[str, bytes]) -> Iterator[bytes]:
    places = map(_encoded, (columns.steps, columns.first_steps, columns.times, columns.ranks))
    layers = [titles[name] for name in columns.layers]
    rank = b"" if columns.rank is None else b"%d" % columns.rank
    ranks = [[rank] * len(layers)] if plan.ranks else []
    cells = iter(_cells(columns, names))
    for place in zip(*places, layers, *ranks, strict=True):
        yield b",".join([*place, *islice(cells, len(names))])


def _cells(columns: TableRows, names: list[str]) -> list[bytes]:
    """Row by row, all columns encoded at once: a column at a time, thousands of names took minutes."""
    if not names:
        return []
    values = np.stack([columns.values[name][0] for name in names], axis=1).ravel()
    there = np.stack([columns.values[name][1] for name in names], axis=1).ravel()
    cells = _encoded(values)
    for place in np.flatnonzero(~(there & np.isfinite(values))).tolist():
        cells[place] = _non_finite(values[place]) if there[place] else b""
    return cells


def _encoded(values: NDArray[np.generic]) -> list[bytes]:
    """Numbers as text, all at once: an eighth of what `repr` costs."""
    return wire.encode_json(values.tolist())[1:-1].split(b",") if len(values) else []


def _non_finite(value: float) -> bytes:
    return b"NaN" if math.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"


def _text(rows: object) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)  # type: ignore[arg-type]
    return text.getvalue().encode()


def jsonl_bytes(store: Store, plan: ExportPlan, run: wire.Run) -> Generator[bytes, None, None]:
    """The export, some lines at a time.

    A step's line has `step` and `time`; `scalars` where values were logged; where it was measured `first_step`
    (smaller where the point merges several measured steps), `ranks`, `model` {statistic: total} and `layers`
    {statistic: [total by layer, in the order of the layers' lines]}. null is "not reported". Where single ranks are
    wanted, lines of the kind `rank` follow the steps that they are about: `rank`, `step`, `first_step`, `model`.
    """
    head = {"kind": "run", "version": VERSION, "run": run, "statistics": plan.statistics, "steps": len(plan.steps)}
    yield _line(head)
    for layer in plan.layers:
        yield _line({"kind": "layer", "layer": layer})
    steps = 0
    for batch in read_batches(store, plan):
        for line in _steps(batch):
            with released_afterwards():
                hold(_TEXT_BYTES * (len(batch.points.totals) + len(batch.layers) * len(plan.layers)))
                yield _line(line)
        for rank, points in read_ranks(store, plan, batch):
            for line in _of_rank(rank, points):
                yield _line(line)
        steps += len(batch.steps)
    after = 0
    while after < plan.last_event:
        with released_afterwards():
            page = store.events.read(run.run_id, after, _EVENTS_AT_ONCE).events
            for event in page:
                if event.event <= plan.last_event:
                    yield _line({"kind": "event", "event": event})
        after = page[-1].event if page else plan.last_event
    yield _line({"kind": "end", "steps": steps})


def _line(value: Mapping[str, Any]) -> bytes:
    return wire.encode_json(value) + b"\n"


def _steps(batch: StepBatch) -> Iterator[dict[str, Any]]:
    points = batch.points
    single = bool((points.counts == 1).all())
    model, layers = _kept(points.totals, single), _kept(batch.layers, single)
    measured = {step: index for index, step in enumerate(points.steps.tolist())}
    for row, (step, time) in enumerate(zip(batch.steps.tolist(), batch.times.tolist(), strict=True)):
        line: dict[str, Any] = {"kind": "step", "step": step, "time": time}
        logged = {
            name: wire.to_number(float(values[row]))
            for name, (values, there) in batch.scalars.items()
            if there[row]
        }
        if logged:
            line["scalars"] = logged
        if step in measured:
            index = measured[step]
            line["first_step"] = int(points.first_steps[index])
            line["ranks"] = int(points.ranks[index])
            line["model"] = dict(zip(model, _numbers(model, index), strict=True))
            if layers:
                line["layers"] = {key: wire.undefined_to_none(values[index]) for key, values in layers.items()}
        yield line


def _of_rank(rank: int, points: Points) -> Iterator[dict[str, Any]]:
    model = _kept(points.totals, bool((points.counts == 1).all()))
    for index, (first, step) in enumerate(zip(points.first_steps.tolist(), points.steps.tolist(), strict=True)):
        numbers = dict(zip(model, _numbers(model, index), strict=True))
        yield {"kind": "rank", "rank": rank, "step": step, "first_step": first, "model": numbers}


def _kept(totals: Mapping[str, NDArray[np.float64]], single: bool) -> dict[str, NDArray[np.float64]]:
    """Without values that follow from the totals of a single step, and without unreported ones."""
    return {
        key: values
        for key, values in totals.items()
        if not (single and key.startswith(_ROOT)) and not np.isnan(values).all()
    }


def _numbers(totals: Mapping[str, NDArray[np.float64]], index: int) -> list[float | wire.Number | None]:
    return wire.undefined_to_none(np.array([values[index] for values in totals.values()], dtype=np.float64))


def parquet_bytes(store: Store, plan: ExportPlan) -> Generator[bytes, None, None]:
    """The export, a row group at a time; absent values are null. The writer keeps a little memory for each group's
    columns.

    Raises:
        Unprocessable: pyarrow is not installed here.
        NeedsTooMuch: what it keeps of all of them could never be held; CSV and JSON lines keep nothing.
    """
    if find_spec("pyarrow") is None:
        raise Unprocessable(
            "Parquet needs pyarrow, which this server does not have; pip install 'collage-monitor[parquet]' "
            "there, or ask for format=csv or format=jsonl",
            field="format",
        )
    columns = len(_place_names(plan)) + len(column_names(plan))
    # This many rows need the least memory: with fewer, the columns' metadata outweighs their numbers.
    rows = max(math.isqrt(_CHUNK_BYTES * plan.rows // _CELL_BYTES), _ROW_GROUP_CELLS // columns, 1)
    rows = min(rows, plan.batch_points * (1 + len(plan.layers)))
    said = _CHUNK_BYTES * columns * -(-plan.rows // rows)
    require(said + _CELL_BYTES * columns * rows)
    take_memory(plan, said)
    return _write(store, plan, rows * columns)


def _write(store: Store, plan: ExportPlan, cells: int) -> Generator[bytes, None, None]:
    pyarrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    names = column_names(plan)
    places = [("step", pyarrow.int64()), ("first_step", pyarrow.int64()), ("time", pyarrow.float64())]
    places += [("ranks", pyarrow.int64()), ("layer", pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))]
    places += [("rank", pyarrow.int64())] if plan.ranks else []
    schema = pyarrow.schema(places + [(name, pyarrow.float64()) for name in names])
    sink = _Sink()
    # Few totals repeat, so a dictionary of them saves nothing. No reader searches by their bounds.
    options: dict[str, Any] = {"use_dictionary": ["layer"], "write_statistics": [name for name, _ in places]}
    options["write_page_checksum"] = True
    try:
        with parquet.ParquetWriter(sink, schema, compression="zstd", **options) as writer:
            for columns in read_rows(store, plan, cells):
                writer.write_table(_table(pyarrow, schema, columns, names))
                yield sink.taken()
        yield sink.taken()
    finally:
        # The writer leaves scattered memory behind: without this, the process kept 50 MiB an export.
        trim_heap()


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
        """The bytes written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
