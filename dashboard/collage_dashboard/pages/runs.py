"""The runs table: every run, or group of runs, with its newest numbers; pick some and compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, dcc, html, no_update

from collage_dashboard.components import (
    IDLE_MILLISECONDS,
    judgement_sign,
    milliseconds_after,
    notice,
    page,
    problem_page,
    refresh_marker,
    refusal,
    shown_if,
    tags_of,
)
from collage_dashboard.navigation import clears, clientside, or_later, view_of, view_stores
from collage_dashboard.number_downloads import frame_of, pandas_note
from collage_dashboard.pages.runs_content import (
    USUAL,
    beside,
    columns,
    damaged_rows,
    group_rows,
    headline_of,
    rows,
)
from collage_dashboard.pages.runs_controls import (
    CHOICES,
    columns_menu,
    filter_button,
    filter_row,
    pinned_line,
    register_controls,
    tray,
    views_menu,
)
from collage_dashboard.prerendering import with_placeholder
from collage_dashboard.server_reader import Problem, Reader, explain
from collage_dashboard.tables import grid, table
from collage_dashboard.view import ARCHIVED, FILTERS, View, write_address
from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.errors import CollageError

__all__ = ["layout", "register"]

ROWS_PER_REQUEST: Final = 50
"""Rows that one question reads."""
_ROWS_IN_WORDS: Final = 25
"""As many as a tall screen shows."""
ROW_PIXELS: Final = 36
"""One line, or two of small print."""
HEADER_PIXELS: Final = 48
_ARCHIVED: Final = f"tag != {ARCHIVED}"
_NO_RUNS: Final = Problem(
    "No runs yet",
    "Train the demo's five runs, or attach the agent to a training of your own: "
    "collage_agent.init() and collage_agent.watch(model, optimizer).",
    "collage-monitor demo",
)


def layout(view: View, reader: Reader) -> html.Div:
    """The page's frame; its rows come with the grid's own questions.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    filters, table = reader.ask_together(
        lambda client: client.run_filters(),
        lambda client: _head(client, view) if view.by else _read_rows(client, view, view.sort, 0, ROWS_PER_REQUEST),
    )
    # Read the revision first: a change between the two reads is then seen at the next look.
    first, pinned = table, []
    if view.by:
        first = reader.ask(lambda client: _read_rows(client, view, view.sort, 0, ROWS_PER_REQUEST))
    if _pinned(view):
        pinned = reader.ask(lambda client: _read_pinned(client, view))
    shown, kept = (beside(found, _baseline(pinned, view)) for found in (_shown_rows(first, view), pinned))
    return page(
        [
            *view_stores(view, "runs", CHOICES),
            dcc.Store(id="runs-revision", data=_revision(table)),
            dcc.Store(id="runs-first", data={"sort": view.sort, "rowData": shown, "rowCount": first.total}),
            dcc.Store(id="runs-wanted"),
            dcc.Store(id="runs-pinned", data=kept),
            refresh_marker("runs-pace", _wait(table, view)),
            html.Div(
                [
                    dmc.Title("Runs", order=1, size="h2"),
                    html.Div(className="spring"),
                    filter_button(view),
                    dmc.TextInput(
                        id="runs-query",
                        value=view.query,
                        placeholder="Search names, projects, tags, ids",
                        w=260,
                        **{"aria-label": "Search names, projects, tags and ids"},
                    ),
                    views_menu(),
                    columns_menu(view),
                    html.Div(tray({}), id="runs-compare"),
                ],
                className="toolbar",
            ),
            filter_row(view, filters),
            html.Div(_said(table, view), id="runs-count", className="headline", role="status"),
            html.Div(id="runs-alert"),
            html.Div(id="runs-undo", role="status", className="crumbs"),
            html.Div(pinned_line(pinned, view), id="runs-kept"),
            html.Div(_grid(view, shown, kept), id="runs-table", style=shown_if(not _is_empty(table, view))),
            html.P(id="runs-sentence", role="status", className="quiet sentence"),
            html.Div(_nothing(table, view, reader), id="runs-empty", style=shown_if(_is_empty(table, view))),
            pandas_note(reader, frame_of(filters=_filters_of(view))),
        ],
        "Runs",
    )


def _filters_of(view: View) -> dict[str, str | None]:
    """The view's filters as `Client.runs` takes them: a verdict is none of a run's own."""
    return {**{name: getattr(view, name) for name in FILTERS if name != "health"}, "q": view.query}


