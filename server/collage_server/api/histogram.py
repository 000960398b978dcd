"""Histogram: how the updates stand against the grid."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_monitor.metrics import HISTOGRAM_LABELS, STATISTICS
from collage_server import queries
from collage_server.api import parameters
from collage_server.api.answers import describes
from collage_server.api.cache import respond
from collage_server.components import Components, components_of
from collage_server.errors import NotFound, Unprocessable
from collage_server.store import Points, Selection

__all__ = ["router"]

router = APIRouter(tags=["reading"])


@router.get("/runs/{run_id}/histogram", **describes(wire.Histogram))
def get_histogram(
    request: Request,
    run_id: parameters.RunId,
    name: Annotated[str, Query(max_length=512)] = "update_ulp_histogram",
    layer: parameters.LayerName = None,
    step: Annotated[int | None, Query(ge=0, le=2**53)] = None,
) -> Response:
    """Merged over the whole run, or at the measured step at or before `step`."""
    known = [entry.name for entry in STATISTICS.values() if entry.label == "octave"]
    if name not in known:
        raise Unprocessable(f"no histogram is called {name!r}; there are: {', '.join(known)}", field="name")
    components = components_of(request)
    keys = tuple(f"{name}/{label}" for label in HISTOGRAM_LABELS)

    def make() -> wire.Histogram:
        selection = Selection(points=1) if step is None else _at_or_before(components, run_id, step)
        measured = _read(components, run_id, keys, selection, layer)
        return queries.histogram(run_id, name, measured, layer, merged=step is None)

    return respond(request, [run_id], make)


def _at_or_before(components: Components, run_id: str, step: int) -> Selection:
    steps = components.store.model_points(run_id, ("measured_steps",), Selection(last_step=step)).steps
    if not len(steps):
        raise NotFound(f"run {run_id!r} has no measured step at or before {step}; leave step out", field="step")
    return Selection(first_step=int(steps[-1]), last_step=int(steps[-1]))


def _read(
    components: Components, run_id: str, keys: tuple[str, ...], selection: Selection, layer: str | None
) -> Points:
    if layer is None:
        return components.store.model_points(run_id, keys, selection)
    return parameters.layer_points(components, run_id, keys, selection, layer, None)
