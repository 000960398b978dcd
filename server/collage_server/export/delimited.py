"""CSV: the wide table as text."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator

from collage_server.export.slabs import ExportPlan
from collage_server.export.table import Columns, column_names, place_names, read_columns
from collage_server.store import Store

__all__ = ["csv_bytes"]


def csv_bytes(store: Store, plan: ExportPlan) -> Iterator[bytes]:
    """The export, some rows at a time; absent values are empty cells, non-finite ones as on the wire."""
    names = column_names(plan)
    yield _text([[*place_names(plan), *names]])
    for columns in read_columns(store, plan):
        yield _text(_rows(plan, columns, names))


def _rows(plan: ExportPlan, columns: Columns, names: list[str]) -> Iterator[tuple[object, ...]]:
    cells = [_cells(columns, name) for name in names]
    places = (columns.steps.tolist(), columns.first_steps.tolist(), columns.times.tolist(), columns.ranks.tolist())
    rank = "" if columns.rank is None else columns.rank
    ranks = [[rank] * len(columns.layers)] if plan.ranks else []
    return zip(*places, columns.layers, *ranks, *cells, strict=True)


def _cells(columns: Columns, name: str) -> list[float | str]:
    values, there = columns.values[name]
    return [_cell(value) if present else "" for value, present in zip(values.tolist(), there.tolist(), strict=True)]


def _cell(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _text(rows: object) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)  # type: ignore[arg-type]
    return text.getvalue().encode()
