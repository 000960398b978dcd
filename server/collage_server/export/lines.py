"""JSON lines: the run, its layers, a line a step, where asked for one a step and rank, one an event, and an end.

What travels are the stored totals, never ratios, so that an import loses nothing. The end counts the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from collage_monitor import wire
from collage_server.export.steps import ExportPlan, StepBatch, read_batches, read_ranks
from collage_server.store import Points, Store

__all__ = ["VERSION", "jsonl_bytes"]

VERSION: Final = 1
_ROOT: Final = "variance_product_root/"


def jsonl_bytes(store: Store, plan: ExportPlan, run: wire.Run) -> Iterator[bytes]:
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
            yield _line(line)
        for rank, points in read_ranks(store, plan, batch):
            for line in _of_rank(rank, points):
                yield _line(line)
        steps += len(batch.steps)
    for event in plan.events:
        yield _line({"kind": "event", "event": event})
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
    """Without what the totals of a single step give anew, and without what nobody reported."""
    return {
        key: values
        for key, values in totals.items()
        if not (single and key.startswith(_ROOT)) and not np.isnan(values).all()
    }


def _numbers(totals: Mapping[str, NDArray[np.float64]], index: int) -> list[float | wire.Number | None]:
    return wire.undefined_to_none(np.array([values[index] for values in totals.values()], dtype=np.float64))
