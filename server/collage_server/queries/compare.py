"""One run of a comparison: its curve, its metrics merged over everything measured, its last scalars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from collage_monitor import wire
from collage_monitor.statistics import finish_all, reduce_steps
from collage_monitor.wire import Number
from collage_server.queries.finished import numbers
from collage_server.store.contract import FloatArray, Points, RunRecord

__all__ = ["MEAN_OF_LAST", "compared_run"]

MEAN_OF_LAST: Final = 20


def compared_run(
    record: RunRecord,
    state: str,
    series: wire.Series,
    points: Points,
    newest: Mapping[str, FloatArray],
) -> wire.ComparedRun:
    """The run beside others; `points` are all points of the model, `newest` its last logged values."""
    return wire.ComparedRun(
        run_id=record.run_id,
        name=record.name,
        strategy=record.strategy,
        dtype=record.dtype,
        state=state,
        last_step=record.last_step,
        reports=record.reports,
        series=series,
        merged=_merged(points),
        scalars=record.scalars,
        mean_scalars={name: _mean(values) for name, values in newest.items()},
    )


def _merged(points: Points) -> dict[str, Number | None]:
    if not len(points.steps):
        return {}
    with np.errstate(divide="ignore", invalid="ignore"):
        return numbers(finish_all(reduce_steps(points.totals, axis=0)))


def _mean(values: FloatArray) -> Number:
    with np.errstate(invalid="ignore", over="ignore"):
        return wire.to_number(float(values[-MEAN_OF_LAST:].mean()))
