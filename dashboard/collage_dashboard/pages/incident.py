"""One incident, the target of an alert's link: what fired and when, what changed, why, and who takes care of it.

It fetches what `incident_content.py` shows; evidence comes from `incident_evidence.py`. Alerts link to it, so its
address is fixed in `view.py`.
"""

from __future__ import annotations

from typing import Any, Final

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, dcc, html, no_update

from collage_dashboard.components import (
    IDLE_MILLISECONDS,
    LIVE_MILLISECONDS,
    notice,
    page,
    problem_page,
    refresh_marker,
    refusal,
    shown_if,
)
from collage_dashboard.incident_evidence import STEPS_AFTER_ALERT, read_incident_evidence
from collage_dashboard.navigation import or_later
from collage_dashboard.number_downloads import frame_of, pandas_note
from collage_dashboard.pages.incident_content import UNDO, body, head
from collage_dashboard.server_reader import Problem, Reader, explain
from collage_dashboard.view import View, run_address
from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.errors import CollageError, NotFound

__all__ = ["layout", "register"]

_NONE: Final = Problem(
    "No such incident is known here",
    "This server keeps an incident once its own evaluation finds it or Alertmanager reports it. It keeps no "
    "alert that only Prometheus has, and deleting a run deletes its incidents.",
)


def layout(view: View, reader: Reader) -> html.Div:
    """The page's frame with what fired; the evidence comes with the first refresh.

    Raises:
        CollageError: the server does not answer, or there is no such incident.
    """
    incident = _find(view, reader)
    if incident is None:
        return problem_page(_NONE)
    note = dmc.TextInput(
        id="incident-note",
        placeholder="Write into the run's timeline",
        className="grow",
        debounce=True,  # Enter sends the text along, which a page that still draws would report later.
        **{"aria-label": "Note for the run's timeline"},
    )
    actions: list[Any] = [dmc.Button("Add note", id="incident-note-add", variant="default"), note]
    crumbs: list[Any] = [dcc.Link("Incidents", href="/incidents")]
    if incident.run_id is not None:
        name = incident.labels.get("run") or incident.run_id
        crumbs += [
            " / ",
            dcc.Link(name, href=run_address(incident.run_id), title=name),
        ]
    return page(
        [
            dcc.Store(id="incident-shown", data=incident.incident_id),
            dcc.Store(id="incident-revision"),
            dcc.Store(id="incident-written"),
            refresh_marker("incident-pace", LIVE_MILLISECONDS),
            html.Div(crumbs, className="crumbs"),
            html.Div(head(incident), id="incident-head"),
            html.Div(id="incident-alert", role="status"),
            html.Div(id="incident-refused", role="status"),
            html.Div(html.P("Reading what the run reported around it …", className="quiet"), id="incident-body"),
            html.Div(actions, className="toolbar", style=shown_if(incident.run_id)),
            *([pandas_note(reader, frame_of([incident.run_id]))] if incident.run_id else []),
        ],
        incident.alert,
    )


def register(app: dash.Dash, reader: Reader) -> None:
    """Bind refresh, acknowledgement and notes to the application."""

    @app.callback(
        Output("incident-revision", "data"),
        Output("incident-alert", "children"),
        Output("incident-pace", "children"),
        Input("tick", "data"),
        Input("incident-written", "data"),
        State("incident-shown", "data"),
        State("incident-revision", "data"),
    )
    def check_for_changes(
        _tick: int | None, _written: int | None, shown: str, known: dict[str, Any] | None
    ) -> tuple[Any, ...]:
        """Whether anything changed: light questions, however much evidence there is."""
        try:
            found = reader.ask(lambda client: _revision(client, shown))
        except CollageError as error:
            return {**(known or {}), "failed": True}, notice(explain(error)), str(LIVE_MILLISECONDS)
        wait = LIVE_MILLISECONDS if found["state"] == "firing" else IDLE_MILLISECONDS
        return (no_update if found == known else found), None, str(wait)

    @app.callback(
        Output("incident-head", "children"),
        Output("incident-body", "children"),
        Input("incident-revision", "data"),
        State("incident-shown", "data"),
        prevent_initial_call=True,
    )
    def show(revision: dict[str, Any] | None, shown: str) -> tuple[Any, ...]:
        if revision is None or revision.get("failed"):
            raise dash.exceptions.PreventUpdate
        with or_later():
            evidence = reader.ask(lambda client: read_incident_evidence(client, client.incident(shown)))
        return head(evidence.incident), body(evidence)

    _register_writing(app, reader)


def _register_writing(app: dash.Dash, reader: Reader) -> None:
    @app.callback(
        Output("incident-written", "data"),
        Output("incident-refused", "children"),
        Output("incident-note", "value"),
        Input("incident-acknowledge", "n_clicks"),
        Input("incident-note-add", "n_clicks"),
        Input("incident-note", "n_submit"),
        State("incident-note", "value"),
        State("incident-shown", "data"),
        State("incident-written", "data"),
        State("incident-acknowledge", "children"),
        prevent_initial_call=True,
    )
    def write(
        acknowledged: int | None,
        added: int | None,
        submitted: int | None,
        note: str | None,
        shown: str,
        written: int | None,
        label: str,
    ) -> tuple[Any, ...]:
        """Acknowledge or take that back, as the button said, or add a note: the server decides whether this token
        may."""
        text = (note or "").strip()
        try:
            if dash.ctx.triggered_id == "incident-acknowledge":
                if not acknowledged:
                    raise dash.exceptions.PreventUpdate
                reader.ask(lambda client: client.acknowledge(shown, undo=label == UNDO))
                return (written or 0) + 1, None, no_update
            if not text or not (added or submitted):
                raise dash.exceptions.PreventUpdate
            reader.ask(lambda client: _add_note(client, shown, text))
        except CollageError as error:
            return no_update, refusal(error), no_update
        return (written or 0) + 1, None, ""


def _add_note(client: Client, incident_id: str, text: str) -> None:
    incident = client.incident(incident_id)
    if incident.run_id is not None:
        client.note(incident.run_id, wire.NoteCreate(text=text, step=incident.step))


def _find(view: View, reader: Reader) -> wire.Incident | None:
    """The incident of the address, or the newest of its alert and run."""
    wanted, run = view.incident, view.runs[0] if view.runs else None
    if wanted is not None:
        try:
            return reader.ask(lambda client: client.incident(wanted))
        except NotFound:
            return None
    page = reader.ask(lambda client: client.incidents(run_id=run, alert=view.alert, limit=1))
    return page.events[0] if page.events else None


def _revision(client: Client, incident_id: str) -> dict[str, Any]:
    """A revision: it changes whenever anything shown may have changed."""
    incident = client.incident(incident_id)
    found: dict[str, Any] = {
        "state": incident.state,
        "acknowledged": incident.acknowledged_by,
        "silenced": incident.silenced,
    }
    if incident.run_id is not None:
        try:
            run = client.run(incident.run_id)
            found["events"] = client.events(run.run_id, newest=True, limit=1).cursor
        except NotFound:
            return {**found, "gone": True}
        # What comes long after the alert changes nothing of what stands here.
        every = run.watch.every if run.watch else 1
        enough = (incident.step or 0) + STEPS_AFTER_ALERT * every
        found |= {"step": min(run.last_step or 0, enough), "notes": run.notes, "run": run.state}
    return found
