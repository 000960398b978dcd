"""The strategies: the recommendation, each strategy's cost and loss, and the curves behind.

The first screen comes from the server's stored overviews. All curves and the tables come from one request, and
existing ones are not requested again; if runs are at unequal steps, that request gives the losses.

It fetches and answers callbacks; content is `comparison_content.py`'s and `strategies_content.py`'s. Links hold its
address, so that is fixed in `view.py` (`tests/dashboard/test_pages.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import dash
import dash_mantine_components as dmc
import msgspec
from dash import ALL, Input, Output, State, dcc, html, no_update

from collage_dashboard.components import (
    LIVE_MILLISECONDS,
    curve_controls,
    embed_note,
    menu,
    notice,
    page,
    refresh_marker,
    refresh_milliseconds,
)
from collage_dashboard.figures import tradeoff
from collage_dashboard.figures.growth import answer_for
from collage_dashboard.figures.style import digest
from collage_dashboard.navigation import (
    Choice,
    choices,
    choices_data,
    clientside,
    or_later,
    register_choices,
    view_of,
    view_stores,
)
from collage_dashboard.number_downloads import frame_of, pandas_note
from collage_dashboard.pages.comparison_content import (
    CHARTS,
    DEFAULT_METRIC,
    LOSS,
    chart_cards,
    charted_metrics,
    comparison_table,
    draw_curves,
    legend,
    lines_control,
    lines_of,
    read_curves,
    runs_with_throughput,
)
from collage_dashboard.pages.strategies_content import (
    advice,
    cost_card,
    counterfactual_table,
    pair_of,
    pair_question,
    register_treat,
    strategy_styles,
    strategy_table,
)
from collage_dashboard.run_styles import styles_of
from collage_dashboard.server_reader import Reader, explain
from collage_dashboard.view import View, write_address
from collage_dashboard.zoom import with_zoom
from collage_monitor import wire
from collage_monitor.errors import CollageError
from collage_monitor.recommendation import recommendation, worth
from collage_monitor.strategy_results import StrategyResult, results_by_strategy, run_results

__all__ = ["CHARTS", "DEFAULT_METRIC", "layout", "register"]

_PARTS: Final = {"page": "This comparison", "curves": "Its curves"}
"""What of the page another one can show."""
_ANSWERED: Final = ("table", "advice", "strategies", "counterfactuals", "pair")
"""What of the page the curves tell, in the order of `_tables_and_answer`."""
Results = Sequence[StrategyResult]


def layout(view: View, reader: Reader) -> html.Div:
    """The page's frame: the choices come from the server, the numbers with the first refresh.

    Raises:
        CollageError: the server does not answer or refuses.
    """
    rows = _rows(reader, view.runs)
    results = results_by_strategy(run_results(rows))
    said = recommendation(results, view.left_out)
    return page(
        [
            *view_stores(view, "compare", _choices(view, rows)),
            dcc.Store(id="compare-revision", data=_revision(view, rows)),
            dcc.Store(id="compare-rows", data=_rows_to_json(rows)),
            refresh_marker("compare-pace", refresh_milliseconds(rows, 0.0)),
            *(dcc.Store(id=f"compare-answer-{place}") for place in range(len(CHARTS) + 1)),
            dcc.Store(id="compare-drawn", data=[]),
            dcc.Store(id="compare-treated"),
            dmc.Title("Strategies", order=1, size="h5", className="part-title"),
            html.Div(_missing(view, rows), id="compare-alert"),
            html.Div(advice(said, _shown(view, rows), results), id="compare-advice"),
            html.Div(strategy_table(results), id="compare-strategies"),
            html.Div(
                [
                    html.Div(_legend(view, rows), id="compare-legend", className="legend"),
                    menu(
                        "Axes",
                        lines_control(view, rows),
                        *curve_controls("compare", view),
                    ),
                ],
                className="tabs-line",
            ),
            html.Div(chart_cards(view, rows), className="charts"),
            cost_card(results, said),
            html.Div(pair_question(view, results), id="compare-pair"),
            html.Div(id="compare-counterfactuals"),
            html.Div(id="compare-table"),
            pandas_note(reader, frame_of([row.run_id for row in rows])),
            embed_note("".join(write_address(view)), _PARTS),
        ],
        f"Comparison of {len(view.runs)} {'run' if len(view.runs) == 1 else 'runs'}",
    )


def register(app: dash.Dash, reader: Reader) -> None:
    """Bind address, controls and refresh to the application."""
    register_choices(app, "compare", _choices(View(), ()))
    register_treat(app, reader)
    _register_pair(app, reader)
    _register_charts(app, reader)

    @app.callback(
        Output("compare-revision", "data"),
        Output("compare-rows", "data"),
        Output("compare-choices", "data"),
        Output("compare-alert", "children"),
        Output("compare-pace", "children"),
        Output("compare-legend", "children"),
        Input("tick", "data"),
        Input("compare-shown", "data"),
        Input("compare-treated", "data"),
        State("compare-revision", "data"),
        prevent_initial_call=True,
    )
    def check_for_changes(
        _tick: int | None, shown: dict[str, Any], _treated: int | None, known: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Whether anything changed: one light question, however many charts there are."""
        view, start = view_of(shown), time.monotonic()
        try:
            rows = _rows(reader, view.runs)
        except CollageError as error:
            failed = {**known, "failed": True}
            return failed, no_update, no_update, notice(explain(error)), str(LIVE_MILLISECONDS), no_update
        found = _revision(view, rows)
        if found == known:
            raise dash.exceptions.PreventUpdate
        wait = str(refresh_milliseconds(rows, time.monotonic() - start))
        kept = choices_data("compare", _choices(view, rows))
        return found, _rows_to_json(rows), kept, _missing(view, rows), wait, _legend(view, rows)


