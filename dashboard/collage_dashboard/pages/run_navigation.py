"""Where a reader of the run page is: the address, the controls and clicks make one view, and follow each other.

`run.py` registers it; what a view holds and how an address is written is `view.py`'s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import dash
from dash import ALL, Input, Output, State, no_update

from collage_dashboard.pages.before_after import shown_style
from collage_dashboard.pages.run_content import panel
from collage_dashboard.pages.run_curves import WHOLE_MODEL
from collage_dashboard.pages.run_layers import DEFAULT_METRIC, map_style, run_of
from collage_dashboard.server_reader import Reader
from collage_dashboard.view import View, read_address, read_steps, write_address, write_steps
from collage_dashboard.zoom import Steps, on_axis, step_at, steps_within, zoomed
from collage_monitor.errors import CollageError

__all__ = ["register_navigation"]

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


def register_navigation(app: dash.Dash, reader: Reader) -> None:
    """Bind the address and the controls to the application."""

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
        children = (
            no_update if (view.tab, view.metric) == (before.tab, before.metric) else _panel(view, reader, record)
        )
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


def _panel(view: View, reader: Reader, record: str) -> Any:
    """A tab's frame; while the server is away, by what the page knew of the run when it was opened."""
    try:
        return panel(view, reader.ask(lambda client: client.run(view.runs[0])))
    except CollageError:
        return panel(view, run_of(record))
