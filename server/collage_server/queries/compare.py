"""Runs of a comparison: each one's metrics merged over everything measured, its last scalars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from msgspec import structs

from collage_monitor import wire
from collage_monitor.statistics import finish_all, reduce_steps
from collage_monitor.wire import Number
from collage_server.queries.finished import number
from collage_server.queries.side_by_side import alike
from collage_server.store.contract import FloatArray, Points, RunRecord

__all__ = ["MEAN_OF_LAST", "compared_run", "merged_metrics", "run_summary"]

MEAN_OF_LAST: Final = 20


def run_summary(
    record: RunRecord, state: str, merged: dict[str, Number | None], newest: Mapping[str, FloatArray]
) -> wire.RunSummary:
    """The run beside others; `merged` are its metrics over everything measured, `newest` its last logged values."""
    return wire.RunSummary(
        run_id=record.run_id,
        name=record.name,
        strategy=record.strategy,
        dtype=record.dtype,
        state=state,
        last_step=record.last_step,
        reports=record.reports,
        merged=merged,
        scalars=record.scalars,
        mean_scalars={name: _mean(values) for name, values in newest.items()},
    )


def compared_run(summary: wire.RunSummary, series: wire.Series) -> wire.ComparedRun:
    """The run with its curve."""
    return wire.ComparedRun(series=series, **structs.asdict(summary))


def merged_metrics(points: Mapping[str, Points]) -> dict[str, dict[str, Number | None]]:
    """By run, every metric that the model's totals can make, merged over all of its points."""
    found: dict[str, dict[str, Number | None]] = {run_id: {} for run_id in points}
    measured = {run_id: held for run_id, held in points.items() if len(held.steps)}
    for group in alike(measured):
        starts = np.array([place.start for place in group.places], dtype=np.intp)
        with np.errstate(divide="ignore", invalid="ignore"):
            table = finish_all(reduce_steps(group.points.totals, axis=0, starts=starts))
        for key, array in table.items():
            for run_id, value in zip(group.run_ids, array.tolist(), strict=True):
                found[run_id][key] = number(value)
    return found


def _mean(values: FloatArray) -> Number:
    with np.errstate(invalid="ignore", over="ignore"):
        return wire.to_number(float(values[-MEAN_OF_LAST:].mean()))
