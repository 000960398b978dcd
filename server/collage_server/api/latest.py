"""Latest: the newest measured step of a run."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.answers import answer, describes
from collage_server.api.parameters import RunId, worst_of
from collage_server.components import components_of
from collage_server.queries import WORST_LAYERS, latest_answer

__all__ = ["router"]

router = APIRouter(tags=["reading"])


@router.get("/runs/{run_id}/latest", **describes(wire.Latest))
def get_latest(request: Request, run_id: RunId) -> Response:
    """The model's metrics at the newest measured step, the newest scalars, the three worst layers by EDQ."""
    store = components_of(request).store
    point = store.latest(run_id)
    return answer(
        latest_answer(store.run(run_id), point, worst_of(store, run_id, point, "edq_ratio", WORST_LAYERS))
    )
