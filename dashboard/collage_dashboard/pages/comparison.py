"""The comparison: numbers and a sentence for each run, curves of several strategies, and the table behind them.

Numbers and sentences are what the server keeps of each run: the page opens with them. All curves and the table come
from one question, and what is there already is not asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
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
    pace_marker,
    page,
    problem_page,
    smoothing_control,
    wait_of,
)
from collage_dashboard.descriptions import describe, metric_choices
from collage_dashboard.figures import NamedCurve, curves
from collage_dashboard.figures.style import digest, empty_figure
from collage_dashboard.identities import identify
from collage_dashboard.pages.comparison_content import (
    lacks_throughput,
    legend,
    numbers,
    table,
    verdicts,
    with_throughput,
)
from collage_dashboard.reader import Problem, Reader, explain
from collage_dashboard.view import MAXIMUM_RUNS, View, read_address, write_address
from collage_monitor import wire
from collage_monitor.errors import CollageError, NotAuthorised, ServerRefusal
from collage_monitor.metrics import METRICS

__all__ = ["CHARTS", "DEFAULT_METRIC", "figure", "layout", "register"]

CHARTS: Final = ("edq_ratio", "lost_update_ratio", "validation_loss")
"""The curves that always stand there; a fourth one is the reader's choice."""
DEFAULT_METRIC: Final = "state_decrement_ratio/exp_avg_sq"
_PICKABLE: Final = 50
POINTS: Final = 300
"""Of a curve: as many as half a screen shows."""
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
    rows = _rows(reader, view.runs)
    search = write_address(view)[1]
    shown_numbers, shown_verdicts, shown_legend = _said(rows)
    return page(
        [
            dcc.Location(id="compare-address", refresh=False),
            dcc.Store(id="compare-shown", data=search),
            dcc.Store(id="compare-revision", data=_revision(view, rows)),
            dcc.Store(id="compare-rows", data=_kept(rows)),
            pace_marker("compare-pace", wait_of(rows, 0.0)),
            *(dcc.Store(id=f"compare-answer-{place}") for place in range(len(CHARTS) + 1)),
            dcc.Store(id="compare-drawn", data=[]),
            html.Div([dcc.Link("Runs", href="/"), " / Comparison"], className="crumbs"),
            html.Div(_picker(view, rows), className="toolbar"),
            html.Div(_missing(view, rows), id="compare-alert"),
            html.Div(shown_numbers, id="compare-numbers", className="numbers-place"),
            html.Div(shown_verdicts, id="compare-verdicts"),
            html.Div(
                [axis_control("compare-axis", view), smoothing_control("compare-smoothing", view)],
                className="controls",
            ),
            html.Div(shown_legend, id="compare-legend", className="legend"),
            html.Div(_charts(view, rows), className="charts"),
            html.Div(id="compare-table"),
            limits_note(),
        ],
        f"Comparison of {len(view.runs)} {'run' if len(view.runs) == 1 else 'runs'}",
    )


def figure(comparison: wire.Comparison, smoothing: float, metric: str | None = None) -> go.Figure:
    """The curves of a comparison under the names and colours that the runs have everywhere on the page.

    `metric`: one of those that were compared; None: the first of them.
    """
    chosen = metric or comparison.metric
    lines = [
        NamedCurve(identity.label, identity.colour, _series(run, chosen), identity.dash)
        for identity, run in zip(identify(comparison.runs), comparison.runs, strict=True)
    ]
    return curves(chosen, lines, smoothing=smoothing, legend=False)


def register(app: dash.Dash, reader: Reader) -> None:
    """Bind address, controls and refresh to the application."""
    _register_navigation(app)
    _register_search(app, reader)
    _register_charts(app, reader)

    @app.callback(
        Output("compare-revision", "data"),
        Output("compare-rows", "data"),
        Output("compare-alert", "children"),
        Output("compare-pace", "children"),
        Output("compare-numbers", "children"),
        Output("compare-verdicts", "children"),
        Output("compare-legend", "children"),
        Input("tick", "data"),
        Input("compare-shown", "data"),
        State("compare-revision", "data"),
        prevent_initial_call=True,
    )
    def look(_tick: int | None, search: str | None, known: dict[str, Any]) -> tuple[Any, ...]:
        """Whether anything changed: one light question, however many charts there are."""
        view, start = read_address("/compare", search), time.monotonic()
        try:
            rows = _rows(reader, view.runs)
        except CollageError as error:
            failed = {**known, "failed": True}
            return failed, no_update, notice(explain(error)), str(LIVE_MILLISECONDS), *[no_update] * 3
        found = _revision(view, rows)
        if found == known:
            raise dash.exceptions.PreventUpdate
        return found, _kept(rows), _missing(view, rows), str(wait_of(rows, time.monotonic() - start)), *_said(rows)


