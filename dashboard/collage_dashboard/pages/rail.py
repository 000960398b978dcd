"""The list of runs beside what is picked: problems first, each a way to its page, and a tick that compares it; and
the fleet, the heatmaps of the first of them on one screen.

`app.py` lays it out beside pages. `assets/flow.js` marks what the address picks, and writes there what is ticked
(`tests/browser/test_rail.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import dash
from dash import Input, Output, State, dcc, html
from flask import Flask, Response

from collage_dashboard.components import LIVE_MILLISECONDS, judgement_sign, menu, page, refresh_marker
from collage_dashboard.figures.heatmap import thumbnails
from collage_dashboard.figures.picture import png, png_address
from collage_dashboard.navigation import or_later
from collage_dashboard.pages.runs_content import sick_in
from collage_dashboard.run_styles import strategy_title
from collage_dashboard.server_reader import Reader, refusal_answer
from collage_dashboard.view import (
    ARCHIVED,
    FILTERS,
    MAXIMUM_RUNS,
    Page,
    View,
    comparison_of,
    read_address,
    run_address,
    write_address,
)
from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.diagnosis import finite, gravity
from collage_monitor.errors import CollageError, NotAuthorised, ServerRefusal
from collage_monitor.number_text import count, value_text

__all__ = ["BESIDE", "first_view", "fleet", "install_picture", "newest_answer", "rail", "register_rail"]

BESIDE: Final[frozenset[Page]] = frozenset({"first", "run", "compare", "fleet"})
"""The pages that the list stands beside."""
_UNARCHIVED: Final = (f"tag != {ARCHIVED}",)
_LOST: Final = "lost_update_ratio"
_FLEET: Final = 30
"""Runs whose layers are seen at once."""
_FLEET_POINTS: Final = 40
_ASKED_TOGETHER: Final = 3
_PREVIEW: Final = (630, 1200)
"""Height and width of a link's picture, in pixels, at most."""
_TOLD_BY_NUMBER: Final = frozenset({"healthy", "losing updates"})
"""Verdicts that the share of updates lost says; of others the word stands in its place."""


def first_view(reader: Reader) -> View:
    """What is shown where nothing is picked: the worst live run, else the newest project's answer.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    live = _by_gravity(reader.ask(lambda client: _problems_first(client, MAXIMUM_RUNS, state="running")).rows)
    return View(page="run", runs=(live[0].run_id,)) if live else newest_answer(reader)


def newest_answer(reader: Reader) -> View:
    """The runs of the project that was trained last, side by side; one alone is shown by itself.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    newest = reader.ask(lambda client: client.run_table(limit=1, where=_UNARCHIVED)).rows
    if not newest:
        return View(page="runs")
    [project] = {row.project for row in newest}
    rows = reader.ask(lambda client: client.run_table(project=project, limit=MAXIMUM_RUNS, where=_UNARCHIVED)).rows
    ids = [row.run_id for row in rows]
    return comparison_of(ids) if len(ids) > 1 else View(page="run", runs=tuple(ids))


