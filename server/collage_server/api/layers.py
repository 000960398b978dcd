"""Layers: the run's dictionary."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.answers import answer, describes
from collage_server.api.parameters import RunId
from collage_server.api.routing import resource
from collage_server.components import components_of

__all__ = ["router"]

router = resource("reading")


@router.get("/runs/{run_id}/layers", **describes(wire.LayerList))
def list_layers(request: Request, run_id: RunId) -> Response:
    """The run's layers in the order in which they were first seen; `elements` counts the whole tensor."""
    return answer(wire.LayerList(run_id=run_id, layers=components_of(request).store.streams.layers(run_id)))
