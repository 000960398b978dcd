"""Series: one metric or logged scalar over a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api import parameters
from collage_server.api.answers import describes
from collage_server.api.cache import respond, revisions_of
from collage_server.api.following import Curve, follow
from collage_server.api.routing import resource
from collage_server.components import Components, components_of
from collage_server.errors import Unprocessable
from collage_server.queries import metric_series, scalar_series, statistics_for
from collage_server.store import Points, ScalarPoints, Selection

__all__ = ["router"]

router = resource("reading")
_CURSOR = "Follow the curve: empty at first, then that of the last answer."


@router.get("/runs/{run_id}/series", **describes(wire.Series))
def get_series(
    request: Request,
    run_id: parameters.RunId,
    metric: parameters.MetricKey,
    layer: parameters.LayerName = None,
    pattern: parameters.Pattern = None,
    module_type: parameters.ModuleType = None,
    rank: parameters.Rank = None,
    first_step: parameters.FirstStep = None,
    last_step: parameters.LastStep = None,
    points: parameters.PointCount = 1000,
    axis: parameters.AxisName = "step",
    cursor: Annotated[str | None, Query(max_length=200, description=_CURSOR)] = None,
) -> Response:
    """A metric of the model, of one layer, or of layers of a glob or module type; or a logged scalar."""
    components = components_of(request)
    selection = Selection(rank=rank, first_step=first_step, last_step=last_step, points=points, extremes_of=metric)
    layers: parameters.Layers = (layer, pattern, module_type)
    if parameters.is_metric(metric):
        parameters.checked_metric(metric)
        curve = _metric(components, run_id, metric, layers, axis)
    elif any(layers):
        raise Unprocessable(f"{metric!r} is a logged scalar: it has no layers", field="layer")
    else:
        curve = _scalar(components, run_id, metric, axis)
    revisions = revisions_of(request, [run_id])

    def make() -> wire.Series:
        if cursor is None:
            return curve.answer(selection)
        return follow(curve, selection, cursor, revisions[run_id][0])

    return respond(request, revisions, make)


def _metric(
    components: Components, run_id: str, metric: str, layers: parameters.Layers, axis: parameters.AxisName
) -> Curve:
    keys = statistics_for(metric)
    shown = next(filter(None, layers), None)

    def read(selection: Selection) -> Points:
        return parameters.points_of(components.store, [run_id], keys, selection, layers)[run_id]

    def answer(selection: Selection) -> wire.Series:
        positions = parameters.positions_of(components, [run_id], axis)
        [(_, series)] = metric_series(metric, {run_id: read(selection)}, selection.points or 1, positions, shown)
        return series

    def complete() -> int:
        point = components.store.points.latest(run_id)
        return -1 if point is None else point.step

    return Curve(read, answer, complete)


def _scalar(components: Components, run_id: str, name: str, axis: parameters.AxisName) -> Curve:
    def read(selection: Selection) -> ScalarPoints:
        return parameters.scalars_of(components.store, [run_id], name, selection)[run_id]

    def answer(selection: Selection) -> wire.Series:
        logged = read(selection)
        if not len(logged.steps):
            parameters.known_scalars(name, [components.store.runs.get(run_id)])
        positions = parameters.positions_of(components, [run_id], axis)[run_id]
        return scalar_series(run_id, name, logged, selection.points or 1, positions)

    return Curve(read, answer, lambda: None)
