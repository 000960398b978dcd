"""Streams: one a process that reports, and what has arrived on each."""

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
from collage_server.queries.streams import with_health

__all__ = ["router"]

router = resource("streams")


@router.post("/runs/{run_id}/streams", **describes(wire.Stream, wire.StreamCreate))
async def create_stream(request: Request, run_id: RunId) -> Response:
    """Register a stream; sent again with more layers or statistics it is extended."""
    components = components_of(request)
    create = await message(request, wire.StreamCreate)
    stream = await run_in_threadpool(components.store.streams.create, run_id, create, components.clock())
    components.registry.forget(create.stream_id)
    return answer(stream)


@router.get("/runs/{run_id}/streams", **describes(wire.StreamList))
def list_streams(request: Request, run_id: RunId) -> Response:
    """The run's streams, by attempt and rank: what is stored, what is missing, who lags, whose clock is off."""
    streams = with_health(components_of(request).store.streams.of_run(run_id))
    return answer(wire.StreamList(run_id=run_id, streams=streams))
