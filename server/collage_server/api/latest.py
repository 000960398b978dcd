"""Where a run stands: its newest measured step."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api import query_parameters
from collage_server.api.cached_answers import respond
from collage_server.api.responses import describes
from collage_server.api.routing import resource
from collage_server.app_state import app_state_of
from collage_server.newest_keeper import newest_points
from collage_server.queries.run_answers import latest_answer

__all__ = ["router"]

router = resource("reading")


@router.get("/runs/{run_id}/latest", **describes(wire.Latest))
def get_latest(request: Request, run_id: query_parameters.Id) -> Response:
    """The model's metrics at the newest measured step, the newest scalars, the three worst layers by EDQ."""
    store = app_state_of(request).store

    def make() -> wire.Latest:
        with store.points.snapshot() as snapshot:
            records = snapshot.records([run_id])
            return latest_answer(records[run_id], newest_points(snapshot, records, layers=True)[run_id])

    return respond(request, [run_id], make)