def register(app: dash.Dash, reader: Reader) -> None:
    """Bind search, refresh and selection to the application."""
    _register_rows(app, reader)
    _register_pinned(app, reader)
    register_controls(app, reader)

    @app.callback(
        Output("runs-revision", "data"),
        Output("runs-count", "children"),
        Output("runs-alert", "children"),
        Output("runs-table", "style"),
        Output("runs-empty", "children"),
        Output("runs-empty", "style"),
        Output("runs-pace", "children"),
        Input("tick", "data"),
        Input("runs-shown", "data"),
        State("runs-revision", "data"),
        prevent_initial_call=True,
    )
    def check_for_changes(_tick: int | None, shown: dict[str, Any], known: dict[str, Any]) -> tuple[Any, ...]:
        view = view_of(shown)
        try:
            table = reader.ask(lambda client: _head(client, view))
            found = {**_revision(table), "edits": (known or {}).get("edits", 0)}
            if found == known:
                raise dash.exceptions.PreventUpdate
            nothing = _nothing(table, view, reader)
        except CollageError as error:
            failed = {**(known or {}), "failed": True}
            said = no_update, notice(explain(error)), no_update, no_update, no_update
            return failed, *said, str(milliseconds_after(0.0))
        empty = _is_empty(table, view)
        told = _said(table, view), None, shown_if(not empty), nothing, shown_if(empty)
        return found, *told, str(_wait(table, view))


def _register_rows(app: dash.Dash, reader: Reader) -> None:
    clientside(
        app,
        "flow.firstRows",
        Output("runs-grid", "getRowsResponse"),
        Output("runs-first", "data"),
        Output("runs-wanted", "data"),
        Input("runs-grid", "getRowsRequest"),
        State("runs-first", "data"),
    )

    @app.callback(
        Output("runs-grid", "getRowsResponse", allow_duplicate=True),
        Output("runs-alert", "children", allow_duplicate=True),
        Input("runs-wanted", "data"),
        State("runs-shown", "data"),
        prevent_initial_call=True,
    )
    def read_rows(request: dict[str, Any] | None, shown: dict[str, Any]) -> tuple[Any, ...]:
        if request is None:
            raise dash.exceptions.PreventUpdate
        view, start = view_of(shown), int(request["startRow"])
        limit = min(int(request["endRow"]) - start, 500)
        try:
            table, *pinned = reader.ask_together(
                lambda client: _read_rows(client, view, request["sort"], start, limit),
                *([lambda client: _read_pinned(client, view)] if view.baseline else []),
            )
        except CollageError as error:
            return {"rowData": [], "rowCount": start}, notice(explain(error))
        found = beside(_shown_rows(table, view), _baseline(pinned[0] if pinned else [], view))
        return {"rowData": found, "rowCount": table.total}, no_update

    @app.callback(
        Output("runs-revision", "data", allow_duplicate=True),
        Output("runs-alert", "children", allow_duplicate=True),
        Input("runs-grid", "cellValueChanged"),
        State("runs-revision", "data"),
        prevent_initial_call=True,
    )
    def edit(changes: list[dict[str, Any]] | None, known: dict[str, Any]) -> tuple[Any, ...]:
        """Save the text written into a cell; if the server refuses it, the old text is read again."""
        refused = None
        for change in changes or ():
            try:
                _keep(reader, change)
            except CollageError as error:
                refused = refusal(error)
        edits = int((known or {}).get("edits", 0)) + 1
        return {**(known or {}), "edits": edits, "failed": False}, refused

    clientside(app, "flow.reload", Input("runs-revision", "data"), Input("runs-shown", "data"))
    clientside(app, "flow.keepSort", Input("runs-grid", "getRowsRequest"))


def _register_pinned(app: dash.Dash, reader: Reader) -> None:
    @app.callback(
        Output("runs-pinned", "data"),
        Output("runs-kept", "children"),
        Input("runs-shown", "data"),
        Input("runs-revision", "data"),
        State("runs-pinned", "data"),
        prevent_initial_call=True,
    )
    def read_pinned(shown: dict[str, Any], _revision: Any, known: list[dict[str, Any]]) -> tuple[Any, ...]:
        view = view_of(shown)
        if not known and not _pinned(view):
            raise dash.exceptions.PreventUpdate
        with or_later():
            pinned = reader.ask(lambda client: _read_pinned(client, view)) if _pinned(view) else []
        return beside(pinned, _baseline(pinned, view)), pinned_line(pinned, view)

    clientside(app, "flow.showPinned", Input("runs-pinned", "data"))


def _keep(reader: Reader, change: dict[str, Any]) -> None:
    """Send the text written into a cell."""
    run_id, value = str(change["rowId"]), str(change.get("value") or "")
    update = wire.RunUpdate(tags=tags_of(value)) if change["colId"] == "tags" else wire.RunUpdate(notes=value)
    reader.ask(lambda client: client.update_run(run_id, update))


def _filters(view: View) -> dict[str, Any]:
    """The requested rows; archived runs are left out unless requested, too."""
    shown = view.archived or view.tag == ARCHIVED
    where = [*view.where, *([] if shown else [_ARCHIVED])]
    return {"q": view.query or None, "where": where, **{name: getattr(view, name) for name in FILTERS}}


def _is_filtered(view: View) -> bool:
    return bool(view.query or view.where or any(getattr(view, name) for name in FILTERS))


