"""What a run is made of: its streams, the layers that they declared, and the events that happened to it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.answers import answer, describes
from collage_server.api.bodies import message
from collage_server.api.parameters import RunId
from collage_server.api.routing import resource
from collage_server.components import components_of
from collage_server.queries import with_health

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


@router.get("/runs/{run_id}/layers", **describes(wire.LayerList))
def list_layers(request: Request, run_id: RunId) -> Response:
    """The run's layers in the order in which they were first seen; `elements` counts the whole tensor."""
    return answer(wire.LayerList(run_id=run_id, layers=components_of(request).store.streams.layers(run_id)))


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