def _register_charts(app: dash.Dash, reader: Reader) -> None:
    """All charts and the table from one question, about those metrics alone that are not there yet."""
    places = range(len(CHARTS) + 1)

    @app.callback(
        Output("compare-drawn", "data"),
        Output("compare-table", "children"),
        *(Output(f"compare-answer-{place}", "data") for place in places),
        Input("compare-shown", "data"),
        Input("compare-revision", "data"),
        State("compare-rows", "data"),
        State("compare-drawn", "data"),
    )
    def draw(search: str | None, revision: dict[str, Any], kept: str, drawn: list[list[str]]) -> tuple[Any, ...]:
        view = read_address("/compare", search)
        if revision["failed"]:
            raise dash.exceptions.PreventUpdate
        rows = wire.decode_message(kept.encode(), list[wire.RunRow], wire.JSON)
        metrics = (*CHARTS, view.metric or DEFAULT_METRIC)
        wanted = [f"{revision['at']} {write_address(replace(view, metric=metric))[1]}" for metric in metrics]
        before = drawn or [["", ""]] * len(metrics)
        asked = [place for place in places if before[place][0] != wanted[place]]
        if not asked:
            raise dash.exceptions.PreventUpdate
        try:
            found = _compared(reader, view, rows, [metrics[place] for place in asked])
            shown = _table(reader, rows, found[metrics[0]]) if 0 in asked else no_update
        except CollageError:
            raise dash.exceptions.PreventUpdate from None  # The next look says what is wrong.
        figures = {place: _drawn(found[metrics[place]], metrics[place], view) for place in asked}
        now = [[wanted[place], digest(figures[place]) if place in asked else before[place][1]] for place in places]
        changed = [now[place][1] != before[place][1] for place in places]
        return now, shown, *(figures[place] if changed[place] else no_update for place in places)

    for place in places:
        app.clientside_callback(  # type: ignore[no-untyped-call]
            ClientsideFunction("collage", "keepZoom"),
            Output(f"compare-chart-{place}", "figure"),
            Input(f"compare-answer-{place}", "data"),
            State(f"compare-chart-{place}", "figure"),
            prevent_initial_call=True,
        )


def _register_search(app: dash.Dash, reader: Reader) -> None:
    @app.callback(
        Output("compare-runs", "data"),
        Input("compare-runs", "searchValue"),
        State("compare-runs", "data"),
        State("compare-runs", "value"),
        prevent_initial_call=True,
    )
    def search_for(word: str | None, known: list[dict[str, str]], chosen: list[str] | None) -> Any:
        """What to pick from is searched by the server, among all runs."""
        try:
            found = reader.ask(lambda client: client.run_table(q=word or None, limit=_PICKABLE)).rows
        except CollageError:
            raise dash.exceptions.PreventUpdate from None
        kept = [entry for entry in known if entry["value"] in (chosen or [])]
        there = {entry["value"] for entry in kept}
        return kept + [entry for entry in _choices(found) if entry["value"] not in there]


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


def _rows(reader: Reader, run_ids: Sequence[str]) -> list[wire.RunRow]:
    """The rows of those of the runs that are there, in the order given."""
    found = {
        row.run_id: row for row in reader.ask(lambda client: client.run_table(run_ids=run_ids, limit=500)).rows
    }
    return [found[run_id] for run_id in run_ids if run_id in found]


def _revision(view: View, rows: Sequence[wire.RunRow]) -> dict[str, Any]:
    """What changes whenever something that is shown of these runs may have changed; which of them are gone."""
    there = {row.run_id for row in rows}
    seen = [f"{row.run_id} {row.updated_at} {row.state} {row.overview and row.overview.last_step}" for row in rows]
    return {
        "at": sha256("\n".join(seen).encode()).hexdigest()[:16],
        "failed": False,
        "gone": [run_id for run_id in view.runs if run_id not in there],
    }


