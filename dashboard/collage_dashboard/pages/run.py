"""One run: a sentence with its numbers, and below its tabs the curves and the heatmap, or other measurements.

It fetches and answers callbacks; content is `run_content.py`'s, `run_curves.py`'s, `run_layers.py`'s and
`run_about.py`'s. Alerts and the agent's farewell link to it, so its address is fixed in `view.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import dash
import dash_mantine_components as dmc
import msgspec
import plotly.graph_objects as go
from dash import ALL, MATCH, Input, Output, State, dcc, html, no_update

from collage_dashboard.components import (
    LIVE_MILLISECONDS,
    curve_keys,
    embed_note,
    notice,
    page,
    refresh_marker,
    refresh_milliseconds,
    share_links,
    shown_if,
)
from collage_dashboard.figures.growth import Told, answer_for
from collage_dashboard.figures.style import digest, empty_figure, strategy_colour
from collage_dashboard.navigation import (
    Choice,
    asked_of,
    choices,
    clientside,
    or_later,
    part,
    register_choices,
    view_of,
    view_stores,
)
from collage_dashboard.number_downloads import frame_of, pandas_note
from collage_dashboard.pages.before_after import (
    CHANGED_BY,
    picked_change,
    register_change,
)
from collage_dashboard.pages.run_about import register_writing
from collage_dashboard.pages.run_content import (
    draw,
    first_curves,
    head,
    panel,
    search,
    summary,
    tabs_of,
)
from collage_dashboard.pages.run_curves import (
    MARK_KEYS,
    WHOLE_MODEL,
    Story,
    cured_at,
    marks_in_words,
    marks_of,
    run_controls,
)
from collage_dashboard.pages.run_layers import (
    DEFAULT_METRIC,
    keys_of_layers,
    map_control,
    map_style,
    register_layers,
    run_of,
)
from collage_dashboard.server_reader import Problem, Reader, explain
from collage_dashboard.view import View, write_address
from collage_dashboard.zoom import step_at, steps_within
from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.errors import CollageError

__all__ = ["layout", "register"]

_PARTS: Final = {"page": "This run", "curves": "Its curves", "layers": "Its layers"}
"""What of the page another one can show."""

CHOICES: Final = choices(
    "tab",
    "order",
    "rows",
    "scale",
    "smoothing",
    axis=Choice("axis", drops=("from", "to")),
    metric=Choice("metric", DEFAULT_METRIC),
    layer=Choice("layer", WHOLE_MODEL, drops=("step",)),
    at=Choice("at", "", is_steps=True),
    schedule=Choice("schedule"),
    query=Choice("q", is_typed=True),
    panels=Choice("panel"),
)
"""The page's controls."""


def layout(view: View, reader: Reader) -> html.Div:
    """The page's frame, with the tab of the view; figures come with the first refresh.

    Raises:
        CollageError: the server does not answer, or there is no such run.
    """
    run_id = view.runs[0]
    run, layers, row, events = reader.ask_together(
        lambda client: client.run(run_id),
        lambda client: client.layers(run_id).layers,
        lambda client: _row(client, run_id),
        lambda client: _events(client, run_id),
    )
    story = _story(row, events)
    revision = _revision(row, story)
    change = picked_change(view, run, reader)
    tabs = dmc.Tabs(
        [
            dmc.TabsList([dmc.TabsTab(title, value=name) for name, title in tabs_of(run).items()]),
            # Empty panels: each tab must name one, but its content is below the controls.
            *(dmc.TabsPanel("", value=name) for name in tabs_of(run)),
        ],
        id="run-tab",
        value=view.tab,
    )
    frame = page(
        [
            *view_stores(view, "run", CHOICES),
            dcc.Store(id="run-revision", data=revision),
            dcc.Store(id="run-judged", data=_judged(row)),
            dcc.Store(id="run-layer-keys", data=keys_of_layers(run)),
            dcc.Store(id="run-pick"),
            dcc.Store(id="run-framed", data=_framed(view)),
            dcc.Store(id="run-record", data=wire.encode_json(run).decode()),
            refresh_marker("run-pace", refresh_milliseconds([row] if row else [], 0.0)),
            html.Div(head(run), id="run-head"),
            html.Div(id="run-alert"),
            html.Div(
                summary(run, row.overview) if row and row.overview else None,
                id="run-summary",
                className="numbers-place",
            ),
            html.Div(
                [tabs, run_controls(view, list(dict.fromkeys(layer.name for layer in layers)))],
                className="tabs-line",
            ),
            html.Div(
                first_curves(view, run),
                id="run-stack",
                className="three",
                **curve_keys("Curves of the run", MARK_KEYS),
            ),
            html.Div(map_control(view, run), id="run-map-controls", style=map_style(view, run)),
            html.Div(search(view, run), id="run-search", style=shown_if(view.tab == "curves")),
            html.Div([html.Div(panel(view, run), id="run-panel"), *part("run-layer-place")], className="beside"),
            *part("run-change", change, asked_of(view, revision, CHANGED_BY)),
            html.Div(marks_in_words(story.marks), id="run-marks"),
            html.Div(
                [dcc.Link("Incidents", href=_incidents(run_id)), " · ", *share_links([run_id])], className="crumbs"
            ),
            pandas_note(reader, frame_of([run_id])),
            embed_note("".join(write_address(view)), _PARTS),
        ],
        run.name,
    )
    return _draw_ahead(frame, reader, revision)


