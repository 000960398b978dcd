"""All incidents, the open ones above those that have ended: filtered, and acknowledged together.

Its address and filters are `view.py`'s (`tests/dashboard/test_incident_list.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import dash
import dash_mantine_components as dmc
from dash import ALL, Input, Output, State, dcc, html, no_update

from collage_dashboard.components import (
    LIVE_MILLISECONDS,
    card,
    filter_select,
    moment,
    notice,
    page,
    refresh_marker,
    refusal,
)
from collage_dashboard.descriptions import describe
from collage_dashboard.navigation import Choice, pressed_button, register_choices, view_of, view_stores
from collage_dashboard.number_downloads import pandas_note
from collage_dashboard.pages.incident_content import badges, duration_of
from collage_dashboard.server_reader import Reader, explain
from collage_dashboard.tables import scrollable
from collage_dashboard.view import View, run_address, write_address
from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_monitor.client import Client
from collage_monitor.errors import CollageError

__all__ = ["layout", "register"]

_MOST: Final = 100
_FILTERS: Final = ("alert", "severity", "project", "state")
_CHOICES: Final = {f"by-{name}": Choice(name) for name in _FILTERS}
_STATES: Final[dict[wire.IncidentState, str]] = {"firing": "Open", "resolved": "Ended"}
_GLANCE_HOURS: Final = 12
"""A night."""


def layout(view: View, reader: Reader) -> html.Div:
    """The page with its incidents.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    filters, *found = reader.ask_together(lambda client: client.run_filters(), *_questions(view))
    shown = _shown(found)
    names = _names(reader, [one.run_id for one in shown if one.run_id] + list(view.runs))
    return page(
        [
            *view_stores(view, "incidents", _CHOICES),
            dcc.Store(id="incidents-revision", data=_revision(found)),
            refresh_marker("incidents-pace", LIVE_MILLISECONDS),
            dmc.Title("Incidents", order=1, size="h2", mt=8),
            html.Div(_about_run(view, names), className="crumbs"),
            html.Div(
                [
                    filter_select(
                        f"incidents-by-{name}",
                        name.capitalize(),
                        _choices(name, shown, filters),
                        getattr(view, name),
                        searchable=True,
                    )
                    for name in _FILTERS
                ],
                className="filters",
            ),
            html.Div(id="incidents-alert"),
            html.Div(id="incidents-undo", role="status", className="crumbs"),
            html.Div(_content(found, names, view), id="incidents-content"),
            pandas_note(reader, "pandas.json_normalize(msgspec.to_builtins(client.incidents().events))"),
        ],
        "Incidents",
    )


def register(app: dash.Dash, reader: Reader) -> None:
    """Bind filters, acknowledgement and the refresh to the application."""

    register_choices(app, "incidents", _CHOICES)

    @app.callback(
        Output("incidents-revision", "data"),
        Output("incidents-content", "children"),
        Output("incidents-alert", "children"),
        Input("tick", "data"),
        Input("incidents-shown", "data"),
        State("incidents-revision", "data"),
        prevent_initial_call=True,
    )
    def check_for_changes(_tick: Any, shown: dict[str, str], known: list[Any]) -> tuple[Any, ...]:
        view = view_of(shown)
        try:
            found = reader.ask_together(*_questions(view))
        except CollageError as error:
            return None, no_update, notice(explain(error))
        if _revision(found) == known and dash.ctx.triggered_id != "incidents-shown":
            raise dash.exceptions.PreventUpdate
        names = _names(reader, [one.run_id for one in _shown(found) if one.run_id])
        return _revision(found), _content(found, names, view), None

    @app.callback(
        Output("incidents-alert", "children", allow_duplicate=True),
        Output("tick", "data", allow_duplicate=True),
        Output("incidents-undo", "children"),
        Input({"type": "acknowledge-all", "index": ALL}, "n_clicks"),
        State("incidents-revision", "data"),
        prevent_initial_call=True,
    )
    def acknowledge(_clicks: Any, shown: list[list[Any]] | None) -> tuple[Any, ...]:
        """Take care of every open incident that is shown, or take that back of those that the button names: the
        server decides whether this token may."""
        named = pressed_button()["index"].split()
        untaken = [one for one, state, taken, _ in shown or () if state == "firing" and taken is None]
        try:
            reader.ask(lambda client: [client.acknowledge(one, undo=bool(named)) for one in named or untaken])
        except CollageError as error:
            return refusal(error), no_update, no_update
        said = None if named else [f"Acknowledged {_count(untaken)}. ", _take(" ".join(untaken), "Undo")]
        return None, f"acknowledged {time.time()}", said


def _take(index: str, said: str) -> html.Button:
    """Acknowledges all that is shown, or takes that back of the incidents that `index` names."""
    return html.Button(said, id={"type": "acknowledge-all", "index": index}, className="textual")


def _count(incidents: Sequence[Any]) -> str:
    return f"{len(incidents)} incident{'' if len(incidents) == 1 else 's'}"


def _questions(view: View) -> list[Any]:
    def of(state: wire.IncidentState) -> Any:
        return lambda client: _asked(client, view, state)

    return [of(state) for state in _STATES if _shows(view, state)]