def rail(view: View, reader: Reader) -> tuple[list[Any], dict[str, Any]]:
    """The list, those runs of the view first that are not among the listed; and what it shows.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    table = reader.ask(lambda client: _problems_first(client, MAXIMUM_RUNS))
    listed = {row.run_id for row in table.rows}
    others = [run_id for run_id in view.runs if run_id not in listed]
    more: Sequence[wire.RunRow] = ()
    if others:
        more = reader.ask(lambda client: client.run_table(run_ids=others, limit=len(others))).rows
    shown = [*more, *_by_gravity(table.rows)]
    sick = sick_in(table)
    live = sum(table.live.values())
    head = [
        html.H2(f"{table.total:,} {'run' if table.total == 1 else 'runs'}, {sick:,} sick"),
        dcc.Link(f"{live:,} live", href="/runs?state=running", className="quiet"),
        *_groups(table.rows),
        dcc.Link("Layers", href="/fleet", title="What each layer loses over time, of the first 30 runs"),
        dcc.Link("Table", href="/runs", title="All runs in a table: filters, columns, groups, tags, archive"),
    ]
    told = {"at": table.revision, "runs": [row.run_id for row in shown]}
    return [html.Div(head, className="rail-head"), html.Ul([_entry(row) for row in shown])], told


def _groups(rows: Sequence[wire.RunRow]) -> list[Any]:
    """Behind a button the runs that were made to be compared: those of one project and group, side by side."""
    found: dict[tuple[str, str], list[wire.RunRow]] = {}
    for row in rows:
        if row.group:
            found.setdefault((row.project, row.group), []).append(row)
    # To another address of a page that may be this one: a link of the application's would not be followed.
    links = [
        html.Li(html.A(" / ".join(named), href="".join(write_address(comparison_of([run.run_id for run in own])))))
        for named, own in found.items()
        if len(own) > 1
    ]
    return [menu("Groups", html.Ul(links))] if links else []


def _by_gravity(rows: Sequence[wire.RunRow]) -> list[wire.RunRow]:
    """Those with the gravest verdict first, of these those that lose the most now."""

    def place(run: wire.RunRow) -> tuple[int, float]:
        health = run.overview.health if run.overview else "unknown"
        return gravity(health), -(finite(_lost_now(run)) or 0.0)

    return sorted(rows, key=place)


def _lost_now(run: wire.RunRow) -> wire.Number | None:
    found = run.overview or wire.Overview(run_id=run.run_id)
    return found.now.get(_LOST, found.numbers.get(_LOST))


def _problems_first(client: Client, limit: int, where: Sequence[str] = (), **filters: Any) -> wire.RunTable:
    return client.run_table(sort="health", descending=True, limit=limit, where=[*_UNARCHIVED, *where], **filters)


def _entry(run: wire.RunRow) -> html.Li:
    """A run: its verdict, the end of its name, how it keeps its weights, and what it loses now."""
    overview = run.overview or wire.Overview(run_id=run.run_id)
    kept = strategy_title(run.shown_strategy, run.dtype)
    is_live = run.state == "running"
    step = f", step {count(run.last_step)}" if run.last_step is not None else ""
    beside: list[Any] = [html.Span("● ", className="pulse"), f"live{step} · {kept}"] if is_live else [kept]
    told = _told(run)
    ticked: dict[str, Any] = {"role": "checkbox", "aria-checked": "false", "aria-label": f"Compare {run.name}"}
    tick = html.Button("", type="button", className="tick", **ticked)
    name = html.Span(html.Bdi(run.name), className="from-its-end")
    words = html.Span([name, html.Span(beside, className="quiet")], className="rail-words")
    link = dcc.Link(
        [judgement_sign(overview.health), words, html.B(told)], href=run_address(run.run_id), title=run.name
    )
    own: dict[str, Any] = {"data-run": run.run_id}
    return html.Li([tick, link], **own)


def _told(run: wire.RunRow) -> str:
    """What it loses now, or its verdict where that is another problem."""
    lost, health = _lost_now(run), run.overview.health if run.overview else "unknown"
    return value_text(_LOST, lost) if lost is not None and health in _TOLD_BY_NUMBER else health


def fleet(view: View, reader: Reader) -> html.Div:
    """What each layer of the first 30 runs of the view's filters loses over time, the gravest first.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    shown = html.Ul(_pictures(view, reader), id="fleet", className="fleet")
    return page([refresh_marker("fleet-pace", LIVE_MILLISECONDS), shown], "Layers of all runs")


