"""Correlation: does one number go with another over several runs?"""

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
from collage_server.store import ScalarPoints, Selection, Store

__all__ = ["router"]

router = resource("reading")
_RESOLUTION = 1000
_NOTHING = ScalarPoints.empty()
_KEY = "A metric's key, or the name of a logged scalar."


@router.get("/correlation", **describes(wire.Correlation))
def correlation(
    request: Request,
    x: Annotated[str, Query(max_length=512, description=_KEY)],
    y: Annotated[str, Query(max_length=512, description=_KEY)],
    run: Annotated[list[str], Query(min_length=1, max_length=500, description="A run_id; repeat it.")],
    window: Annotated[
        float, Query(gt=0.0, le=1.0, description="Over so much of each run's end; 1 is the whole run.")
    ] = 0.1,
    layer: parameters.LayerName = None,
    pattern: parameters.Pattern = None,
    module_type: parameters.ModuleType = None,
) -> Response:
    """Two numbers of each run's end (metrics merged, scalars' mean), and Pearson's and Spearman's coefficients.

    With a layer, a glob or a module type the metrics are those of these layers."""
    components = components_of(request)
    layers: parameters.Layers = (layer, pattern, module_type)

    def make() -> wire.Correlation:
        records = [components.store.runs.get(run_id) for run_id in dict.fromkeys(run)]
        for key in (x, y):
            if parameters.is_metric(key):
                parameters.checked_metric(key)
            else:
                parameters.known_scalars(key, records)
        places = [
            (
                record,
                _value(components.store, record.run_id, x, window, layers),
                _value(components.store, record.run_id, y, window, layers),
            )
            for record in records
        ]
        return queries.correlation((x, y), window, places)

    return respond(request, run, make)


def _value(store: Store, run_id: str, key: str, window: float, layers: parameters.Layers) -> queries.RunValue:
    if parameters.is_metric(key):
        needed = queries.statistics_for(key, intervals=False)
        points = parameters.points_of(store, [run_id], needed, Selection(points=_RESOLUTION), layers)[run_id]
        return queries.last_metric(key, points, window)
    logged = parameters.scalars_of(store, [run_id], key, Selection())[run_id]
    return queries.last_scalar(logged, window)
