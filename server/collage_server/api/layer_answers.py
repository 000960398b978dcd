"""Layers beside each other: a heatmap, the worst of them, and a histogram of updates against the grid.

It checks the question, reads by `store_reads.py` (a heatmap from the snapshot) and answers by
`queries/layer_answers.py`. Routes and answers are the contract's (`docs/api/http.md`). The list of layers,
`/runs/{run_id}/layers`, is in `streams.py`. Answers are tested in `tests/server/test_series.py`, refusals in
`test_errors.py`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_monitor.metrics import HISTOGRAM_LABELS, STATISTICS
from collage_monitor.statistics import statistics_for
from collage_server.api import query_parameters
from collage_server.api.cached_answers import respond
from collage_server.api.responses import describes
from collage_server.api.routing import resource_router
from collage_server.api.store_reads import measured_step, points_of, positions_of, worst_of
from collage_server.app_state import app_state_of
from collage_server.errors import Unprocessable
from collage_server.memory_budget import hold
from collage_server.queries.layer_answers import heatmap, histogram
from collage_server.store import Selection

__all__ = ["router"]

router = resource_router("reading")
_MOST_CELLS: Final = 5_000_000
"""Of a heatmap; more is refused."""
_CELL_BYTES: Final = 80
"""Of a cell in memory: a float in a list, its text, and the arrays that it is made of
(`tests/server/test_memory_budget.py`)."""


@router.get("/runs/{run_id}/heatmap", **describes(wire.Heatmap))
def get_heatmap(
    request: Request,
    run_id: query_parameters.Id,
    metric: query_parameters.MetricKey,
    points: query_parameters.PointCount = 200,
    order: Literal["depth", "worst"] = "depth",
    pattern: query_parameters.Pattern = None,
    module_type: query_parameters.ModuleType = None,
    first_step: query_parameters.FirstStep = None,
    last_step: query_parameters.LastStep = None,
    axis: query_parameters.AxisName = "step",
) -> Response:
    """values[layer][point]; layers in the order first seen, or worst first over the requested steps."""
    store = app_state_of(request).store
    keys = statistics_for(query_parameters.checked_metric(metric), intervals=False)

    def make() -> wire.Heatmap:
        with store.points.snapshot() as snapshot:
            chosen = query_parameters.LayerChoice(None, pattern, module_type).names(snapshot, run_id)
            most = _MOST_CELLS // max(len(chosen) if chosen else snapshot.layer_count(run_id), 1)
            if points > most:
                raise Unprocessable(
                    f"points is {points}; a heatmap of this run has at most {most}", field="points", limit=most
                )
            selection = Selection(
                first_step=first_step, last_step=last_step, points=points, by_layer=True, layers=chosen
            )
            hold(_CELL_BYTES * points * (len(chosen) if chosen else snapshot.layer_count(run_id)))
            measured = snapshot.points([run_id], keys, selection)[run_id]
            positions = None if axis == "step" else positions_of(snapshot, [run_id], axis)[run_id]
        found = heatmap(run_id, metric, measured, points, order)
        if positions is None:
            return msgspec.structs.replace(found, axis=axis, positions=found.steps)
        times = measured.times[np.searchsorted(measured.steps, found.steps)]
        places = positions.of(np.array(found.steps), times)
        return msgspec.structs.replace(found, axis=axis, positions=wire.undefined_to_none(places))

    return respond(request, [run_id], make)


@router.get("/runs/{run_id}/histogram", **describes(wire.Histogram))
def get_histogram(
    request: Request,
    run_id: query_parameters.Id,
    name: Annotated[str, Query(max_length=512)] = "update_ulp_histogram",
    layer: query_parameters.LayerName = None,
    pattern: query_parameters.Pattern = None,
    module_type: query_parameters.ModuleType = None,
    rank: query_parameters.Rank = None,
    step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    first_step: query_parameters.FirstStep = None,
    last_step: query_parameters.LastStep = None,
) -> Response:
    """Merged over the whole run or from one step to another, or at the measured step at or before `step`."""
    known = [entry.name for entry in STATISTICS.values() if entry.label == "octave"]
    if name not in known:
        raise Unprocessable(f"no histogram is called {name!r}; there are: {', '.join(known)}", field="name")
    if step is not None and (first_step is not None or last_step is not None):
        raise Unprocessable("give step, or from and to, not both", field="step")
    store = app_state_of(request).store
    keys = tuple(f"{name}/{label}" for label in HISTOGRAM_LABELS)
    layers = query_parameters.LayerChoice(layer, pattern, module_type)

    def make() -> wire.Histogram:
        selection = Selection(rank=rank, first_step=first_step, last_step=last_step, points=1)
        with store.points.snapshot() as snapshot:
            if step is not None:
                selection = Selection(rank=rank, at={run_id: measured_step(snapshot, run_id, step, rank)})
            measured = points_of(snapshot, [run_id], keys, selection, layers)[run_id]
        return histogram(run_id, name, measured, layers.label, merged=step is None)

    return respond(request, [run_id], make)


@router.get("/runs/{run_id}/worst", **describes(wire.WorstLayer, many=True))
def get_worst(
    request: Request,
    run_id: query_parameters.Id,
    metric: query_parameters.MetricKey = "edq_ratio",
    k: Annotated[int, Query(ge=1, le=1000)] = 10,
    pattern: query_parameters.Pattern = None,
    module_type: query_parameters.ModuleType = None,
    step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
) -> Response:
    """The k layers worst in a metric: lowest where more is better, |1 − x| against the oracle, else highest.

    At the newest measured step, or at the one at or before `step`.
    """
    store = app_state_of(request).store
    key = query_parameters.checked_metric(metric)

    def make() -> list[wire.WorstLayer]:
        with store.points.snapshot() as snapshot:
            chosen = query_parameters.LayerChoice(None, pattern, module_type).names(snapshot, run_id)
            at = snapshot.newest_step(run_id) if step is None else measured_step(snapshot, run_id, step)
            return worst_of(snapshot, run_id, at, key, k, chosen)

    return respond(request, [run_id], make)
