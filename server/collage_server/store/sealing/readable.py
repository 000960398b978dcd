"""Finished numbers in real columns, for SQL by hand: written when points are sealed, read by nobody here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, delete, insert, select

from collage_monitor.metrics import preferred_state
from collage_monitor.statistics import finish
from collage_server.store import schema
from collage_server.store.chunks.blobs import maximum_key, minimum_key
from collage_server.store.reading.run_view import RunView
from collage_server.store.records import FloatArray, IntArray, Points
from collage_server.store.sealing.plan import SealPlan

__all__ = ["ReadableRows", "forget_points", "layer_rows", "point_rows", "write_layers", "write_points"]

_ROWS_AT_ONCE: Final = 512
_STATE: Final = "state_decrement_ratio"
_OBSERVED: Final = "state_decrement_observed_sum/"
_POINT: Final = schema.measured_point
_LAYER: Final = schema.layer_point
Rows = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class ReadableRows:
    """Rows that a part makes."""

    points: Rows = field(default_factory=list)
    layers: Rows = field(default_factory=list)

    def layer_slices(self) -> Iterator[Rows]:
        """The layers' rows, by transaction."""
        for start in range(0, len(self.layers), _ROWS_AT_ONCE):
            yield self.layers[start : start + _ROWS_AT_ONCE]


def point_rows(
    view: RunView, plan: SealPlan, whole: Points, steps: IntArray, logged: Mapping[tuple[str, str], bytes]
) -> Rows:
    """A row for each of these steps of the chunk's points; what was logged for it before stays."""
    chosen = np.isin(whole.steps, steps)
    totals = {key: values[chosen] for key, values in whole.totals.items()}
    size = int(chosen.sum())
    columns: dict[str, list[Any]] = {
        "step": whole.steps[chosen].tolist(),
        "time": whole.times[chosen].tolist(),
        "ranks": whole.ranks[chosen].tolist(),
    }
    columns.update({name: _values(name, totals, (size,)) for name in schema.POINT_METRICS})
    known = {} if plan.info is None else _known_scalars(view, plan, columns["step"])
    found = _scalars(view, plan.attempt, logged)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for row in rows:
        for name in schema.POINT_SCALARS:
            row[name] = known.get((row["step"], name), found.get((row["step"], name)))
    return [{"run_id": view.run_id, "attempt": plan.attempt, **row} for row in rows]


def layer_rows(view: RunView, plan: SealPlan, points: Points, entries: Mapping[str, FloatArray]) -> Rows:
    """A row a layer of a whole chunk, from what its coarsest level holds ([1, layers] by entry)."""
    count = len(view.layers)
    totals = {key: values for key, values in entries.items() if " " not in key}
    columns = {name: _values(name, totals, (1, count)) for name in schema.LAYER_METRICS}
    for bound, key in (("minimum", minimum_key("edq_ratio")), ("maximum", maximum_key("edq_ratio"))):
        columns[f"edq_ratio_{bound}"] = _plain(entries.get(key, np.full((1, count), np.nan)))
    place = {
        "run_id": view.run_id,
        "attempt": plan.attempt,
        "chunk": plan.chunk,
        "first_step": int(points.first_steps[0]),
        "step": int(points.steps[-1]),
        "time": float(points.times[-1]),
        "measured_steps": int(points.counts.sum()),
    }
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [
        {**place, "layer": layer, **row}
        for layer, row in enumerate(rows)
        if any(v is not None for v in row.values())
    ]


def write_points(connection: Connection, run_id: str, plan: SealPlan, readable: ReadableRows) -> None:
    """Replace the rows of these steps."""
    if not readable.points:
        return
    steps = [row["step"] for row in readable.points]
    mine = (_POINT.c.run_id == run_id, _POINT.c.attempt == plan.attempt)
    connection.execute(delete(_POINT).where(*mine, _POINT.c.step.in_(steps)))
    connection.execute(insert(_POINT), readable.points)


def write_layers(connection: Connection, run_id: str, plan: SealPlan, rows: Rows) -> None:
    """Replace the chunk's rows of these layers."""
    mine = (_LAYER.c.run_id == run_id, _LAYER.c.attempt == plan.attempt, _LAYER.c.chunk == plan.chunk)
    layers = _LAYER.c.layer.between(rows[0]["layer"], rows[-1]["layer"])
    connection.execute(delete(_LAYER).where(*mine, layers))
    connection.execute(insert(_LAYER), rows)


def forget_points(connection: Connection, run_id: str, attempt: int, last_step: int) -> None:
    """Drop the rows of steps up to the raw horizon."""
    mine = (_POINT.c.run_id == run_id, _POINT.c.attempt == attempt)
    connection.execute(delete(_POINT).where(*mine, _POINT.c.step <= last_step))


def _values(name: str, totals: Mapping[str, FloatArray], shape: tuple[int, ...]) -> list[float | None]:
    key = _state_key(totals) if name == _STATE else name
    if key is None:
        return [None] * shape[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return _plain(np.broadcast_to(finish(key, totals), shape))


def _plain(values: FloatArray) -> list[float | None]:
    """Undefined is NULL."""
    return [None if value != value else value for value in values.ravel().tolist()]


def _state_key(totals: Mapping[str, FloatArray]) -> str | None:
    return preferred_state(f"{_STATE}/{key.removeprefix(_OBSERVED)}" for key in totals if key.startswith(_OBSERVED))


def _known_scalars(view: RunView, plan: SealPlan, steps: Sequence[int]) -> dict[tuple[int, str], float]:
    mine = (_POINT.c.run_id == view.run_id, _POINT.c.attempt == plan.attempt, _POINT.c.step.in_(steps))
    columns = [_POINT.c[name] for name in ("step", *schema.POINT_SCALARS)]
    return {
        (row.step, name): value
        for row in view.connection.execute(select(*columns).where(*mine))
        for name in schema.POINT_SCALARS
        if (value := getattr(row, name)) is not None
    }


def _scalars(
    view: RunView, attempt: int, logged: Mapping[tuple[str, str], bytes]
) -> dict[tuple[int, str], float | None]:
    """(step, name) → mean over the ranks that logged it; of two processes on a rank the older one's."""
    owners: dict[int, str] = {}
    for stream_id, stream in sorted(view.streams.items(), key=lambda entry: entry[1].number):
        if stream.attempt == attempt:
            owners.setdefault(stream.rank, stream_id)
    values: dict[tuple[int, str], list[float]] = {}
    for (stream_id, name), data in logged.items():
        if name in schema.POINT_SCALARS and stream_id in owners.values():
            table = np.frombuffer(data, dtype="<f8").reshape(3, -1)
            for step, value in zip(table[0].view("<i8").tolist(), table[2].tolist(), strict=True):
                values.setdefault((step, name), []).append(value)
    return {place: _plain(np.array([sum(found) / len(found)]))[0] for place, found in values.items()}
