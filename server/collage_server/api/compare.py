"""Compare: several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_monitor.metrics import SCALARS
from collage_server import queries
from collage_server.api import parameters
from collage_server.api.answers import describes
from collage_server.api.cache import respond, revisions_of
from collage_server.components import Components, components_of
from collage_server.store import ScalarPoints, Selection

__all__ = ["router"]

router = APIRouter(tags=["reading"])
_NOTHING = ScalarPoints.empty()


@router.get("/compare", **describes(wire.Comparison))
def compare(
    request: Request,
    run: Annotated[list[str], Query(min_length=1, max_length=100, description="A run_id; repeat it.")],
    metric: parameters.MetricKey,
    points: parameters.PointCount = 500,
    axis: parameters.AxisName = "step",
) -> Response:
    """Each run's curve of one metric or scalar, its metrics merged over everything, its last scalars."""
    components = components_of(request)
    _check(components, run, metric)

    def one(run_id: str, revision: object) -> msgspec.Raw:
        key = ("compare", run_id, metric, points, axis, revision)
        return components.answers.encoded(key, lambda: _compared(components, run_id, metric, points, axis))

    def make() -> dict[str, Any]:
        revisions = revisions_of(request, run)
        runs = [one(run_id, revision) for run_id, revision in revisions.items()]
        return {"metric": metric, "axis": axis, "runs": runs}

    return respond(request, run, make, keep=False)


def _check(components: Components, run_ids: Sequence[str], metric: str) -> None:
    if parameters.is_metric(metric):
        parameters.checked_metric(metric)
    elif metric not in SCALARS:
        parameters.known_scalars(metric, [components.store.run(run_id) for run_id in dict.fromkeys(run_ids)])


def _compared(
    components: Components, run_id: str, metric: str, points: int, axis: parameters.AxisName
) -> wire.ComparedRun:
    record = components.store.run(run_id)
    shown = metric if parameters.is_metric(metric) else None
    measured = components.store.model_points(record.run_id, None, Selection(points=points, extremes_of=shown))
    positions = parameters.positions_of(components, record, axis)
    if parameters.is_metric(metric):
        series = queries.metric_series(record.run_id, metric, measured, points, positions)
    else:
        found = components.store.scalar_points(record.run_id, (metric,), Selection())
        logged = found.get(metric, _NOTHING)
        series = queries.scalar_series(record.run_id, metric, logged, points, positions)
    state = queries.state_of(record, components.clock(), components.settings.stale_after_seconds)
    newest = components.store.newest_scalars(record.run_id, queries.MEAN_OF_LAST)
    return queries.compared_run(record, state, series, measured, newest)
