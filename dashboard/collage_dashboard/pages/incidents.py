"""All incidents: those that are open above, then those that have ended; of one run, project or alert if asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, dcc, html, no_update

from collage_dashboard.components import (
    LIVE_MILLISECONDS,
    limits_note,
    moment,
    notice,
    page,
    refresh_marker,
    scrollable,
)
from collage_dashboard.descriptions import describe
from collage_dashboard.numbers import pandas_note
from collage_dashboard.pages.incident_content import badges, duration_of
from collage_dashboard.reader import Reader, explain
from collage_dashboard.view import View, read_address, write_address
from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_monitor.client import Client
from collage_monitor.errors import CollageError

__all__ = ["layout", "register"]

_MOST: Final = 100


def layout(view: View, reader: Reader) -> html.Div:
    """The page with its incidents.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    pathname, search = write_address(view)
    found = reader.ask_together(*_questions(view))
    shown = [one for part in found for one in part.events]
    names = _names(reader, [one.run_id for one in shown if one.run_id] + list(view.runs))
    return page(
        [
            dcc.Store(id="incidents-shown", data={"pathname": pathname, "search": search}),
            dcc.Store(id="incidents-revision", data=_revision(found)),
            refresh_marker("incidents-pace", LIVE_MILLISECONDS),
            dmc.Title("Incidents", order=1, size="h2", mt=8),
            html.Div(_filters(view, shown, names), className="crumbs"),
            html.Div(id="incidents-alert"),
            html.Div(_content(found, names), id="incidents-content"),
            pandas_note(reader, "pandas.json_normalize(msgspec.to_builtins(client.incidents().events))"),
            limits_note(),
        ],
        "Incidents",
    )


def register(app: dash.Dash, reader: Reader) -> None:
    """Bind the refresh to the application."""

    @app.callback(
        Output("incidents-revision", "data"),
        Output("incidents-content", "children"),
        Output("incidents-alert", "children"),
        Input("tick", "data"),
        State("incidents-shown", "data"),
        State("incidents-revision", "data"),
        prevent_initial_call=True,
    )
    def check_for_changes(_tick: int | None, shown: dict[str, str], known: list[Any]) -> tuple[Any, ...]:
        view = read_address(shown["pathname"], shown["search"])
        try:
            found = reader.ask_together(*_questions(view))
        except CollageError as error:
            return [], no_update, notice(explain(error))
        if _revision(found) == known:
            raise dash.exceptions.PreventUpdate
        names = _names(reader, [one.run_id for part in found for one in part.events if one.run_id])
        return _revision(found), _content(found, names), None


def _questions(view: View) -> list[Any]:
    def of(state: wire.IncidentState) -> Any:
        def ask(client: Client) -> wire.IncidentPage:
            run = view.runs[0] if view.runs else None
            return client.incidents(project=view.project, run_id=run, alert=view.alert, state=state, limit=_MOST)

        return ask

    return [of("firing"), of("resolved")]


def _revision(found: Sequence[wire.IncidentPage]) -> list[Any]:
    return [
        [one.incident_id, one.state, one.acknowledged_by, one.silenced] for part in found for one in part.events
    ]


def _names(reader: Reader, run_ids: Sequence[str]) -> dict[str, str]:
    """The runs' names by id; of those that are gone, nothing."""
    ids = list(dict.fromkeys(run_ids))[:_MOST]
    rows = reader.ask(lambda client: client.run_table(run_ids=ids, limit=_MOST)).rows if ids else []
    return {row.run_id: row.name for row in rows}


def _filters(view: View, shown: Sequence[wire.Incident], names: Mapping[str, str]) -> list[Any]:
    """What is asked for, and links to ask for less or for all; each opens the page anew."""
    asked = [view.alert, names.get(view.runs[0], view.runs[0]) if view.runs else None, view.project]
    if any(asked):
        about = f"Only {', '.join(filter(None, asked))}. "
        return [about, html.A("Show all", href="/incidents")]
    alerts = dict.fromkeys(incident.alert for incident in shown)
    projects = dict.fromkeys(incident.project for incident in shown if incident.project)
    links = [(alert, View(page="incidents", alert=alert)) for alert in alerts if len(alerts) > 1]
    links += [(name, View(page="incidents", project=name)) for name in projects if len(projects) > 1]
    told: list[Any] = ["Of all runs and of the server", *([". Only " if links else "."])]
    for place, (text, only) in enumerate(links):
        told += [" · " if place else "", html.A(text, href="".join(write_address(only)))]
    return told


def _content(found: Sequence[wire.IncidentPage], names: Mapping[str, str]) -> list[Any]:
    firing, ended = found
    if not firing.events and not ended.events:
        text = "No alert has fired here. That does not prove health: an alert sees only what it was made for."
        return [html.P(text, className="headline")]
    count = len(firing.events)
    said = "No incident is open." if not count else f"{count} incident{'' if count == 1 else 's'} open."
    parts: list[Any] = [html.Div(said, className="headline", role="status")]
    for title, part in (("Open", firing), ("Ended", ended)):
        if part.events:
            parts.append(_table(title, part, names))
    return parts


def _table(title: str, part: wire.IncidentPage, names: Mapping[str, str]) -> dmc.Paper:
    heads = ("Alert", "Run", "Fired", "Lasted", "State", "Why")
    head = dmc.TableThead(dmc.TableTr([dmc.TableTh(text, className="text") for text in heads]))
    rows = [_row(incident, names) for incident in part.events]
    note = f"The newest {_MOST}; `collage-monitor alerts` lists the others." if part.cursor else ""
    return dmc.Paper(
        [
            html.H2(title, className="card-title"),
            scrollable([dmc.Table([head, dmc.TableTbody(rows)], verticalSpacing=6)], f"{title} incidents"),
            *([dmc.Text(note, size="xs", className="quiet", px=10, pt=6)] if note else []),
        ],
        className="card comparison-table incident-table",
        withBorder=True,
        mb="md",
    )


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
        run = dcc.Link(name, href=write_address(View(page="run", runs=(incident.run_id,)))[0], title=name)
    cells = (
        html.Div([dcc.Link(incident.alert, href=address), *_judged(incident)]),
        run,
        moment(incident.started_at),
        duration_of(incident),
        html.Div(badges(incident), className="badges"),
        html.Span(incident.text, title=incident.text),
    )
    return dmc.TableTr([dmc.TableTd(cell, className="text") for cell in cells])
