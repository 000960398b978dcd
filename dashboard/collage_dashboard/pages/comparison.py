"""The comparison: three numbers for each run, curves of several strategies, and the table behind them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import dash
import dash_mantine_components as dmc
import plotly.graph_objects as go
from dash import ClientsideFunction, Input, Output, State, dcc, html, no_update

from collage_dashboard.components import (
    LIVE_MILLISECONDS,
    axis_control,
    chart_card,
    chart_note,
    limits_note,
    notice,
    pace,
    problem_page,
    smoothing_control,
)
from collage_dashboard.descriptions import describe, metric_choices
from collage_dashboard.figures import NamedCurve, curves
from collage_dashboard.figures.style import empty_figure
from collage_dashboard.identities import identify
from collage_dashboard.pages.comparison_content import lacks_throughput, numbers, table, verdicts, with_throughput
from collage_dashboard.reader import Problem, Reader, explain
from collage_dashboard.view import MAXIMUM_RUNS, View, read_address, write_address
from collage_monitor import wire
from collage_monitor.errors import CollageError, NotAuthorised, ServerRefusal

__all__ = ["CHARTS", "DEFAULT_METRIC", "figure", "layout", "register"]

CHARTS: Final = ("edq_ratio", "lost_update_ratio", "validation_loss")
"""The curves that always stand there; a fourth one is the reader's choice."""
DEFAULT_METRIC: Final = "state_decrement_ratio/exp_avg_sq"
_PICKABLE: Final = 500
_NOTHING_PICKED: Final = Problem(
    "Pick runs to compare", "Tick two or more runs in the table of runs, then press Compare."
)