def _missing(view: View, rows: Sequence[wire.RunRow]) -> Any:
    """A line about the runs of the address that are not there; the others are compared."""
    gone = [run_id for run_id in view.runs if run_id not in {row.run_id for row in rows}]
    if not gone:
        return None
    text = f"{', '.join(gone)}: nothing is stored under this id; it may have been deleted. The others are compared."
    return dmc.Alert(
        text, title="A run is missing" if len(gone) == 1 else "Runs are missing", color="orange", mb="md"
    )


def _said(rows: Sequence[wire.RunRow]) -> tuple[Any, Any, Any]:
    """(numbers, verdicts, legend) of the runs, from what the server keeps of each."""
    if not rows:
        return None, None, None
    overviews = _overviews(rows)
    return numbers(rows, overviews), verdicts(rows, overviews), legend(rows)


def _overviews(rows: Sequence[wire.RunRow]) -> dict[str, wire.Overview]:
    return {row.run_id: row.overview for row in rows if row.overview}


def _kept(rows: Sequence[wire.RunRow]) -> str:
    return wire.encode_json(rows).decode()


def _compared(
    reader: Reader, view: View, rows: Sequence[wire.RunRow], metrics: Sequence[str]
) -> dict[str, wire.Comparison | str]:
    """By metric the comparison that holds it, from one question; in words why not, where the server refuses it."""
    there = [row.run_id for row in rows]
    if not there:
        return dict.fromkeys(metrics, "none of these runs is there")
    try:
        answer = reader.ask(lambda client: client.compare(there, metrics, axis=view.axis, points=POINTS))
    except NotAuthorised:
        raise
    except ServerRefusal as error:
        if len(metrics) == 1:
            return {metrics[0]: str(error)}
        # One that is refused shall not spoil the others.
        alone = [_compared(reader, view, rows, [metric]) for metric in metrics]
        return {metric: found for one in alone for metric, found in one.items()}
    return dict.fromkeys(metrics, answer)


def _drawn(found: wire.Comparison | str, metric: str, view: View) -> go.Figure:
    return empty_figure(found) if isinstance(found, str) else figure(found, view.smoothing, metric)


def _series(run: wire.ComparedRun, metric: str) -> wire.Series:
    return run.series if run.series.metric == metric else (run.series.more or {})[metric]


def _table(reader: Reader, rows: Sequence[wire.RunRow], found: wire.Comparison | str) -> Any:
    """The table, with a throughput for those runs that log only their tokens."""
    if isinstance(found, str):
        return None
    runs: Sequence[wire.ComparedRun] = found.runs
    if lacks_throughput(runs):
        there = [run.run_id for run in runs]
        runs = with_throughput(
            runs, reader.ask(lambda client: client.compare(there, "tokens", axis="time", points=2))
        )
    return table(runs, _overviews(rows))


def _picker(view: View, rows: Sequence[wire.RunRow]) -> list[Any]:
    return [
        dmc.Title("Comparison", order=1, size="h2"),
        dmc.MultiSelect(
            id="compare-runs",
            data=_choices(rows),
            value=[row.run_id for row in rows],
            searchable=True,
            clearSearchOnChange=True,
            maxValues=MAXIMUM_RUNS,
            limit=100,
            placeholder="add a run",
            className="spring",
            **{"aria-label": "Runs"},
        ),
    ]


def _choices(rows: Sequence[wire.RunRow]) -> list[dict[str, str]]:
    return [
        {"value": row.run_id, "label": identity.label}
        for row, identity in zip(rows, identify([_RunNames(row) for row in rows]), strict=True)
    ]


def _charts(view: View, rows: Sequence[wire.RunRow]) -> list[Any]:
    strategies = [row.strategy or row.observed_strategy for row in rows]
    cards = [
        chart_card(key, f"compare-chart-{place}", note=chart_note(key, strategies))
        for place, key in enumerate(CHARTS)
    ]
    measured = {key for row in rows if row.overview for key in row.overview.numbers}
    metrics = measured | {name for name, entry in METRICS.items() if not entry.label} | {DEFAULT_METRIC}
    scalars = {key for row in rows for key in row.scalars} | {"learning_rate", "loss"}
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

    def __init__(self, row: wire.RunRow) -> None:
        self.run_id, self.name, self.dtype = row.run_id, row.name, row.dtype
        self.strategy = row.strategy or row.observed_strategy
