"""Heatmap: one metric over layers and steps."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server import queries
from collage_server.api import parameters
from collage_server.api.answers import describes
from collage_server.api.cache import respond
from collage_server.components import components_of
from collage_server.errors import Unprocessable
from collage_server.store import Selection

__all__ = ["router"]

router = APIRouter(tags=["reading"])
_MOST_CELLS = 5_000_000


@router.get("/runs/{run_id}/heatmap", **describes(wire.Heatmap))
def get_heatmap(
    request: Request,
    run_id: parameters.RunId,
    metric: parameters.MetricKey,
    points: parameters.PointCount = 200,
    order: Literal["depth", "worst"] = "depth",
    module_type: parameters.ModuleType = None,
) -> Response:
    """values[layer][point]; layers in the order first seen, or worst first over the whole run."""
    store = components_of(request).store
    keys = queries.statistics_for(parameters.checked_metric(metric), intervals=False)

    def make() -> wire.Heatmap:
        chosen = parameters.chosen_layers(store, run_id, module_type=module_type)
        most = _MOST_CELLS // max(len(chosen or store.layers(run_id)), 1)
        if points > most:
            raise Unprocessable(
                f"points is {points}; a heatmap of this run has at most {most}", field="points", limit=most
            )
        measured = store.layer_points(run_id, keys, Selection(points=points), chosen)
        return queries.heatmap(run_id, metric, measured, points, order)

    return respond(request, [run_id], make)
