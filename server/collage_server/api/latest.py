"""Where runs stand: the newest measured step of one, and two numbers of the ends of several."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_monitor.metrics import is_metric
from collage_monitor.statistics import statistics_for
from collage_server.api import parameters
from collage_server.api.answers import describes
from collage_server.api.cache import respond
from collage_server.api.reading import (
    LayerChoice,
    check_scalar_exists,
    points_of,
    scalars_of,
    worst_of,
)
from collage_server.api.routing import resource
from collage_server.components import components_of
from collage_server.queries.correlation import RunValue, correlation, last_metric, last_scalar
from collage_server.queries.runs import WORST_LAYERS, latest_answer
from collage_server.store import Selection, Snapshot

__all__ = ["router"]

router = resource("reading")
_RESOLUTION = 1000
_KEY = "A metric's key, or the name of a logged scalar."


@router.get("/runs/{run_id}/latest", **describes(wire.Latest))
def get_latest(request: Request, run_id: parameters.Id) -> Response:
    """The model's metrics at the newest measured step, the newest scalars, the three worst layers by EDQ."""
    store = components_of(request).store

    def make() -> wire.Latest:
        with store.points.snapshot() as snapshot:
            point = snapshot.latest(run_id)
            worst = worst_of(snapshot, run_id, point, "edq_ratio", WORST_LAYERS)
            return latest_answer(snapshot.records([run_id])[run_id], point, worst)

    return respond(request, [run_id], make)


@router.get("/correlation", **describes(wire.Correlation))
def get_correlation(
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
    store = components_of(request).store
    layers = LayerChoice(layer, pattern, module_type)
    run_ids = list(dict.fromkeys(run))

    def make() -> wire.Correlation:
        with store.points.snapshot() as snapshot:
            records = snapshot.records(run_ids)
            for key in (x, y):
                if not is_metric(key):
                    check_scalar_exists(snapshot, key, run_ids)
            found = [_values(snapshot, run_ids, key, window, layers) for key in (x, y)]
        places = [(records[run_id], found[0][run_id], found[1][run_id]) for run_id in run_ids]
        return correlation((x, y), window, places)

    return respond(request, run, make)


def _values(
    snapshot: Snapshot, run_ids: list[str], key: str, window: float, layers: LayerChoice
) -> dict[str, RunValue]:
    if is_metric(key):
        needed = statistics_for(key, intervals=False)
        points = points_of(snapshot, run_ids, needed, Selection(points=_RESOLUTION), layers)
        return {run_id: last_metric(key, held, window) for run_id, held in points.items()}
    logged = scalars_of(snapshot, run_ids, key, Selection())
    return {run_id: last_scalar(values, window) for run_id, values in logged.items()}
