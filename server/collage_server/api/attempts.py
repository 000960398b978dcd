"""Attempts: one a launch of the job."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.answers import answer, describes
from collage_server.api.bodies import message
from collage_server.api.parameters import RunId
from collage_server.api.routing import resource
from collage_server.components import components_of

__all__ = ["router"]

router = resource("attempts")


@router.post("/runs/{run_id}/attempts", **describes(wire.Attempt, wire.AttemptCreate))
async def create_attempt(request: Request, run_id: RunId) -> Response:
    """Register a launch when its first step is taken; the same launch_id is the same attempt."""
    components = components_of(request)
    create = await message(request, wire.AttemptCreate)
    return answer(
        await run_in_threadpool(components.store.streams.create_attempt, run_id, create, components.clock())
    )
