"""Incidents: incidents, their acknowledgement, and silences.

`store/runs/incidents.py` keeps them, `alerts/` makes them. Messages are `wire/incidents.py`'s.
"""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.alerts.targets import targets_of, try_targets
from collage_server.api.bodies import message
from collage_server.api.query_parameters import Filter, Id
from collage_server.api.responses import answer, describes
from collage_server.api.routing import resource_router
from collage_server.app_state import app_state_of
from collage_server.auth.bearer import principal_of
from collage_server.errors import Forbidden, Unprocessable
from collage_server.store import IncidentQuery

__all__ = ["router"]

router = resource_router("alerts")
_MOST_OF_A_RUN = 1000


@router.get("/events", **describes(wire.IncidentPage))
def list_incidents(
    request: Request,
    project: Filter = None,
    run: Filter = None,
    alert: Filter = None,
    severity: Filter = None,
    state: wire.IncidentState | None = None,
    cursor: Filter = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """Incidents, newest first: alerts of this server's own evaluation and of Alertmanager, each once."""
    app_state = app_state_of(request)
    query = IncidentQuery(
        project=project,
        projects=principal_of(request).projects,
        run_id=run,
        alert=alert,
        severity=severity,
        state=state,
        cursor=cursor,
        limit=limit,
    )
    found = app_state.store.incidents.read(query, app_state.clock())
    newest = f"{found[-1].started_at.hex()}~{found[-1].incident_id}" if len(found) == limit else None
    return answer(wire.IncidentPage(events=found, cursor=newest))


@router.get("/events/{incident_id}", **describes(wire.Incident))
def get_incident(request: Request, incident_id: Id) -> Response:
    """An incident with its reason, and when it began and ended."""
    app_state = app_state_of(request)
    projects = principal_of(request).projects
    return answer(app_state.store.incidents.get(incident_id, app_state.clock(), projects))


@router.get("/runs/{run_id}/alerts", **describes(wire.IncidentPage))
def firing_of_run(request: Request, run_id: Id) -> Response:
    """The alerts that fire for one run now; a training may ask with the token that it sends with."""
    app_state = app_state_of(request)
    app_state.store.runs.get(run_id)
    query = IncidentQuery(run_id=run_id, state="firing", limit=_MOST_OF_A_RUN)
    return answer(wire.IncidentPage(events=app_state.store.incidents.read(query, app_state.clock())))


@router.post("/events/{incident_id}/acknowledge", **describes(wire.Incident))
def acknowledge(request: Request, incident_id: Id) -> Response:
    """Acknowledge an incident: you take care of it. The first acknowledgement stays."""
    return _acknowledge(request, incident_id, principal_of(request).actor)


@router.delete("/events/{incident_id}/acknowledge", **describes(wire.Incident))
def take_acknowledgement_back(request: Request, incident_id: Id) -> Response:
    """Take an incident's acknowledgement back, whoever made it."""
    return _acknowledge(request, incident_id, None)


def _acknowledge(request: Request, incident_id: str, by: str | None) -> Response:
    app_state, projects = app_state_of(request), principal_of(request).projects
    return answer(app_state.store.incidents.acknowledge(incident_id, by, app_state.clock(), projects))


@router.post("/alerts/test", **describes(wire.TriedTargetList))
def try_each_target(request: Request) -> Response:
    """Send one message to each target of messages that the settings name; an empty list if they name none."""
    app_state = app_state_of(request)
    return answer(wire.TriedTargetList(targets=try_targets(targets_of(app_state.settings), app_state.clock())))


@router.get("/silences", **describes(wire.SilenceList))
def list_silences(request: Request) -> Response:
    """The silences that hold now, newest first."""
    app_state, principal = app_state_of(request), principal_of(request)
    found = app_state.store.incidents.silences(app_state.clock())
    seen = [silence for silence in found if principal.projects is None or silence.project in principal.projects]
    return answer(wire.SilenceList(silences=seen))


@router.post("/silences", **describes(wire.Silence, wire.SilenceCreate, status=201))
async def create_silence(request: Request) -> Response:
    """Send nothing about incidents that match everything stated, for so many seconds; they are still listed."""
    app_state, principal = app_state_of(request), principal_of(request)
    create = await message(request, wire.SilenceCreate)
    if not principal.owns(create.project):
        raise Forbidden(
            f"this token is for {', '.join(sorted(principal.projects or ()))}; name one of them as project",
            field="project",
        )
    if create.alert is create.project is create.run_id is None:
        raise Unprocessable(
            "this would silence every alert of every project: name an alert, a project or a run_id",
            field="project",
        )
    now = app_state.clock()
    made = wire.Silence(
        silence_id=secrets.token_hex(8),
        alert=create.alert,
        project=create.project,
        run_id=create.run_id,
        comment=create.comment,
        made_by=principal.actor,
        made_at=now,
        ends_at=now + create.seconds,
    )
    await run_in_threadpool(app_state.store.incidents.silence, made)
    return answer(made, 201)
