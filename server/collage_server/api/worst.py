"""Worst: the layers that stand out at the newest measured step."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server import queries
from collage_server.api import parameters
from collage_server.api.answers import describes
from collage_server.api.cache import respond
from collage_server.api.routing import resource
from collage_server.components import components_of

__all__ = ["router"]

router = resource("reading")


@router.get("/runs/{run_id}/worst", **describes(wire.WorstLayer, many=True))
def get_worst(
    request: Request,
    run_id: parameters.RunId,
    metric: parameters.MetricKey = "edq_ratio",
    k: Annotated[int, Query(ge=1, le=1000)] = 10,
    pattern: parameters.Pattern = None,
    module_type: parameters.ModuleType = None,
    step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
) -> Response:
    """The k layers worst in a metric: lowest where more is better, |1 − x| against the oracle, else highest.

    At the newest measured step, or at the one at or before `step`.
    """
    store = components_of(request).store
    key = parameters.checked_metric(metric)

    def make() -> list[wire.WorstLayer]:
        chosen = parameters.chosen_layers(store, run_id, pattern, module_type)
        if step is None:
            return parameters.worst_of(store, run_id, store.points.latest(run_id), key, k, chosen)
        at = parameters.measured_at(store, run_id, step)
        keys = queries.statistics_for(key, intervals=False)
        return queries.worst_layers(key, store.points.layer_points(run_id, keys, at, chosen), k)

    return respond(request, [run_id], make)
