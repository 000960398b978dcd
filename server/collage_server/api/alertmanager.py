"""Alertmanager's webhook: alerts become events of the runs that they are about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.answers import answer, describes
from collage_server.api.bodies import message
from collage_server.api.routing import resource
from collage_server.auth.bearer import principal_of
from collage_server.auth.principals import Principal
from collage_server.components import Components, components_of
from collage_server.errors import Gone, NotFound
from collage_server.queries import alert_event
from collage_server.store import NewEvent

__all__ = ["router"]

router = resource("alerts")


@router.post("/alerts/alertmanager", **describes(wire.AlertmanagerAnswer, wire.AlertmanagerMessage))
async def receive_alerts(request: Request) -> Response:
    """Alertmanager's webhook (version 4): each alert with a label `run_id` is kept with its run, once a state."""
    notification = await message(request, wire.AlertmanagerMessage)
    components, principal = components_of(request), principal_of(request)
    return answer(await run_in_threadpool(_keep, components, principal, notification.alerts))


def _keep(
    components: Components, principal: Principal, alerts: Iterable[wire.AlertmanagerAlert]
) -> wire.AlertmanagerAnswer:
    by_run: dict[str, list[NewEvent]] = defaultdict(list)
    ignored = stored = known = 0
    for alert in alerts:
        run_id = alert.labels.get("run_id", "")
        project = components.store.access.project_of(run_id)
        if project is None or not principal.owns(project):
            ignored += 1
        else:
            by_run[run_id].append(alert_event(alert))
    for run_id, events in by_run.items():
        try:
            fresh = components.store.events.add(run_id, events, components.clock())
        except (Gone, NotFound):
            ignored += len(events)
        else:
            stored += fresh
            known += len(events) - fresh
    return wire.AlertmanagerAnswer(stored=stored, known=known, ignored=ignored)