def _register_charts(app: dash.Dash, reader: Reader) -> None:
    """All charts and the table from one request, only for metrics that are not loaded yet."""
    places = range(len(CHARTS) + 1)

    @app.callback(
        Output("compare-drawn", "data"),
        *(Output(f"compare-{name}", "children") for name in _ANSWERED),
        Output("compare-cost", "figure"),
        *(Output(f"compare-answer-{place}", "data") for place in places),
        Input("compare-shown", "data"),
        Input("compare-revision", "data"),
        State("compare-rows", "data"),
        State("compare-drawn", "data"),
    )
    def draw(shown: dict[str, Any], revision: dict[str, Any], kept: str, drawn: list[list[Any]]) -> tuple[Any, ...]:
        view = view_of(shown)
        if revision["failed"]:
            raise dash.exceptions.PreventUpdate
        rows = _rows_from_json(kept)
        metrics = (*charted_metrics(rows), view.metric or DEFAULT_METRIC)
        whole = replace(view, zoom=None, pair=())
        # Over tokens or time each run has its own steps between two places: there a zoom moves what was read.
        read = replace(view, pair=()) if view.axis == "step" else whole
        asking = [*(replace(read, metric=metric) for metric in metrics), replace(whole, metric=metrics[LOSS])]
        wanted = [f"{revision['at']} {write_address(one)[1]}" for one in asking]
        before = drawn or [["", ""]] * len(wanted)
        asked = [place for place in places if before[place][0] != wanted[place]]
        if not asked:
            raise dash.exceptions.PreventUpdate
        with or_later():
            found = read_curves(reader, read, rows, [metrics[place] for place in asked])
            runs = None
            if before[-1][0] != wanted[-1]:
                of_all = found if read.zoom is None else read_curves(reader, whole, rows, [metrics[LOSS]])
                runs = runs_with_throughput(reader, of_all[metrics[LOSS]])
        results = results_by_strategy(run_results(rows, runs or ()))
        told = [no_update] * (len(_ANSWERED) + 1) if runs is None else _tables_and_answer(view, rows, runs, results)
        means = results if lines_of(view, rows) == "strategy" else ()
        now = [*before[:-1], [wanted[-1], ""]]
        answers: list[Any] = [no_update] * len(places)
        for place in asked:
            figure = with_zoom(draw_curves(found[metrics[place]], metrics[place], view, means), view)
            answer, figure_told = answer_for(figure, before[place][1])
            now[place] = [wanted[place], figure_told]
            if figure_told != before[place][1]:
                answers[place] = answer
        return now, *told, *answers

    for place in places:
        clientside(
            app,
            "collage.keepZoom",
            Output(f"compare-chart-{place}", "figure"),
            Input(f"compare-answer-{place}", "data"),
            State(f"compare-chart-{place}", "figure"),
        )

    clientside(app, "collage.showZoom", Input("compare-shown", "data"))
    clientside(app, "collage.shareHover", *(Input(f"compare-chart-{place}", "hoverData") for place in places))


