"""Series: one metric or logged scalar over a run."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api import parameters
from collage_server.api.answers import describes
from collage_server.api.cache import respond
from collage_server.components import Components, components_of
from collage_server.errors import Unprocessable
from collage_server.queries import metric_series, scalar_series, statistics_for
from collage_server.store import Selection

__all__ = ["router"]

router = APIRouter(tags=["reading"])


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
) -> Response:
    """A metric of the model, of one layer, or of layers of a glob or module type; or a logged scalar."""
    components = components_of(request)
    selection = Selection(rank=rank, first_step=first_step, last_step=last_step, points=points, extremes_of=metric)
    scalar = not parameters.is_metric(metric)
    whole = layer is None and pattern is None and module_type is None
    if scalar and not whole:
        raise Unprocessable(f"{metric!r} is a logged scalar: it has no layers", field="layer")

    def make() -> wire.Series:
        if scalar:
            return _scalar(components, run_id, metric, selection, points, axis)
        keys = statistics_for(parameters.checked_metric(metric))
        positions = parameters.positions_of(components, [run_id], axis)
        if whole:
            measured = components.store.model_points(run_id, keys, selection)
        else:
            measured = parameters.layer_points(components, run_id, keys, selection, layer, pattern, module_type)
        shown = layer or pattern or module_type
        return metric_series(metric, {run_id: measured}, points, positions, shown)[run_id]

    return respond(request, [run_id], make)


def _scalar(
    components: Components,
    run_id: str,
    name: str,
    selection: Selection,
    points: int,
    axis: parameters.AxisName,
) -> wire.Series:
    logged = parameters.scalars_of(components.store, [run_id], name, selection)[run_id]
    if not len(logged.steps):
        parameters.known_scalars(name, [components.store.run(run_id)])
    positions = parameters.positions_of(components, [run_id], axis)[run_id]
    return scalar_series(run_id, name, logged, points, positions)