def _pinned(view: View) -> list[str]:
    """The runs that stay on top, the baseline first."""
    return list(dict.fromkeys([*([view.baseline] if view.baseline else []), *view.pins]))


def _read_pinned(client: Client, view: View) -> list[dict[str, Any]]:
    """Rows of the runs that stay on top; those that are gone are left out."""
    wanted = _pinned(view)
    found = client.run_table(run_ids=wanted, limit=len(wanted), config=_paths(view)).rows
    return sorted(rows(found), key=lambda row: wanted.index(row["run_id"]))


def _baseline(pinned: Sequence[dict[str, Any]], view: View) -> dict[str, Any] | None:
    return next((row for row in pinned if row["run_id"] == view.baseline), None)


def _paths(view: View) -> list[str]:
    """The entries of configurations among the columns."""
    return [field for field in view.columns if field not in USUAL]


def _head(client: Client, view: View) -> wire.RunTable:
    """How many runs there are, how they are, and their revision."""
    return client.run_table(**_filters(view), limit=1)


def _read_rows(client: Client, view: View, sort: str, start: int, limit: int) -> wire.RunTable | wire.RunGroups:
    """Rows of the table as the view filters and groups them."""
    order: dict[str, Any] = {"sort": sort.removeprefix("-"), "descending": sort.startswith("-")}
    asked: dict[str, Any] = {**_filters(view), **order, "offset": start, "limit": limit, "config": _paths(view)}
    if view.by is None:
        return client.run_table(**asked)
    return client.run_groups(view.by, opened=view.opened, **asked)


def _shown_rows(table: wire.RunTable | wire.RunGroups, view: View) -> list[dict[str, Any]]:
    found = group_rows(table.rows, view) if isinstance(table, wire.RunGroups) else rows(table.rows)
    return [*found, *damaged_rows(table.damaged)]


def _revision(table: wire.RunTable) -> dict[str, Any]:
    """A revision: it changes whenever a row may have changed."""
    seen = f"{table.revision} {table.total} {sorted(table.live.items())}"
    return {"at": seen, "edits": 0, "failed": False}


def _is_empty(table: wire.RunTable, view: View) -> bool:
    return not table.total and not _is_filtered(view)


def _nothing(table: wire.RunTable, view: View, reader: Reader) -> Any:
    """What stands in the table's place where it is empty: how to train a run, or how to show those archived.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    if not _is_empty(table, view):
        return None
    hidden = 0 if view.archived else reader.ask(lambda client: client.run_table(tag=ARCHIVED, limit=1)).total
    if not hidden:
        return problem_page(_NO_RUNS, order=2)
    told = "The run is archived" if hidden == 1 else f"All {hidden:,} runs are archived"
    shown = dcc.Link("Show archived runs", href="".join(write_address(replace(view, archived="1"))))
    return html.Div([dmc.Title(told, order=2), shown], className="problem archived")


def _said(table: wire.RunTable, view: View) -> list[Any]:
    """The message of the table; if the filters leave nothing, a button that clears them."""
    if table.total or not _is_filtered(view):
        return headline_of(table) if table.total else []
    clear = clears("Clear filters", "runs", "q", "where", *FILTERS, className="textual")
    return ["No run matches these filters. ", clear]


def _wait(table: wire.RunTable, view: View) -> int:
    is_soon = table.live or table.healths.get("") or _is_empty(table, view)
    return milliseconds_after(0.0) if is_soon else IDLE_MILLISECONDS


def _grid(view: View, first: Sequence[dict[str, Any]], pinned: Sequence[dict[str, Any]]) -> Any:
    """The grid; until it can be drawn, its first rows in words stand in its place."""
    options = {
        "rowHeight": ROW_PIXELS,
        "pinnedTopRowData": pinned,
        "headerHeight": HEADER_PIXELS,
        "stopEditingWhenCellsLoseFocus": True,
        "cacheBlockSize": ROWS_PER_REQUEST,
        "maxBlocksInCache": 4,
        "maxConcurrentDatasourceRequests": 1,
        "infiniteInitialRowCount": 1,
    }
    shown = grid(
        "runs-grid",
        columns(view),
        "run_id",
        {},
        options,
        rowModelType="infinite",
        className="runs-grid",
        style={"height": "calc(100vh - 280px)", "minHeight": "260px"},
    )
    return with_placeholder(shown, _in_words(first[:_ROWS_IN_WORDS]))


def _in_words(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows of the table as text, before the grid is loaded."""
    lines = []
    for row in rows:
        dot = html.Span(className="dot", style={"--run-colour": row["colour"]})
        name = html.Span([dot, dcc.Link(row.get("label", row["name"]), href=row["address"])], className="run-cell")
        said = [judgement_sign(row["health"] or "unknown"), row["brief"]]
        verdict = html.Span(said, title=row["headline"], className="verdict-cell")
        lines.append((name, row["strategy"], row["state"], verdict))
    return table(("Run", "Strategy", "State", "Judgement"), lines, className="runs-words")
