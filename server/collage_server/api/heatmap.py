"""Heatmap: one metric over layers and steps."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server import queries
from collage_server.api import parameters
from collage_server.api.answers import describes
from collage_server.api.cache import respond
from collage_server.api.routing import resource
from collage_server.components import components_of
from collage_server.errors import Unprocessable
from collage_server.store import Selection

__all__ = ["router"]

router = resource("reading")
_MOST_CELLS = 5_000_000


@router.get("/runs/{run_id}/heatmap", **describes(wire.Heatmap))
def get_heatmap(
    request: Request,
    run_id: parameters.RunId,
    metric: parameters.MetricKey,
    points: parameters.PointCount = 200,
    order: Literal["depth", "worst"] = "depth",
    pattern: parameters.Pattern = None,
    module_type: parameters.ModuleType = None,
    first_step: parameters.FirstStep = None,
    last_step: parameters.LastStep = None,
    axis: parameters.AxisName = "step",
) -> Response:
    """values[layer][point]; layers in the order first seen, or worst first over all that is asked for."""
    components = components_of(request)
    store = components.store
    keys = queries.statistics_for(parameters.checked_metric(metric), intervals=False)

    def make() -> wire.Heatmap:
        chosen = parameters.chosen_layers(store, run_id, pattern, module_type)
        most = _MOST_CELLS // max(len(chosen or store.streams.layers(run_id)), 1)
        if points > most:
            raise Unprocessable(
                f"points is {points}; a heatmap of this run has at most {most}", field="points", limit=most
            )
        selection = Selection(first_step=first_step, last_step=last_step, points=points, buckets=True)
        measured = store.points.layer_points(run_id, keys, selection, chosen)
        found = queries.heatmap(run_id, metric, measured, points, order)
        times = measured.times[np.searchsorted(measured.steps, found.steps)]
        places = parameters.positions_of(components, [run_id], axis)[run_id].of(np.array(found.steps), times)
        return msgspec.structs.replace(found, axis=axis, positions=wire.undefined_to_none(places))

    return respond(request, [run_id], make)
