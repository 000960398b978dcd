"""Latest: the newest measured step of a run."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.answers import describes
from collage_server.api.cache import respond
from collage_server.api.parameters import RunId, worst_of
from collage_server.api.routing import resource
from collage_server.components import components_of
from collage_server.queries import WORST_LAYERS, latest_answer

__all__ = ["router"]

router = resource("reading")


@router.get("/runs/{run_id}/latest", **describes(wire.Latest))
def get_latest(request: Request, run_id: RunId) -> Response:
    """The model's metrics at the newest measured step, the newest scalars, the three worst layers by EDQ."""
    store = components_of(request).store

    def make() -> wire.Latest:
        point = store.points.latest(run_id)
        worst = worst_of(store, run_id, point, "edq_ratio", WORST_LAYERS)
        return latest_answer(store.runs.get(run_id), point, worst)

    return respond(request, [run_id], make)
