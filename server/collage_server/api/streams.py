"""The parts of a run and its history: attempts, streams, their declared layers, events.

Alertmanager's alerts become events of the runs that they are about.

`store/journal/stream_store.py` keeps them. All may be sent twice with the same ids; that is fixed by the agent's
protocol (`tests/server/test_attempts.py`).
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated

from fastapi import Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_monitor.alerts import ALERTS, enabled_alerts
from collage_server.api.bodies import message
from collage_server.api.query_parameters import Id
from collage_server.api.responses import answer, describes
from collage_server.api.routing import resource_router
from collage_server.app_state import AppState, app_state_of
from collage_server.auth.bearer import principal_of
from collage_server.auth.principals import Principal
from collage_server.errors import Gone, NotFound
from collage_server.queries.run_answers import alert_event, new_incident, with_lag, with_short_labels
from collage_server.settings import Settings
from collage_server.store import NewEvent

__all__ = ["alerts_router", "attempts_router", "router"]

attempts_router = resource_router("attempts")
router = resource_router("streams")
alerts_router = resource_router("alerts")


@attempts_router.post("/runs/{run_id}/attempts", **describes(wire.Attempt, wire.AttemptCreate))
async def create_attempt(request: Request, run_id: Id) -> Response:
    """Register a launch when its first step is taken; the same launch_id is the same attempt."""
    app_state = app_state_of(request)
    create = await message(request, wire.AttemptCreate)
    return answer(
        await run_in_threadpool(app_state.store.streams.create_attempt, run_id, create, app_state.clock())
    )


@router.post("/runs/{run_id}/streams", **describes(wire.Stream, wire.StreamCreate))
async def create_stream(request: Request, run_id: Id) -> Response:
    """Register a stream; sent again with more layers or statistics it is extended."""
    app_state = app_state_of(request)
    create = await message(request, wire.StreamCreate)
    stream = await run_in_threadpool(app_state.store.streams.create_stream, run_id, create, app_state.clock())
    app_state.registry.forget(create.stream_id)
    return answer(stream)


@router.get("/runs/{run_id}/streams", **describes(wire.StreamList))
def list_streams(request: Request, run_id: Id) -> Response:
    """The run's streams, by attempt and rank: stored and missing reports, lag, and clock skew."""
    streams = with_lag(app_state_of(request).store.streams.of_run(run_id))
    return answer(wire.StreamList(run_id=run_id, streams=streams))


@router.get("/runs/{run_id}/layers", **describes(wire.LayerList))
def list_layers(request: Request, run_id: Id) -> Response:
    """The run's layers in the order in which they were first seen; `elements` counts the whole tensor."""
    return answer(wire.LayerList(run_id=run_id, layers=app_state_of(request).store.streams.layers(run_id)))


@router.get("/runs/{run_id}/events", **describes(wire.EventPage))
def list_events(
    request: Request,
    run_id: Id,
    cursor: Annotated[int, Query(ge=0, le=2**31 - 1, description="What the last answer said; 0: all.")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    newest: Annotated[bool, Query(description="The newest `limit` of them in place of the oldest.")] = False,
    until: Annotated[
        float | None, Query(ge=0, allow_inf_nan=False, description="Only those up to this time (Unix seconds).")
    ] = None,
) -> Response:
    """Launches, gaps, dropped reports, skipped steps, replicas that differ, retention, alerts and notes, by age."""
    return answer(app_state_of(request).store.events.read(run_id, cursor, limit, newest=newest, until=until))


@router.post("/runs/{run_id}/notes", **describes(wire.Event, wire.NoteCreate, status=201))
async def create_note(request: Request, run_id: Id) -> Response:
    """Write a note into the run's timeline; the event's text begins with its author."""
    note = await message(request, wire.NoteCreate)
    app_state, author = app_state_of(request), principal_of(request).actor
    new = NewEvent(
        origin=f"note/{secrets.token_hex(8)}", kind="note", text=f"{author}: {note.text.strip()}", step=note.step
    )
    return answer(await run_in_threadpool(app_state.store.events.add_one, run_id, new, app_state.clock()), 201)


@alerts_router.post("/alerts/alertmanager", **describes(wire.AlertmanagerAnswer, wire.AlertmanagerMessage))
async def receive_alerts(request: Request) -> Response:
    """Alertmanager's webhook (version 4): each alert with a label `run_id` is kept with its run, once a state."""
    notification = await message(request, wire.AlertmanagerMessage)
    app_state, principal = app_state_of(request), principal_of(request)
    return answer(await run_in_threadpool(_keep, app_state, principal, notification.alerts))


def _left_out(settings: Settings) -> set[str]:
    """Alerts that the settings switch off, here and in Prometheus. With "off" none: Prometheus evaluates all."""
    if settings.alerts == "off":
        return set()
    chosen = enabled_alerts(None if settings.alerts == "default" else settings.alerts)
    return ALERTS.keys() - {entry.name for entry in chosen}


def _last_step(app_state: AppState, run_id: str) -> int | None:
    with suppress(Gone, NotFound):
        return app_state.store.runs.get(run_id).last_step
    return None


def _keep(
    app_state: AppState, principal: Principal, alerts: Iterable[wire.AlertmanagerAlert]
) -> wire.AlertmanagerAnswer:
    by_run: dict[str, list[NewEvent]] = defaultdict(list)
    ignored = stored = known = 0
    incidents, now = app_state.store.incidents, app_state.clock()
    left_out = _left_out(app_state.settings)
    for received in alerts:
        alert = with_short_labels(received)
        run_id = alert.labels.get("run_id", "")
        project = app_state.store.access.project_of(run_id)
        name = alert.labels.get("alertname", "alert")
        if project is None or not principal.owns(project) or (name in left_out and alert.status != "resolved"):
            ignored += 1
            continue
        if incidents.is_open(name, alert.labels, "server"):
            known += 1  # This server noticed it first, and will say when it ends.
            continue
        if alert.status == "resolved":
            incidents.resolve(name, alert.labels, "alertmanager", now)
        else:
            incidents.fire(new_incident(alert, project, now, _last_step(app_state, run_id)), now, told=True)
        by_run[run_id].append(alert_event(alert))
    for run_id, events in by_run.items():
        try:
            fresh = app_state.store.events.add(run_id, events, app_state.clock())
        except (Gone, NotFound):
            ignored += len(events)
        else:
            stored += fresh
            known += len(events) - fresh
    return wire.AlertmanagerAnswer(stored=stored, known=known, ignored=ignored)
