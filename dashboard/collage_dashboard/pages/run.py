"""One run: first a sentence with its numbers and the curves, then the worst layers, and all other measurements
behind tabs.

It fetches and answers callbacks; content is `run_content.py`'s, `run_curves.py`'s, `run_layers.py`'s and
`run_about.py`'s. Alerts and the agent's farewell link to it, so its address is fixed in `view.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import dash
import dash_mantine_components as dmc
from dash import ALL, MATCH, ClientsideFunction, Input, Output, State, dcc, html, no_update

from collage_dashboard.components import (
    LIVE_MILLISECONDS,
    embed_note,
    limits_note,
    notice,
    page,
    refresh_marker,
    refresh_milliseconds,
    report_link,
)
from collage_dashboard.figures.heatmap import newest_columns
from collage_dashboard.figures.style import ACCENT, digest, empty_figure, strategy_colour
from collage_dashboard.number_downloads import frame_of, pandas_note
from collage_dashboard.pages.before_after import (
    change_place,
    picked_marks,
    register_change,
    shown_style,
)
from collage_dashboard.pages.run_about import register_writing
from collage_dashboard.pages.run_content import (
    TABS,
    draw,
    head,
    panel,
    summary,
    worst_layers,
)
from collage_dashboard.pages.run_curves import WHOLE_MODEL, curve_controls, curves_card
from collage_dashboard.pages.run_layers import DEFAULT_METRIC, map_controls, map_style, register_layers, run_of
from collage_dashboard.pages.run_marks import marks_in_words, marks_of
from collage_dashboard.server_reader import Problem, Reader, explain
from collage_dashboard.view import View, read_address, read_steps, write_address, write_steps
from collage_dashboard.zoom import Steps, on_axis, step_at, steps_within, zoomed
from collage_monitor import wire
from collage_monitor.client import Client
from collage_monitor.errors import CollageError

__all__ = ["layout", "register"]

_CONTROLS: Final = (
    "run-tab",
    "run-metric",
    "run-order",
    "run-rows",
    "run-layer",
    "run-axis",
    "run-scale",
    "run-smoothing",
    "run-at",
)

_PARTS: Final = {"page": "This run", "curves": "Its curves", "layers": "Its layers"}
"""What of the page another one can show."""


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
    marks = _marks(events, row)
    pathname, search = write_address(view)
    tabs = dmc.Tabs(
        [
            dmc.TabsList([dmc.TabsTab(title, value=name) for name, title in TABS.items()]),
            # What a tab shows stands below, after the controls; each tab names a panel all the same.
            *(dmc.TabsPanel("", value=name) for name in TABS),
        ],
        id="run-tab",
        value=view.tab,
        mt="lg",
        mb=14,
    )
    return page(
        [
            dcc.Location(id="run-address", refresh=False, search=search),
            dcc.Store(id="run-shown", data={"pathname": pathname, "search": search, "zooms": 0}),
            dcc.Store(id="run-revision", data={**_revision(row), "marks": marks}),
            dcc.Store(id="run-zoom"),
            dcc.Store(id="run-pick"),
            dcc.Store(id="run-record", data=wire.encode_json(run).decode()),
            dcc.Store(
                id="run-kinds", data={layer.name: layer.module_type for layer in layers if layer.module_type}
            ),
            refresh_marker("run-pace", refresh_milliseconds([row] if row else [], 0.0)),
            html.Div(
                [
                    dcc.Link("Runs", href="/"),
                    " / ",
                    run.project,
                    " · ",
                    dcc.Link("Incidents", href=_incidents(run_id)),
                    " · ",
                    report_link([run_id]),
                ],
                className="crumbs",
            ),
            html.Div(head(run), id="run-head"),
            html.Div(id="run-alert"),
            html.Div(
                summary(run, row.overview) if row and row.overview else None,
                id="run-summary",
                className="numbers-place",
            ),
            curves_card(
                curve_controls(view, list(dict.fromkeys(layer.name for layer in layers))), marks, run.beside
            ),
            change_place(view, run, reader),
            html.Div(worst_layers(run, row.overview) if row and row.overview else None, id="run-worst"),
            tabs,
            html.Div(map_controls(view, run), id="run-map-controls", className="controls", style=map_style(view)),
            html.Div(
                [html.Div(panel(view, run), id="run-panel"), html.Div(id="run-layer-place")], className="beside"
            ),
            pandas_note(reader, frame_of([run_id])),
            embed_note(pathname + search, _PARTS),
            limits_note(),
        ],
        run.name,
    )


def register(app: dash.Dash, reader: Reader) -> None:
    """Bind address, controls and refresh to the application."""
    _register_navigation(app, reader)
    register_writing(app, reader)
    register_layers(app, reader)
    register_change(app, reader)
    _register_figures(app, reader)

    @app.callback(
        Output("run-revision", "data"),
        Output("run-alert", "children"),
        Output("run-pace", "children"),
        Output("run-marks", "children"),
        Input("tick", "data"),
        State("run-shown", "data"),
        State("run-revision", "data"),
        prevent_initial_call=True,
    )
    def check_for_changes(_tick: int | None, shown: dict[str, str], known: dict[str, Any]) -> tuple[Any, ...]:
        """Whether anything changed: one light question, however many charts there are."""
        run_id, start = read_address(shown["pathname"], "").runs[0], time.monotonic()
        try:
            row = reader.ask(lambda client: _row(client, run_id))
            found = _revision(row)
            if found == {name: value for name, value in known.items() if name != "marks"}:
                raise dash.exceptions.PreventUpdate
            marks = _marks(reader.ask(lambda client: _events(client, run_id)), row) if row else []
        except CollageError as error:
            return {**known, "failed": True}, notice(explain(error)), str(LIVE_MILLISECONDS), no_update
        wait = no_update if row is None else str(refresh_milliseconds([row], time.monotonic() - start))
        gone = Problem("This run is gone", f"There is no run {run_id!r} any more.")
        return {**found, "marks": marks}, notice(gone) if row is None else None, wait, marks_in_words(marks)

    @app.callback(
        Output("run-head", "children"),
        Output("run-summary", "children"),
        Output("run-worst", "children"),
        Output("run-record", "data"),
        Input("run-revision", "data"),
        State("run-shown", "data"),
        prevent_initial_call=True,
    )
    def refresh(revision: dict[str, Any], shown: dict[str, str]) -> tuple[Any, ...]:
        """The part above the tabs, read again; the page opens with it."""
        run_id = read_address(shown["pathname"], "").runs[0]
        if revision["failed"]:
            raise dash.exceptions.PreventUpdate
        try:
            run, overview = reader.ask_together(
                lambda client: client.run(run_id), lambda client: client.overview(run_id)
            )
        except CollageError:
            raise dash.exceptions.PreventUpdate from None  # The next look says what is wrong.
        return head(run), summary(run, overview), worst_layers(run, overview), wire.encode_json(run).decode()


def _register_figures(app: dash.Dash, reader: Reader) -> None:
    """Each chart has its own request: a slow one does not delay others, and unchanged data is not sent again."""
    each = {"kind": MATCH, "metric": MATCH}

    @app.callback(
        Output({"type": "run-answer", **each}, "data"),
        Output({"type": "run-digest", **each}, "data"),
        Input("run-shown", "data"),
        Input("run-revision", "data"),
        State({"type": "run-digest", **each}, "data"),
        State({"type": "run-digest", **each}, "id"),
    )
    def redraw(
        shown: dict[str, Any], revision: dict[str, Any], known: Any, chart: dict[str, str]
    ) -> tuple[Any, ...]:
        if revision["failed"]:
            raise dash.exceptions.PreventUpdate
        view = read_address(shown["pathname"], shown["search"])
        try:
            drawn = draw(
                chart["kind"],
                chart["metric"],
                view,
                reader,
                revision["colour"],
                marks=[*revision["marks"], *picked_marks(view)],
                beside=revision["beside"],
                since=revision["since"],
                strategy=revision["strategy"],
                zoom_count=shown["zooms"],
            )
        except CollageError as error:
            if known:
                raise dash.exceptions.PreventUpdate from None
            return empty_figure(explain(error).title), no_update
        if chart["kind"] == "heatmap" and drawn.data:
            part, told = newest_columns(drawn, known if isinstance(known, dict) else None)
            if told == known:
                raise dash.exceptions.PreventUpdate
            return drawn if part is None else {"newest": part}, told
        found = digest(drawn)
        if found == known:
            raise dash.exceptions.PreventUpdate
        return drawn, found

    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("collage", "keepZoom"),
        Output({"type": "run-figure", **each}, "figure"),
        Input({"type": "run-answer", **each}, "data"),
        State({"type": "run-figure", **each}, "figure"),
        prevent_initial_call=True,
    )
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("collage", "shareHover"),
        Output("run-panel", "id"),
        Input({"type": "run-figure", "kind": ALL, "metric": ALL}, "hoverData"),
        prevent_initial_call=True,
    )


def _incidents(run_id: str) -> str:
    return "".join(write_address(View(page="incidents", runs=(run_id,))))


def _row(client: Client, run_id: str) -> wire.RunRow | None:
    return next(iter(client.run_table(run_ids=[run_id]).rows), None)


def _events(client: Client, run_id: str) -> list[wire.Event]:
    return client.events(run_id, newest=True).events


def _marks(events: Sequence[wire.Event], row: wire.RunRow | None) -> list[tuple[int, str]]:
    return marks_of(events, row.overview.changes if row and row.overview else ())


def _revision(row: wire.RunRow | None) -> dict[str, Any]:
    """A revision that changes whenever shown data of the run may have changed; its strategy's colour, the first
    step with its present EDQ, and the first step of its recent past.
    """
    if row is None:
        return {
            "at": "",
            "failed": False,
            "colour": ACCENT,
            "strategy": None,
            "since": None,
            "first": None,
            "beside": [],
        }
    said = row.overview or wire.Overview(run_id=row.run_id)
    return {
        "at": f"{row.updated_at} {row.changed_at} {row.reports} {row.state} {said.last_step}",
        "failed": False,
        "colour": strategy_colour(row.shown_strategy, row.dtype),
        "strategy": row.shown_strategy,
        "since": said.since,
        "first": said.first_step,
        "beside": row.beside,
    }


def _register_navigation(app: dash.Dash, reader: Reader) -> None:
    @app.callback(
        Output("run-address", "search"),
        Output("run-shown", "data"),
        Output("run-panel", "children"),
        Output("run-map-controls", "style"),
        Output("run-at-zoom", "style"),
        *(Output(name, "value") for name in _CONTROLS),
        Input("run-address", "search"),
        *(Input(name, "value") for name in _CONTROLS),
        Input({"type": "run-figure", "kind": "heatmap", "metric": ALL}, "clickData"),
        Input({"type": "run-layers", "index": ALL}, "cellClicked"),
        Input("run-zoom", "data"),
        Input("run-pick", "data"),
        Input("run-at-shown", "n_clicks"),
        State("run-address", "pathname"),
        State("run-shown", "data"),
        State("run-record", "data"),
        prevent_initial_call=True,
    )
    def navigate(search: str | None, *rest: Any) -> tuple[Any, ...]:
        *controls, clicks, rows, zoom, pick, _shown_steps, pathname, shown, record = rest
        before = read_address(shown["pathname"], shown["search"])
        if pathname != shown["pathname"]:
            raise dash.exceptions.PreventUpdate
        trigger = dash.ctx.triggered_id
        if trigger == "run-address":
            view = read_address(pathname, search)
        elif trigger == "run-zoom":
            view = zoomed(before, zoom)
        elif trigger == "run-pick":
            view = _picked(before, _step_of(pick["x"], before, reader))
        elif trigger == "run-at-shown":
            view = _picked(before, *_steps_shown(before, reader))
        elif isinstance(trigger, str):
            view = _chosen(before, reader, *controls)
        elif trigger["type"] == "run-layers":
            view = replace(before, layer=next((row["rowId"] for row in rows if row), before.layer), step=None)
        else:
            view = _clicked(before, clicks, reader)
        wanted = write_address(view)[1]
        if view == before:
            raise dash.exceptions.PreventUpdate
        children = no_update if (view.tab, view.metric) == (before.tab, before.metric) else _panel(view, record)
        return (
            wanted,
            {"pathname": pathname, "search": wanted, "zooms": shown["zooms"] + (view.zoom != before.zoom)},
            children,
            map_style(view),
            shown_style(view),
            view.tab,
            view.metric or DEFAULT_METRIC,
            view.order,
            view.rows,
            view.layer or WHOLE_MODEL,
            view.axis,
            view.scale,
            view.smoothing,
            write_steps(view.at) if view.at else "",
        )


def _chosen(
    before: View,
    reader: Reader,
    tab: str,
    metric: str,
    order: str,
    rows: str,
    layer: str,
    axis: str,
    scale: str,
    smoothing: float,
    at: str | None,
) -> View:
    """The view after a control was moved; choices pass through the address so that only valid ones survive."""
    given = f"?tab={tab}&order={order}&rows={rows}&axis={axis}&scale={scale}&smoothing={smoothing or 0}"
    picked = read_address("/", given)
    named = None if layer in {None, WHOLE_MODEL} else layer
    try:
        moved = on_axis(before, picked.axis, reader)
    except CollageError:
        moved = replace(before, axis=picked.axis, zoom=None)
    return replace(
        moved,
        tab=picked.tab,
        order=picked.order,
        rows=picked.rows,
        scale=picked.scale,
        smoothing=picked.smoothing,
        metric=None if metric in {None, DEFAULT_METRIC} else metric,
        layer=named,
        step=before.step if named == before.layer else None,
        at=read_steps(at) if read_steps(at) or not (at or "").strip() else before.at,
    )


def _picked(before: View, first: int | None, last: int | None = None) -> View:
    """The view that says what changed at a step, or from the first to the last."""
    return before if first is None else replace(before, at=(first, first if last is None else max(first, last)))


def _steps_shown(view: View, reader: Reader) -> Steps:
    try:
        return steps_within(view, reader)
    except CollageError:
        return None, None


def _step_of(place: Any, view: View, reader: Reader) -> int | None:
    """The step at a place on the view's axis."""
    return int(place) if view.axis == "step" else _nearest(float(place), view, reader)


def _clicked(before: View, clicks: list[dict[str, Any] | None], reader: Reader) -> View:
    """The view of the layer and step behind a clicked cell."""
    point = next((click["points"][0] for click in clicks if click and click.get("points")), None)
    if point is None:
        return before
    return replace(before, layer=str(point["y"]), step=_step_of(point["x"], before, reader))


def _nearest(place: float, view: View, reader: Reader) -> int | None:
    try:
        return step_at(place, view, reader)
    except CollageError:
        return None


def _panel(view: View, record: str) -> Any:
    """A tab's frame needs no question: it can be looked for while the server is away."""
    return panel(view, run_of(record))