def _register_pair(app: dash.Dash, reader: Reader) -> None:
    @app.callback(
        Output("compare-worth", "children"),
        Output("compare-address", "search"),
        Input({"type": "compare-pair", "index": ALL}, "value"),
        State("compare-rows", "data"),
        State("compare-shown", "data"),
        prevent_initial_call=True,
    )
    def hold_against(pair: list[str], kept: str, shown: dict[str, Any]) -> tuple[Any, Any]:
        """The two strategies that were chosen, by their losses at a step that all runs have reached."""
        before, rows = view_of(shown), _rows_from_json(kept)
        known = results_by_strategy(run_results(rows))
        # The page has just set this value: the reader did not choose it.
        if len(known) < 2 or [one.title for one in pair_of(before, known)] == pair:
            raise dash.exceptions.PreventUpdate
        if len(set(pair)) < 2:
            return "Choose two different strategies.", no_update
        view = replace(before, pair=tuple(pair), zoom=None)
        metric = charted_metrics(rows)[LOSS]
        with or_later():
            runs = runs_with_throughput(reader, read_curves(reader, view, rows, [metric])[metric])
        results = results_by_strategy(run_results(rows, runs or ()))
        wanted = write_address(replace(before, pair=tuple(pair)))[1]
        return worth(*pair_of(view, results)), no_update if wanted == shown["search"] else wanted


def _choices(view: View, rows: Sequence[wire.RunRow]) -> dict[str, Choice]:
    """The page's controls; what a curve is depends on the runs."""
    return choices(
        "scale",
        "smoothing",
        lines=Choice("lines", lines_of(replace(view, lines=None), rows)),
        axis=Choice("axis", drops=("from", "to")),
        metric=Choice("metric", DEFAULT_METRIC),
    )


def _rows(reader: Reader, run_ids: Sequence[str]) -> list[wire.RunRow]:
    """The rows of those of the runs that are there, in the order given."""
    found = {
        row.run_id: row
        for row in reader.ask(lambda client: client.run_table(run_ids=run_ids, limit=500, differing=True)).rows
    }
    return [found[run_id] for run_id in run_ids if run_id in found]


def _revision(view: View, rows: Sequence[wire.RunRow]) -> dict[str, Any]:
    """A revision that changes whenever shown data of these runs may have changed; and the deleted runs."""
    there = {row.run_id for row in rows}
    seen = [
        f"{row.run_id} {row.updated_at} {row.changed_at} {row.reports} {row.state} {row.overview}" for row in rows
    ]
    return {
        "at": digest(seen),
        "failed": False,
        "lines": lines_of(view, rows),
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


def _shown(view: View, rows: Sequence[wire.RunRow]) -> View:
    return replace(view, runs=tuple(row.run_id for row in rows))


def _legend(view: View, rows: Sequence[wire.RunRow]) -> Any:
    """The lines of all charts: of runs, or of strategies."""
    if lines_of(view, rows) == "run":
        return legend(styles_of([msgspec.structs.replace(row, strategy=row.shown_strategy) for row in rows]))
    return legend(strategy_styles(results_by_strategy(run_results(rows))))


def _overviews(rows: Sequence[wire.RunRow]) -> dict[str, wire.Overview]:
    return {row.run_id: row.overview for row in rows if row.overview}


def _rows_to_json(rows: Sequence[wire.RunRow]) -> str:
    return wire.encode_json(rows).decode()


def _rows_from_json(kept: str) -> list[wire.RunRow]:
    return wire.decode_message(kept.encode(), list[wire.RunRow], wire.JSON)


def _tables_and_answer(
    view: View, rows: Sequence[wire.RunRow], runs: Sequence[wire.ComparedRun], results: Results
) -> tuple[Any, ...]:
    """The tables and the answer, now that the curves are there."""
    said = recommendation(results, view.left_out)
    return (
        comparison_table(runs, _overviews(rows)),
        advice(said, _shown(view, rows), results),
        strategy_table(results),
        counterfactual_table(runs),
        pair_question(view, results),
        tradeoff(results, chosen=said.chosen),
    )