def _shows(view: View, state: wire.IncidentState) -> bool:
    """Whether incidents of this state are shown; a state that is none filters nothing."""
    return view.state == state or view.state not in _STATES


def _asked(client: Client, view: View, state: wire.IncidentState) -> wire.IncidentPage:
    run = view.runs[0] if view.runs else None
    asked = {name: getattr(view, name) for name in ("project", "alert", "severity")}
    return client.incidents(**asked, run_id=run, state=state, limit=_MOST)


def _shown(found: Sequence[wire.IncidentPage]) -> list[wire.Incident]:
    return [one for part in found for one in part.events]


def _revision(found: Sequence[wire.IncidentPage]) -> list[Any]:
    return [[one.incident_id, one.state, one.acknowledged_by, one.silenced] for one in _shown(found)]


def _names(reader: Reader, run_ids: Sequence[str]) -> dict[str, str]:
    """The runs' names by id; of those that are gone, nothing."""
    ids = list(dict.fromkeys(run_ids))[:_MOST]
    rows = reader.ask(lambda client: client.run_table(run_ids=ids, limit=_MOST)).rows if ids else []
    return {row.run_id: row.name for row in rows}


def _about_run(view: View, names: Mapping[str, str]) -> list[Any]:
    """The requested run, and a link to all incidents."""
    if not view.runs:
        return []
    return [f"Only {names.get(view.runs[0], view.runs[0])}. ", html.A("Show all", href="/incidents")]


def _choices(name: str, shown: Sequence[wire.Incident], filters: wire.RunFilters) -> dict[str, str]:
    """Values of a filter, and how they read."""
    if name == "state":
        return {str(state): title for state, title in _STATES.items()}
    known = {"alert": ALERTS, "severity": ("info", "warning", "critical"), "project": filters.project}[name]
    return {value: value for value in dict.fromkeys([*known, *(getattr(one, name) for one in shown)]) if value}


def _content(found: Sequence[wire.IncidentPage], names: Mapping[str, str], view: View) -> list[Any]:
    shown = _shown(found)
    if not shown:
        runs = dcc.Link("Runs", href="/runs")
        return [html.P(["No alert has fired here. ", runs, " shows which are judged sick."], className="headline")]
    firing = [one for one in shown if one.state == "firing"]
    ended = [one for one in shown if one.state != "firing"]
    untaken = sum(one.acknowledged_by is None for one in firing)
    take = _take("", f"Acknowledge {'it' if untaken == 1 else f'all {untaken}'}")
    said: list[Any] = [f"{_at_a_glance(view, firing, ended)} ", *([take] if untaken else [])]
    parts: list[Any] = [html.Div(said, className="headline", role="status")]
    more = any(part.cursor for part in found)
    parts += [_table("Open", firing, names, more)] if firing else []
    return parts + ([_table("Ended", ended, names, more)] if ended else [])


def _at_a_glance(view: View, firing: Sequence[wire.Incident], ended: Sequence[wire.Incident]) -> str:
    """'2 incidents open. 5 fired in the last 12 hours.' Only of states that are shown."""
    since = time.time() - 3600 * _GLANCE_HOURS
    said = f"{_count(firing)} open. " if firing else "No incident is open. "
    recent = sum(one.started_at > since for one in [*firing, *ended])
    return f"{said if _shows(view, 'firing') else ''}{recent or 'None'} fired in the last {_GLANCE_HOURS} hours."


_HEADS: Final = ("Alert", "Run", "Fired", "Lasted", "State", "Why")
"""Of the columns; on a phone a row is a card, and each value has its label beside it."""


def _table(title: str, incidents: Sequence[wire.Incident], names: Mapping[str, str], more: bool) -> dmc.Paper:
    head = dmc.TableThead(dmc.TableTr([dmc.TableTh(text, className="text") for text in _HEADS]))
    body = dmc.TableTbody([_row(incident, names) for incident in incidents])
    note = f"The newest {_MOST} of each; `collage-monitor alerts` lists the others." if more else ""
    shown = dmc.Table([head, body], verticalSpacing=6)
    place = scrollable([shown], f"{title} incidents")
    return card(title, place, kind="comparison-table incident-table", note=note, mb="md")


def _judged(incident: wire.Incident) -> list[Any]:
    """What the alert judges: one with several conditions may fire for each."""
    entry = ALERTS.get(incident.alert)
    metric = entry.metric(incident.labels) if entry else None
    return [html.Div(describe(metric).title, className="quiet because")] if metric else []


def _row(incident: wire.Incident, names: Mapping[str, str]) -> dmc.TableTr:
    address = write_address(View(page="incident", incident=incident.incident_id))[0]
    name = names.get(incident.run_id or "") or incident.labels.get("run") or incident.run_id
    run: Any = "the server"
    if incident.run_id is not None:
        run = dcc.Link(name, href=run_address(incident.run_id), title=name)
    cells = (
        html.Div([dcc.Link(incident.alert, href=address), *_judged(incident)]),
        run,
        moment(incident.started_at),
        duration_of(incident),
        html.Div(badges(incident), className="badges"),
        html.Span(incident.text, title=incident.text),
    )
    labelled = [{"data-label": head} for head in _HEADS]
    return dmc.TableTr(
        [dmc.TableTd(cell, className="text", **label) for cell, label in zip(cells, labelled, strict=True)]
    )
