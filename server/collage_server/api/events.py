"""Events: what happened to a run, as a timeline."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.answers import answer, describes
from collage_server.api.parameters import RunId
from collage_server.api.routing import resource
from collage_server.components import components_of

__all__ = ["router"]

router = resource("reading")


@router.get("/runs/{run_id}/events", **describes(wire.EventPage))
def list_events(
    request: Request,
    run_id: RunId,
    cursor: Annotated[int, Query(ge=0, le=2**31 - 1, description="What the last answer said; 0: all.")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """Launches, gaps, dropped reports, skipped steps, replicas that differ, retention, alerts; oldest first."""
    found = components_of(request).store.events.read(run_id, cursor, limit)
    newest = found[-1].event if found else cursor
    return answer(wire.EventPage(run_id=run_id, events=found, cursor=newest))
