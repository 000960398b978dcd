"""Histogram: how the updates stand against the grid."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_monitor.metrics import HISTOGRAM_LABELS, STATISTICS
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


@router.get("/runs/{run_id}/histogram", **describes(wire.Histogram))
def get_histogram(
    request: Request,
    run_id: parameters.RunId,
    name: Annotated[str, Query(max_length=512)] = "update_ulp_histogram",
    layer: parameters.LayerName = None,
    pattern: parameters.Pattern = None,
    module_type: parameters.ModuleType = None,
    rank: parameters.Rank = None,
    step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    first_step: parameters.FirstStep = None,
    last_step: parameters.LastStep = None,
) -> Response:
    """Merged over the whole run or from one step to another, or at the measured step at or before `step`."""
    known = [entry.name for entry in STATISTICS.values() if entry.label == "octave"]
    if name not in known:
        raise Unprocessable(f"no histogram is called {name!r}; there are: {', '.join(known)}", field="name")
    if step is not None and (first_step is not None or last_step is not None):
        raise Unprocessable("give step, or from and to, not both", field="step")
    components = components_of(request)
    keys = tuple(f"{name}/{label}" for label in HISTOGRAM_LABELS)

    def make() -> wire.Histogram:
        selection = Selection(rank=rank, first_step=first_step, last_step=last_step, points=1)
        if step is not None:
            selection = parameters.measured_at(components.store, run_id, step, rank)
        layers: parameters.Layers = (layer, pattern, module_type)
        measured = parameters.points_of(components.store, [run_id], keys, selection, layers)[run_id]
        shown = next(filter(None, layers), None)
        return queries.histogram(run_id, name, measured, shown, merged=step is None)

    return respond(request, [run_id], make)