def register(app: dash.Dash, reader: Reader) -> None:
    """Bind address, controls and refresh to the application."""
    register_choices(app, "run", CHOICES)
    _register_places(app, reader)
    _register_frame(app, reader)
    register_writing(app, reader)
    register_layers(app, reader)
    register_change(app, reader)
    _register_figures(app, reader)

    @app.callback(
        Output("run-revision", "data"),
        Output("run-judged", "data"),
        Output("run-alert", "children"),
        Output("run-pace", "children"),
        Output("run-marks", "children"),
        Input("tick", "data"),
        State("run-shown", "data"),
        State("run-revision", "data"),
        State("run-judged", "data"),
        prevent_initial_call=True,
    )
    def check_for_changes(
        _tick: int | None, shown: dict[str, str], known: dict[str, Any], judged: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Whether anything changed: one light question, however many charts there are."""
        run_id, start = view_of(shown).runs[0], time.monotonic()
        try:
            row = reader.ask(lambda client: _row(client, run_id))
            said = _judged(row)
            if _at(row) == known["at"] and said == judged and not known["failed"]:
                raise dash.exceptions.PreventUpdate
            story = _story(row, reader.ask(lambda client: _events(client, run_id)) if row else ())
        except CollageError as error:
            failed = ({**known, "failed": True}, {**judged, "failed": True})
            return (*failed, notice(explain(error)), str(LIVE_MILLISECONDS), no_update)
        wait = no_update if row is None else str(refresh_milliseconds([row], time.monotonic() - start))
        gone = Problem("This run is gone", f"There is no run {run_id!r} any more.")
        found = _revision(row, story)
        return (
            no_update if found == known else found,
            no_update if said == judged else said,
            notice(gone) if row is None else None,
            wait,
            marks_in_words(story.marks),
        )

    @app.callback(
        Output("run-head", "children"),
        Output("run-summary", "children"),
        Input("run-judged", "data"),
        State("run-shown", "data"),
        prevent_initial_call=True,
    )
    def refresh(judged: dict[str, Any], shown: dict[str, str]) -> tuple[Any, ...]:
        """The part above the tabs, read again; the page opens with it."""
        run_id = view_of(shown).runs[0]
        if judged["failed"]:
            raise dash.exceptions.PreventUpdate
        with or_later():
            run, overview = reader.ask_together(
                lambda client: client.run(run_id), lambda client: client.overview(run_id)
            )
        return head(run), summary(run, overview)


def _register_places(app: dash.Dash, reader: Reader) -> None:
    """Bind what only the server knows: which steps stand at a place of the axis."""

    @app.callback(
        Output("run-address", "search"),
        Input("run-pick", "data"),
        Input("run-at-shown", "n_clicks"),
        Input({"type": "run-figure", "kind": "heatmap", "metric": ALL}, "clickData"),
        State("run-shown", "data"),
        prevent_initial_call=True,
    )
    def locate(pick: dict[str, Any], _shown: Any, cells: list[Any], shown: dict[str, Any]) -> str:
        before, trigger = view_of(shown), dash.ctx.triggered_id
        try:
            if trigger == "run-pick":
                view = _picked(before, step_at(pick["x"], before, reader))
            elif trigger == "run-at-shown":
                view = _picked(before, *steps_within(before, reader))
            else:
                point = next(cell["points"][0] for cell in cells if cell and cell.get("points"))
                view = replace(before, layer=str(point["y"]), step=step_at(point["x"], before, reader))
        except (CollageError, StopIteration):
            raise dash.exceptions.PreventUpdate from None
        if view == before:
            raise dash.exceptions.PreventUpdate
        return write_address(view)[1]


def _picked(before: View, first: int | None, last: int | None = None) -> View:
    """The view that says what changed at a step, or from the first to the last."""
    return before if first is None else replace(before, at=(first, first if last is None else max(first, last)))


def _register_frame(app: dash.Dash, reader: Reader) -> None:
    @app.callback(
        Output("run-stack", "children"),
        Output("run-panel", "children"),
        Output("run-framed", "data"),
        Output("run-map-controls", "style"),
        Output("run-search", "style"),
        Output("run-at-zoom", "style"),
        Input("run-shown", "data"),
        State("run-framed", "data"),
        State("run-record", "data"),
        prevent_initial_call=True,
    )
    def frame(shown: dict[str, Any], known: list[Any], record: str) -> tuple[Any, ...]:
        """The frame of a tab; while the server is away, by what the page knew of the run when it was opened."""
        view = view_of(shown)
        wanted, children = _framed(view), no_update
        curves = no_update if wanted[0] == known[0] else first_curves(view, run_of(record))
        if wanted != known:
            try:
                children = panel(view, reader.ask(lambda client: client.run(view.runs[0])))
            except CollageError:
                children = panel(view, run_of(record))
        styles = map_style(view, run_of(record)), shown_if(view.tab == "curves"), shown_if(view.zoom)
        return curves, children, wanted, *styles


def _framed(view: View) -> list[str]:
    """What of the view changes the frame of a tab."""
    return [view.tab, view.metric or DEFAULT_METRIC, view.query, *view.panels]


def _register_figures(app: dash.Dash, reader: Reader) -> None:
    """Each chart has its own request: a slow one does not delay others, and unchanged data is not sent again."""
    each = {"kind": MATCH, "metric": MATCH}

    @app.callback(
        Output({"type": "run-answer", **each}, "data"),
        Output({"type": "run-digest", **each}, "data"),
        Input("run-shown", "data"),
        Input("run-revision", "data"),
        State({"type": "run-digest", **each}, "data"),
    )
    def redraw(shown: dict[str, Any], revision: dict[str, Any], known: Told | None) -> tuple[Any, ...]:
        if revision["failed"]:
            raise dash.exceptions.PreventUpdate
        chart = dash.ctx.outputs_list[0]["id"]
        try:
            drawn = reader.begun_or_now(
                _key(chart, shown, revision), partial(_drawn, reader, chart, shown, revision)
            )
        except CollageError as error:
            if known:
                raise dash.exceptions.PreventUpdate from None
            return empty_figure(explain(error).title), no_update
        answer, told = answer_for(drawn, known)
        if told == known:
            raise dash.exceptions.PreventUpdate
        return answer, told

    clientside(
        app,
        "collage.keepZoom",
        Output({"type": "run-figure", **each}, "figure"),
        Input({"type": "run-answer", **each}, "data"),
        State({"type": "run-figure", **each}, "figure"),
    )
    clientside(app, "collage.shareHover", Input({"type": "run-figure", "kind": ALL, "metric": ALL}, "hoverData"))


def _draw_ahead(frame: html.Div, reader: Reader, revision: dict[str, Any]) -> html.Div:
    """The page's frame, while its charts are already drawn: the browser asks for them a second later."""
    by_id = [(getattr(found, "id", None), found) for found in frame._traverse()]  # type: ignore[no-untyped-call]
    shown = next(found.data for name, found in by_id if name == "run-shown")
    for chart, _ in by_id:
        if isinstance(chart, dict) and chart["type"] == "run-answer":
            reader.begin(_key(chart, shown, revision), partial(_drawn, reader, chart, shown, revision))
    return frame


def _key(chart: dict[str, str], shown: dict[str, Any], revision: dict[str, Any]) -> tuple[str, ...]:
    return (chart["kind"], chart["metric"], digest((shown, revision["at"])))


def _drawn(reader: Reader, chart: dict[str, str], shown: dict[str, Any], revision: dict[str, Any]) -> go.Figure:
    story = msgspec.convert(revision["story"], Story)
    return draw(chart["kind"], chart["metric"], view_of(shown), reader, story, zoom_count=shown["zooms"])


def _incidents(run_id: str) -> str:
    return "".join(write_address(View(page="incidents", runs=(run_id,))))


def _row(client: Client, run_id: str) -> wire.RunRow | None:
    return next(iter(client.run_table(run_ids=[run_id]).rows), None)


def _events(client: Client, run_id: str) -> list[wire.Event]:
    return client.events(run_id, newest=True).events


def _at(row: wire.RunRow | None) -> str:
    """A revision that changes whenever a chart of the run may have."""
    return digest((row.updated_at, row.changed_at, row.reports, row.state)) if row else ""


def _story(row: wire.RunRow | None, events: Sequence[wire.Event]) -> Story:
    if row is None:
        return Story()
    said = row.overview or wire.Overview(run_id=row.run_id)
    return Story(
        strategy_colour(row.shown_strategy, row.dtype),
        row.shown_strategy,
        said.since,
        cured_at(events),
        row.beside,
        marks_of(events, said.changes),
    )


def _revision(row: wire.RunRow | None, story: Story) -> dict[str, Any]:
    """What the charts depend on."""
    return {"at": _at(row), "failed": False, "story": json.loads(msgspec.json.encode(story))}


def _judged(row: wire.RunRow | None) -> dict[str, Any]:
    """A revision that changes with the run's overview; the first and the last step of its recent past.

    Charts change as soon as something is reported, the overview a moment later: apart, neither is asked for twice.
    """
    said = row.overview if row else None
    if row is None or said is None:
        return {"at": str(row and row.updated_at), "failed": False, "first": None, "last": None}
    newest = row.last_step if said.last_step is None else None
    at = digest(f"{row.state} {row.changed_at} {newest} {said}")
    return {"at": at, "failed": False, "first": said.first_step, "last": said.last_step}
