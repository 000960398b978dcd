"""The part above the table of runs: filters, columns, saved views, and actions on picked runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import dash
import dash_mantine_components as dmc
from dash import ALL, Input, Output, State, dcc, html, no_update

from collage_dashboard.components import filter_select, menu, refusal, tags_of
from collage_dashboard.navigation import Choice, choices, clientside, pressed_button, register_choices, view_of
from collage_dashboard.pages.runs_content import USUAL, columns, compare_link
from collage_dashboard.run_styles import strategy_title
from collage_dashboard.server_reader import Reader
from collage_dashboard.view import ARCHIVED, FILTERS, GROUPS, View, read_address
from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.errors import CollageError

__all__ = [
    "CHOICES",
    "columns_menu",
    "filter_button",
    "filter_row",
    "pinned_line",
    "register_controls",
    "tray",
    "undo",
    "views_menu",
]

_AT_ONCE: Final = 100
"""Runs that one question of the table names."""
_MOST_NAMED: Final = 3
_UNDO_SECONDS: Final = 600
_BACK: Final = {"archive": "unarchive", "unarchive": "archive", "delete": "restore"}
_STATES: Final = ("running", "finished", "failed", "stale")
_LABELS: Final = {"health": "Verdict"}
_ORDERS: Final = {
    "-updated_at": "Newest first",
    "-health": "Problems first",
    "edq_ratio": "Lowest EDQ first",
    "-lost_update_ratio": "Most lost updates first",
    "loss": "Lowest loss first",
    "name": "By name",
}
CHOICES: Final = choices(
    *FILTERS,
    "archived",
    "where",
    "sort",
    query=Choice("q", is_typed=True),
    by=Choice("by", drops=("open",)),
    columns=Choice("column", USUAL, behind="strategy"),
)
"""The controls of the table."""


def filter_button(view: View) -> dmc.Chip:
    """Shows the filters; where one is set they are shown."""
    is_set = any(getattr(view, name) for name in (*FILTERS, "archived", "by", "where"))
    return dmc.Chip("Filters", checked=is_set, size="sm", color="blue.8", className="show-filters")


def filter_row(view: View, filters: wire.RunFilters) -> html.Div:
    """The filters of the table, and the grouping of its runs."""
    selects = [_filter_select(name, view, filters) for name in FILTERS]
    by = {value: f"By {title}" for value, title in GROUPS.items()}
    sort = view.sort if view.sort in _ORDERS else None
    further = (
        filter_select("runs-archived", "Archived", {"1": "With archived"}, view.archived, told="Archived runs"),
        filter_select("runs-by", "Group by", by, view.by, told="Group runs that differ by seed"),
        # For phones, whose cards have no headers to sort by.
        filter_select(
            "runs-sort", "Sort by", _ORDERS, sort, told="Order of the runs", className="filter for-phones"
        ),
        _where(view),
    )
    return html.Div([*selects, *further], className="filters")


def _filter_select(name: str, view: View, filters: wire.RunFilters) -> Any:
    known: dict[str, int] = dict.fromkeys(_STATES, 0) if name == "state" else getattr(filters, name)
    chosen = getattr(view, name)
    label = _LABELS.get(name, name.capitalize())
    titles = {value: strategy_title(value) if name == "strategy" else value for value in known}
    offered = {value: titles[value] + (f" ({count})" if count else "") for value, count in known.items()}
    if chosen:
        offered.setdefault(chosen, chosen)
    return filter_select(f"runs-{name}", label, offered, chosen, searchable=True)


def _where(view: View) -> dmc.TagsInput:
    return dmc.TagsInput(
        id="runs-where",
        value=list(view.where),
        placeholder="Conditions: lr > 1e-3, edq < 0.9, age < 2d",
        splitChars=[","],
        size="xs",
        className="filter where",
        **{"aria-label": "Conditions on columns and entries of the configuration; Enter adds one"},
    )


def columns_menu(view: View) -> html.Details:
    """The columns, to choose and to order; more of them are entries of the configuration, by path."""
    chosen = dmc.TagsInput(
        id="runs-columns",
        value=list(view.columns or USUAL),
        data=list(USUAL),
        size="xs",
        label="Columns, in order",
        description="Press Enter to add one: a field, or a configuration entry by its path, such as optimizer.lr. "
        "You can drag headers, too. The page's address keeps the layout.",
        placeholder="optimizer.lr",
    )
    return menu("Columns", chosen)


def tray(picked: Mapping[str, str]) -> Any:
    """A link to compare the picked runs, by id and name, and further actions on them."""
    link = compare_link(picked)
    if not picked:
        return link
    one = ["baseline"] if len(picked) == 1 else []
    tags = dmc.TextInput(
        id={"type": "picked-tags", "index": 0},
        placeholder="Tags",
        debounce=True,
        size="xs",
        w=110,
        **{"aria-label": "Tags to add"},
    )
    return html.Div(
        [
            link,
            *(_keeps(action.capitalize(), {"data-keeps": action}) for action in ("pin", *one)),
            html.Span([tags, _action("tag")], className="tray"),
            *(_action(action) for action in ("archive", "unarchive")),
            dcc.ConfirmDialogProvider(
                html.Button("Delete", type="button", className="textual"),
                id={"type": "picked-delete", "index": 0},
                message=f"Delete {_named(picked)}, with all curves, notes and incidents? What is still training "
                f"sends no more. You can undo it for {_UNDO_SECONDS // 60} minutes.",
            ),
        ],
        className="tray",
    )


def pinned_line(pinned: Sequence[Mapping[str, Any]], view: View) -> Any:
    """The runs that stay on top, each with a way to let it go."""
    if not pinned:
        return None
    parts = []
    for row in pinned:
        kind = "Baseline" if row["run_id"] == view.baseline else "Pinned"
        button = _keeps("×", {"data-frees": row["run_id"], "aria-label": f"Let go of {row['name']}"})
        parts.append(html.Span([f"{kind}: {row['name']} ", button]))
    return html.Div(parts, className="kept")


def _keeps(text: str, named: dict[str, Any]) -> html.Button:
    """A button that keeps the picked runs on top of the table, or lets go of one: `assets/flow.js` writes which."""
    return html.Button(text, type="button", className="textual", **named)


def views_menu() -> html.Details:
    """Saved views, read when they are looked for, and a way to save the present one."""
    # With every key, the text would follow in a timer of its own, which a press of the button may overtake.
    said: dict[str, Any] = {"aria-label": "Name of the view"}
    name = dmc.TextInput(id="runs-view-name", placeholder="Name", size="xs", debounce=True, **said)
    save = dmc.Button("Save this view", id="runs-view-save", size="xs", variant="default", mt=6)
    listed = html.Div(id="runs-views", role="status")
    return html.Details(
        [html.Summary("Views", id="runs-views-open"), html.Div([listed, name, save], className="menu-card")],
        className="menu",
    )


def register_controls(app: dash.Dash, reader: Reader) -> None:
    """Bind filters, columns, saved views, and actions on picked runs, to the application."""
    register_choices(app, "runs", CHOICES)
    _register_picked(app)
    _register_views(app, reader)

    @app.callback(
        Output("runs-alert", "children", allow_duplicate=True),
        Output("tick", "data", allow_duplicate=True),
        Output("runs-picked", "data", allow_duplicate=True),
        Output("runs-undo", "children"),
        Input({"type": "picked-action", "index": ALL}, "n_clicks"),
        Input({"type": "picked-delete", "index": ALL}, "submit_n_clicks"),
        State({"type": "picked-tags", "index": ALL}, "value"),
        State("runs-picked", "data"),
        prevent_initial_call=True,
    )
    def write(
        _clicks: Any, _deletes: Any, tags: list[str | None], picked: dict[str, str] | None
    ) -> tuple[Any, ...]:
        pressed = pressed_button()
        pressed_delete = pressed["type"] == "picked-delete"
        action, *undone = ["delete"] if pressed_delete else pressed["index"].split("\n")
        named = tags_of(tags[0] or "") if tags and action == "tag" else []
        asked = undone or list(picked or ())
        if not asked or (action == "tag" and not named):
            raise dash.exceptions.PreventUpdate
        try:
            changed = reader.ask(lambda client: _do(client, action, asked, named))
        except CollageError as error:
            return refusal(error), no_update, no_update, no_update
        gone: Any = {} if action == "delete" else no_update
        return None, f"written {time.time()}", gone, None if undone else undo(action, changed)


def undo(action: str, changed: Sequence[str]) -> Any:
    """What was done to these runs, and a way back; nothing of what has none, or changed none."""
    if action not in _BACK or not changed:
        return None
    runs = "1 run" if len(changed) == 1 else f"{len(changed):,} runs"
    return [f"{action.capitalize()}d {runs}. ", _action("\n".join([_BACK[action], *changed]), "Undo")]


def _register_views(app: dash.Dash, reader: Reader) -> None:
    @app.callback(
        Output("runs-views", "children"),
        Input("runs-views-open", "n_clicks"),
        Input("runs-view-save", "n_clicks"),
        Input({"type": "delete-view", "index": ALL}, "n_clicks"),
        State("runs-view-name", "value"),
        State("runs-address", "search"),
        prevent_initial_call=True,
    )
    def change_views(_open: Any, _save: Any, _delete: Any, name: str | None, search: str | None) -> Any:
        trigger = dash.ctx.triggered_id
        try:
            if trigger == "runs-view-save":
                return _save_view(reader, (name or "").strip(), search or "")
            if not isinstance(trigger, str):
                project, named = pressed_button()["index"].split("\n", 1)
                reader.ask(lambda client: client.delete_view(project, named))
            return _listed(reader.ask(lambda client: client.views()))
        except CollageError as error:
            return refusal(error)


def _save_view(reader: Reader, name: str, search: str) -> Any:
    projects = list(reader.ask(lambda client: client.run_filters()).project)
    project = read_address("/", search).project or (projects[0] if len(projects) == 1 else None)
    if project is None:
        return "Choose a project first: a view is saved for everyone who sees that project."
    if not name:
        return "Name the view, then save it."
    create = wire.SavedViewCreate(name=name, search=search.removeprefix("?"))
    reader.ask(lambda client: client.save_view(project, create))
    return _listed(reader.ask(lambda client: client.views()))


def _listed(views: Sequence[wire.SavedView]) -> Any:
    if not views:
        return "No view is saved yet."
    entries = []
    for view in views:
        link = dcc.Link(view.name, href=f"/runs?{view.search}", title=f"{view.project}, by {view.made_by}")
        own = {"type": "delete-view", "index": f"{view.project}\n{view.name}"}
        named: dict[str, Any] = {"aria-label": f"Delete the view {view.name}"}
        entries.append(html.Li([link, html.Button("×", id=own, className="textual", **named)]))
    return html.Ul(entries)


def _action(action: str, said: str = "") -> html.Button:
    """A button that does something to the picked runs, or to those that follow the action, a line each."""
    own = {"type": "picked-action", "index": action}
    return html.Button(said or action.capitalize(), id=own, type="button", className="textual")


def _named(picked: Mapping[str, str]) -> str:
    first = ", ".join(islice(picked.values(), _MOST_NAMED))
    more = len(picked) - _MOST_NAMED
    return f"{first} and {more} more" if more > 0 else first


def _do(client: Client, action: str, run_ids: Sequence[str], tags: Sequence[str]) -> list[str]:
    """Apply an action to each of these runs, and name those that it changed; earlier ones stay done if one is
    refused."""
    changed = []
    if action == "delete":
        return [client.delete_run(run_id, undo_seconds=_UNDO_SECONDS).run_id for run_id in run_ids]
    if action == "restore":
        return [client.restore_run(run_id).run_id for run_id in run_ids]
    for row in _rows(client, run_ids):
        kept = [tag for tag in row.tags if action != "unarchive" or tag != ARCHIVED]
        added = [ARCHIVED] if action == "archive" else tags
        wanted = list(dict.fromkeys([*kept, *added]))
        if wanted != row.tags:
            changed.append(client.update_run(row.run_id, wire.RunUpdate(tags=wanted)).run_id)
    return changed


def _rows(client: Client, run_ids: Sequence[str]) -> Iterator[wire.RunRow]:
    left: Iterable[str] = iter(run_ids)
    while some := list(islice(left, _AT_ONCE)):
        yield from client.run_table(run_ids=some, limit=_AT_ONCE).rows


def _register_picked(app: dash.Dash) -> None:
    @app.callback(
        Output("runs-grid", "columnDefs"),
        Input("runs-shown", "data"),
        State("runs-grid", "columnDefs"),
        prevent_initial_call=True,
    )
    def show_columns(shown: dict[str, Any], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = columns(view_of(shown))
        if [_place_of(column) for column in found] == [_place_of(column) for column in known]:
            raise dash.exceptions.PreventUpdate
        return found

    @app.callback(Output("runs-compare", "children"), Input("runs-picked", "data"))
    def show_picked(picked: dict[str, str] | None) -> Any:
        return tray(picked or {})

    clientside(app, "flow.picked", Input("runs-picked", "data"), prevent_initial_call=False)


def _place_of(column: dict[str, Any]) -> str | None:
    return column.get("field") or column.get("colId")