def _pictures(view: View, reader: Reader) -> list[html.Li]:
    filters: dict[str, Any] = {**{name: getattr(view, name) for name in FILTERS}, "q": view.query or None}
    rows = _by_gravity(reader.ask(lambda client: _problems_first(client, _FLEET, view.where, **filters)).rows)
    parts = [rows[start::_ASKED_TOGETHER] for start in range(min(len(rows), _ASKED_TOGETHER))]
    maps = reader.ask_together(*(partial(_maps, part) for part in parts)) if parts else []
    known = {run_id: found for own in maps for run_id, found in own.items()}
    return [_picture(run, known[run.run_id]) for run in rows]


def _maps(rows: Sequence[wire.RunRow], client: Client) -> dict[str, dict[str, str]]:
    """By run the pictures of its layers."""
    found = {}
    for run in rows:
        try:
            drawn = thumbnails(client.heatmap(run.run_id, _LOST, points=_FLEET_POINTS))
            found[run.run_id] = {scheme: png_address(pixels) for scheme, pixels in drawn.items()}
        except NotAuthorised:
            raise
        except ServerRefusal:
            found[run.run_id] = {}
    return found


def _picture(run: wire.RunRow, drawn: dict[str, str]) -> html.Li:
    """A run of the fleet: its verdict, the end of its name, what it loses now, and its layers over time."""
    overview = run.overview or wire.Overview(run_id=run.run_id)
    name = html.Span(html.Bdi(run.name), className="from-its-end")
    kept = html.Span(strategy_title(run.shown_strategy, run.dtype), className="quiet")
    head = [html.Span([judgement_sign(overview.health), name]), html.Span([html.B(_told(run)), kept])]
    alt = f"Updates lost by layer over the run, {run.name}"
    shown: list[Any] = [html.Img(src=address, alt=alt, className=f"on-{own}") for own, address in drawn.items()]
    words = [*head, *(shown or [html.Span("nothing measured", className="quiet")])]
    return html.Li(dcc.Link(words, href=run_address(run.run_id), title=overview.headline or run.name))


def install_picture(server: Flask, reader: Reader) -> None:
    """`/picture/RUN.png`: what each layer of a run loses over time, as large as a chat shows it."""

    @server.get("/picture/<run_id>.png")
    def send_picture(run_id: str) -> Response:
        try:
            drawn = thumbnails(reader.ask(lambda client: client.heatmap(run_id, _LOST, points=_FLEET_POINTS)))
        except CollageError as error:
            return refusal_answer(error)
        if not drawn:
            return Response("No step of this run was measured.\n", 404, mimetype="text/plain")
        pixels = drawn["light"]
        high, wide = (max(most // own, 1) for most, own in zip(_PREVIEW, pixels.shape, strict=False))
        return Response(png(pixels.repeat(high, axis=0).repeat(wide, axis=1)), mimetype="image/png")


def register_rail(app: dash.Dash, reader: Reader) -> None:
    """Bind the list to the address and to ticks: it is read again where a run changed, or one is picked that it
    lacks, and the fleet with it."""

    @app.callback(
        Output("fleet", "children"),
        Input("rail-told", "data"),
        State("address", "search"),
        prevent_initial_call=True,
    )
    def read_fleet(_told: dict[str, Any], search: str | None) -> list[html.Li]:
        with or_later():
            return _pictures(read_address("/fleet", search), reader)

    @app.callback(
        Output("rail", "children"),
        Output("rail-told", "data"),
        Input("address", "pathname"),
        Input("tick", "data"),
        State("address", "search"),
        State("rail-told", "data"),
        prevent_initial_call=True,
    )
    def read(pathname: str | None, _tick: int | None, search: str | None, told: dict[str, Any]) -> tuple[Any, Any]:
        view = read_address(pathname, search)
        with or_later():
            if view.page not in BESIDE:
                raise dash.exceptions.PreventUpdate
            now = reader.ask(lambda client: _problems_first(client, 1)).revision
            if told["at"] == now and set(view.runs) <= set(told["runs"]):
                raise dash.exceptions.PreventUpdate
            return rail(view, reader)