def layout(view: View, reader: Reader) -> html.Div:
    """The page's frame: what to pick from comes from the server, the numbers with the first refresh.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    if not view.runs:
        return problem_page(_NOTHING_PICKED)
    page = reader.ask(lambda client: client.runs(limit=_PICKABLE))
    known = {run.run_id: run for run in page.runs}
    for missing in [run_id for run_id in view.runs if run_id not in known]:
        known[missing] = reader.ask(lambda client, run_id=missing: client.run(run_id))  # type: ignore[misc]
    search = write_address(view)[1]
    return html.Div(
        [
            dcc.Location(id="compare-address", refresh=False),
            dcc.Store(id="compare-shown", data=search),
            dcc.Store(id="compare-figures"),
            dcc.Interval(id="compare-tick", interval=LIVE_MILLISECONDS),
            html.Div([dcc.Link("Runs", href="/"), " / Comparison"], className="crumbs"),
            html.Div(_picker(view, list(known.values())), className="toolbar"),
            html.Div(id="compare-alert"),
            html.Div(id="compare-numbers"),
            html.Div(id="compare-verdicts"),
            html.Div(
                [axis_control("compare-axis", view), smoothing_control("compare-smoothing", view)],
                className="controls",
            ),
            html.Div(_charts(view, [known[run_id] for run_id in view.runs]), className="charts"),
            html.Div(id="compare-table"),
            limits_note(),
        ],
    )


def figure(comparison: wire.Comparison, smoothing: float) -> go.Figure:
    """The curves of one comparison under the names and colours that the runs have everywhere on the page."""
    lines = [
        NamedCurve(identity.label, identity.colour, run.series, identity.dash)
        for identity, run in zip(identify(comparison.runs), comparison.runs, strict=True)
    ]
    return curves(comparison.metric, lines, smoothing=smoothing)


def register(app: dash.Dash, reader: Reader) -> None:
    """Bind address, controls and refresh to the application."""
    _register_navigation(app)
    charts = [f"compare-chart-{place}" for place in range(len(CHARTS) + 1)]
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("collage", "keepZoom"),
        *(Output(name, "figure") for name in charts),
        Input("compare-figures", "data"),
        *(State(name, "figure") for name in charts),
        prevent_initial_call=True,
    )

    @app.callback(
        Output("compare-alert", "children"),
        Output("compare-numbers", "children"),
        Output("compare-verdicts", "children"),
        Output("compare-table", "children"),
        Output("compare-figures", "data"),
        Output("compare-tick", "disabled"),
        Output("compare-tick", "interval"),
        Input("compare-shown", "data"),
        Input("compare-tick", "n_intervals"),
    )
    def refresh(search: str | None, _ticks: int | None) -> tuple[Any, ...]:
        view, start = read_address("/compare", search), time.monotonic()
        try:
            answers = _ask(reader, view)
            runs = _measured(reader, view, answers)
        except CollageError as error:
            return (notice(explain(error)), *[no_update] * 4, False, LIVE_MILLISECONDS)
        figures = [
            figure(answer, view.smoothing) if isinstance(answer, wire.Comparison) else empty_figure(str(answer))
            for answer in answers.values()
        ]
        live = any(run.state == "running" for run in runs)
        wait = pace(time.monotonic() - start)
        return (None, numbers(runs), verdicts(runs), table(runs), figures, not live, wait)


def _register_navigation(app: dash.Dash) -> None:
    @app.callback(
        Output("compare-address", "search"),
        Output("compare-shown", "data"),
        Output("compare-runs", "value"),
        Output("compare-axis", "value"),
        Output("compare-smoothing", "value"),
        Output("compare-metric", "value"),
        Input("compare-address", "search"),
        Input("compare-runs", "value"),
        Input("compare-axis", "value"),
        Input("compare-smoothing", "value"),
        Input("compare-metric", "value"),
        State("compare-address", "pathname"),
        State("compare-shown", "data"),
        prevent_initial_call=True,
    )
    def navigate(
        search: str | None,
        runs: list[str] | None,
        axis: str,
        smoothing: float,
        metric: str | None,
        pathname: str | None,
        shown: str,
    ) -> tuple[Any, ...]:
        if pathname != "/compare":
            raise dash.exceptions.PreventUpdate
        if dash.ctx.triggered_id == "compare-address":
            view = read_address(pathname, search)
        else:
            chosen = read_address(pathname, f"?axis={axis}")
            view = replace(
                read_address(pathname, shown),
                runs=tuple(runs or ())[:MAXIMUM_RUNS],
                axis=chosen.axis,
                smoothing=smoothing or 0.0,
                metric=None if metric == DEFAULT_METRIC else metric,
            )
        wanted = write_address(view)[1]
        if not view.runs:
            view, wanted = read_address(pathname, shown), shown
        elif wanted == shown:
            raise dash.exceptions.PreventUpdate
        return wanted, wanted, list(view.runs), view.axis, view.smoothing, view.metric or DEFAULT_METRIC


def _ask(reader: Reader, view: View) -> Mapping[str, wire.Comparison | ServerRefusal]:
    """An answer for each chart, the first one always; a refused metric spoils no other chart."""
    answers: dict[str, wire.Comparison | ServerRefusal] = {}
    for place, metric in enumerate((*CHARTS, view.metric or DEFAULT_METRIC)):
        try:
            answers[f"{place} {metric}"] = reader.ask(
                lambda client, metric=metric: client.compare(view.runs, metric, axis=view.axis)  # type: ignore[misc]
            )
        except ServerRefusal as error:
            if place == 0 or isinstance(error, NotAuthorised):
                raise
            answers[f"{place} {metric}"] = error
    return answers


def _measured(
    reader: Reader, view: View, answers: Mapping[str, wire.Comparison | ServerRefusal]
) -> Sequence[wire.ComparedRun]:
    """The compared runs, with a throughput for those that log only their tokens."""
    runs = next(answer for answer in answers.values() if isinstance(answer, wire.Comparison)).runs
    if not lacks_throughput(runs):
        return runs
    return with_throughput(runs, reader.ask(lambda client: client.compare(view.runs, "tokens", axis="time")))


def _picker(view: View, runs: Sequence[wire.Run]) -> list[Any]:
    choices = [
        {"value": run.run_id, "label": identity.label}
        for run, identity in zip(runs, identify([_RunNames(run) for run in runs]), strict=True)
    ]
    return [
        dmc.Title("Comparison", order=2),
        dmc.MultiSelect(
            id="compare-runs",
            data=choices,
            value=list(view.runs),
            searchable=True,
            maxValues=MAXIMUM_RUNS,
            limit=100,
            placeholder="add a run",
            className="spring",
            **{"aria-label": "Runs"},
        ),
    ]


def _charts(view: View, runs: Sequence[wire.Run]) -> list[Any]:
    strategies = [run.watch.strategy if run.watch else None for run in runs]
    cards = [
        chart_card(key, f"compare-chart-{place}", note=chart_note(key, strategies))
        for place, key in enumerate(CHARTS)
    ]
    metrics = {key for run in runs for key in run.latest} | {DEFAULT_METRIC}
    scalars = {key for run in runs for key in run.scalars}
    chosen = view.metric or DEFAULT_METRIC
    if describe(chosen).scalar:
        scalars |= {chosen}
    select = dmc.Select(
        id="compare-metric",
        data=metric_choices(metrics | {chosen}, scalars),
        value=chosen,
        searchable=True,
        allowDeselect=False,
        size="xs",
        maw=320,
        **{"aria-label": "Metric"},
    )
    return [*cards, chart_card(chosen, f"compare-chart-{len(CHARTS)}", header=select)]


class _RunNames:
    """A run under the four fields that name it."""

    def __init__(self, run: wire.Run) -> None:
        self.run_id, self.name = run.run_id, run.name
        self.strategy = (run.watch.strategy or run.watch.observed_strategy) if run.watch else None
        self.dtype = run.watch.dtype if run.watch else None
