"""One run: three numbers and a verdict first; layers, curves, norms, states, classes and the oracle behind tabs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

import dash
import dash_mantine_components as dmc
from dash import ALL, ClientsideFunction, Input, Output, State, dcc, html, no_update

from collage_dashboard.components import (
    LIVE_MILLISECONDS,
    axis_control,
    labelled,
    limits_note,
    notice,
    pace,
    smoothing_control,
)
from collage_dashboard.descriptions import metric_choices
from collage_dashboard.figures.heatmap import short_layer
from collage_dashboard.pages.run_content import DEFAULT_METRIC, TABS, draw, head, layer_metrics, panel, summary
from collage_dashboard.reader import Reader, explain
from collage_dashboard.view import View, read_address, write_address
from collage_monitor import wire
from collage_monitor.errors import CollageError
from collage_monitor.evidence import read_evidence

__all__ = ["layout", "register"]

WHOLE_MODEL: Final = "whole model"
_FIGURES: Final = {"type": "run-figure", "kind": ALL, "metric": ALL}
_CONTROL_GROUPS: Final = ("run-map-controls", "run-curve-controls", "run-smoothing-controls")
_CONTROLS: Final = ("run-tab", "run-metric", "run-order", "run-layer", "run-axis", "run-smoothing")


def layout(view: View, reader: Reader) -> html.Div:
    """The page's frame, with the tab of the view; figures come with the first refresh.

    Raises:
        CollageError: the server does not answer, or there is no such run.
    """
    run_id = view.runs[0]
    run = reader.ask(lambda client: client.run(run_id))
    layers = reader.ask(lambda client: client.layers(run_id)).layers
    pathname, search = write_address(view)
    tabs = dmc.Tabs(
        dmc.TabsList([dmc.TabsTab(title, value=name) for name, title in TABS.items()]),
        id="run-tab",
        value=view.tab,
        mt="lg",
    )
    return html.Div(
        [
            dcc.Location(id="run-address", refresh=False),
            dcc.Store(id="run-shown", data={"pathname": pathname, "search": search}),
            dcc.Store(id="run-figures"),
            dcc.Interval(id="run-tick", interval=LIVE_MILLISECONDS),
            html.Div([dcc.Link("Runs", href="/"), " / ", run.project], className="crumbs"),
            html.Div(head(run), id="run-head"),
            html.Div(id="run-alert"),
            html.Div(id="run-summary"),
            tabs,
            _controls(view, run, list(dict.fromkeys(layer.name for layer in layers))),
            html.Div(panel(view, run), id="run-panel"),
            limits_note(),
        ]
    )


def register(app: dash.Dash, reader: Reader) -> None:
    """Bind address, controls and refresh to the application."""
    _register_navigation(app, reader)
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("collage", "keepZoomByName"),
        Output(_FIGURES, "figure"),
        Input("run-figures", "data"),
        State(_FIGURES, "figure"),
        State(_FIGURES, "id"),
        prevent_initial_call=True,
    )

    @app.callback(
        Output("run-alert", "children"),
        Output("run-head", "children"),
        Output("run-summary", "children"),
        Output("run-tick", "disabled"),
        Input("run-shown", "data"),
        Input("run-tick", "n_intervals"),
    )
    def refresh(shown: dict[str, str], _ticks: int | None) -> tuple[Any, ...]:
        run_id = read_address(shown["pathname"], "").runs[0]
        try:
            run = reader.ask(lambda client: client.run(run_id))
            compared = reader.ask(lambda client: client.compare([run_id], "edq_ratio", points=2)).runs[0]
            evidence = reader.ask(lambda client: read_evidence(client, run_id))
        except CollageError as error:
            return notice(explain(error)), no_update, no_update, False
        return None, head(run), summary(run, compared, evidence), run.state != "running"

    @app.callback(
        Output("run-figures", "data"),
        Output("run-tick", "interval"),
        Input("run-shown", "data"),
        Input("run-tick", "n_intervals"),
        State(_FIGURES, "id"),
    )
    def redraw(shown: dict[str, str], _ticks: int | None, wanted: list[dict[str, str]]) -> tuple[Any, ...]:
        view, start = read_address(shown["pathname"], shown["search"]), time.monotonic()
        try:
            figures = {
                f"{entry['kind']} {entry['metric']}": draw(entry["kind"], entry["metric"], view, reader)
                for entry in wanted
            }
        except CollageError:
            return no_update, LIVE_MILLISECONDS
        return figures, pace(time.monotonic() - start)


def _register_navigation(app: dash.Dash, reader: Reader) -> None:
    @app.callback(
        Output("run-address", "search"),
        Output("run-shown", "data"),
        Output("run-panel", "children"),
        *(Output(name, "style") for name in _CONTROL_GROUPS),
        *(Output(name, "value") for name in _CONTROLS),
        Input("run-address", "search"),
        *(Input(name, "value") for name in _CONTROLS),
        Input({"type": "run-figure", "kind": "heatmap", "metric": ALL}, "clickData"),
        State("run-address", "pathname"),
        State("run-shown", "data"),
        prevent_initial_call=True,
    )
    def navigate(search: str | None, *rest: Any) -> tuple[Any, ...]:
        *controls, clicks, pathname, shown = rest
        before = read_address(shown["pathname"], shown["search"])
        if pathname != shown["pathname"]:
            raise dash.exceptions.PreventUpdate
        trigger = dash.ctx.triggered_id
        if trigger == "run-address":
            view = read_address(pathname, search)
        elif isinstance(trigger, str):
            view = _chosen(before, *controls)
        else:
            view = _clicked(before, clicks)
        wanted = write_address(view)[1]
        if view == before:
            raise dash.exceptions.PreventUpdate
        children = no_update if (view.tab, view.metric) == (before.tab, before.metric) else _panel(view, reader)
        return (
            wanted,
            {"pathname": pathname, "search": wanted},
            children,
            *_group_styles(view),
            view.tab,
            view.metric or DEFAULT_METRIC,
            view.order,
            view.layer or WHOLE_MODEL,
            view.axis,
            view.smoothing,
        )


def _chosen(before: View, tab: str, metric: str, order: str, layer: str, axis: str, smoothing: float) -> View:
    """The view after a control was moved; choices pass through the address so that only valid ones survive."""
    picked = read_address("/", f"?tab={tab}&order={order}&axis={axis}&smoothing={smoothing or 0}")
    named = None if layer in {None, WHOLE_MODEL} else layer
    return replace(
        before,
        tab=picked.tab,
        order=picked.order,
        axis=picked.axis,
        smoothing=picked.smoothing,
        metric=None if metric in {None, DEFAULT_METRIC} else metric,
        layer=named,
        step=before.step if named == before.layer else None,
    )


def _clicked(before: View, clicks: list[dict[str, Any] | None]) -> View:
    """The view of the layer and step behind a clicked cell."""
    point = next((click["points"][0] for click in clicks if click and click.get("points")), None)
    if point is None:
        return before
    return replace(before, layer=str(point["y"]), step=int(point["x"]))


def _panel(view: View, reader: Reader) -> Any:
    try:
        return panel(view, reader.ask(lambda client: client.run(view.runs[0])))
    except CollageError as error:
        return notice(explain(error))


def _controls(view: View, run: wire.Run, layers: list[str]) -> html.Div:
    layer = dmc.Select(
        id="run-layer",
        data=[{"value": WHOLE_MODEL, "label": "Whole model"}]
        + [{"value": name, "label": short_layer(name)} for name in layers],
        value=view.layer if view.layer in layers else WHOLE_MODEL,
        searchable=True,
        allowDeselect=False,
        limit=200,
        size="xs",
        w=300,
    )
    metric = dmc.Select(
        id="run-metric",
        data=metric_choices(layer_metrics(run)),
        value=view.metric or DEFAULT_METRIC,
        searchable=True,
        allowDeselect=False,
        size="xs",
        w=260,
    )
    order = dmc.SegmentedControl(
        id="run-order",
        data=[{"value": "depth", "label": "By depth"}, {"value": "worst", "label": "Worst first"}],
        value=view.order,
        size="xs",
    )
    groups = (
        [labelled("Heatmap of", metric), labelled("Layers", order)],
        [labelled("Curves of", layer), axis_control("run-axis", view)],
        [smoothing_control("run-smoothing", view)],
    )
    return html.Div(
        [
            html.Div(group, id=name, style=style)
            for name, group, style in zip(_CONTROL_GROUPS, groups, _group_styles(view), strict=True)
        ],
        className="controls",
    )


def _group_styles(view: View) -> list[dict[str, str]]:
    """Only the controls that change something on the view's tab are shown."""
    useful = (view.tab == "layers", view.tab != "about", view.tab == "curves")
    return [{"display": "flex", "gap": "16px"} if shown else {"display": "none"} for shown in useful]
