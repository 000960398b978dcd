"""The strategies of a comparison: the recommendation and its reasons, a row per strategy, and the counterfactuals.

`comparison.py` and the HTML report call it. Numbers are `collage_monitor.strategy_results`', the advice
`collage_monitor.recommendation`'s: nothing is judged here (`tests/dashboard/test_strategies.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, dcc, html, no_update

from collage_dashboard.components import (
    card,
    judgement_sign,
    menu,
    notice,
    run_label,
    save_buttons,
    select,
    share_links,
    verdict_line,
)
from collage_dashboard.descriptions import describe, state_key
from collage_dashboard.figures import tradeoff
from collage_dashboard.figures.style import GRAPH_CONFIG, empty_figure
from collage_dashboard.run_styles import LineStyle, styles_of, told_apart
from collage_dashboard.server_reader import Reader, explain
from collage_dashboard.tables import Cell, Column, cell_content, column_cells, column_heads, wide_table
from collage_dashboard.view import View
from collage_monitor import wire
from collage_monitor.errors import CollageError
from collage_monitor.metrics import split_key
from collage_monitor.number_text import UNDEFINED, number, share_text, value_text
from collage_monitor.recommendation import Recommendation, signed, worth
from collage_monitor.seeds import Estimate
from collage_monitor.strategy_results import StrategyResult, differences

__all__ = [
    "ABOUT_COUNTERFACTUALS",
    "about_strategies",
    "STRATEGY_COLUMNS",
    "advice",
    "cost_card",
    "counterfactual_table",
    "pair_of",
    "pair_question",
    "register_treat",
    "strategy_styles",
    "strategy_table",
]

_COUNTERFACTUAL: Final = "counterfactual_edq_ratio"
_NOISE: Final = "counterfactual_variance_ratio"
_METHODS: Final = {
    "plain/bf16": "Plain, bf16",
    "light/bf16": "Pair of bf16",
    "stochastic/bf16": "Stochastic rounding, bf16",
    "plain/fp8": "Plain, fp8",
}


def strategy_styles(results: Sequence[StrategyResult]) -> list[LineStyle]:
    """How each strategy looks where one line stands for all of its runs."""
    return told_apart((_labelled(result), result.strategy, result.dtype) for result in results)


def advice(found: Recommendation, view: View, results: Sequence[StrategyResult]) -> Any:
    """The recommendation in a sentence, with a line about each strategy behind it; all of it also as a file.

    Where configurations keep runs apart, a button treats them as one; where people have done so, one takes it back.
    """
    sentence = verdict_line("healthy" if found.chosen else "unknown", found.brief or found.text)
    why = menu(
        "Why",
        *([html.P(found.text, className="reasons")] if found.brief else []),
        html.Ul([html.Li(reason) for reason in found.reasons], className="reasons"),
    )
    return html.Div(
        [
            html.Div([sentence, html.Div(why, className="actions")], className="answer"),
            html.Div([*_treat(results), *share_links(view.runs, view.left_out)], className="crumbs"),
        ]
    )


def pair_question(view: View, results: Sequence[StrategyResult]) -> Any:
    """Two strategies to compare, and the result of their losses; empty with fewer than two."""
    if len(results) < 2:
        return None
    one, other = pair_of(view, results)
    titles = [result.title for result in results]
    selects = [
        select(
            {"type": "compare-pair", "index": place},
            f"Strategy {'AB'[place]}",
            titles,
            chosen.title,
            allowDeselect=False,
            w=200,
        )
        for place, chosen in enumerate((one, other))
    ]
    said = html.Span(worth(one, other), id="compare-worth", role="status")
    return html.Div([selects[0], html.Span("against"), selects[1], said], className="pair")


def pair_of(view: View, results: Sequence[StrategyResult]) -> tuple[StrategyResult, StrategyResult]:
    """The two strategies of the view; else the smallest, and the next that takes more bytes."""
    named = {result.title: result for result in results}
    chosen = [named[title] for title in view.pair if title in named]
    rest = [result for result in results if result not in chosen]
    first, second = [*chosen, *rest][:2]
    return first, second


def _treat(results: Sequence[StrategyResult]) -> list[Any]:
    treated = any(run.is_treated for result in results for run in result.runs)
    if not treated and not differences(results) and not any(result.apart for result in results):
        return []
    said = "Tell them apart by configuration again" if treated else "Treat these runs as one configuration"
    return [html.Button(said, id="compare-treat", className="textual"), " · "]


def strategy_table(results: Sequence[StrategyResult]) -> dmc.Paper:
    """One row per strategy, costs first; numbers are means over its runs."""
    heads = ["Strategy", "Verdict", *column_heads(STRATEGY_COLUMNS)]
    rows = [
        [run_label(style), _health(result), *column_cells(STRATEGY_COLUMNS, result)]
        for result, style in zip(results, strategy_styles(results), strict=True)
    ]
    return wide_table(heads, rows, "Strategies", about_strategies(results), texts=(1,))


def about_strategies(results: Sequence[StrategyResult]) -> str:
    """What the numbers of strategies are means of, and over which steps."""
    return (
        "Means over a strategy's runs, ± the standard deviation of one; below the gap its 95 % interval. "
        "Runs of one strategy are its seeds where project and configuration agree but for the seed. "
        "EDQ, updates lost and state decrement: each run's recent past. " + _where_losses_stand(results)
    )


def counterfactual_table(runs: Sequence[wire.ComparedRun]) -> Any:
    """How much other strategies would have kept of each run's own steps; None where no run measured it."""
    measured = [run for run in runs if any(split_key(key)[0] == _COUNTERFACTUAL for key in run.merged)]
    if not measured:
        return None
    named = "What other storage would have kept"
    title = html.H2(named, className="card-title", title=describe(_COUNTERFACTUAL).help)
    methods = [method for method in _METHODS if any(_kept(run, method) is not None for run in measured)]
    rows = [
        [
            run_label(style),
            *(cell_content(_counterfactual_cell(run, method)) for method in methods),
            value_text(_PREDICTED, run.merged.get(_PREDICTED)),
        ]
        for run, style in zip(runs, styles_of(runs), strict=True)
        if run in measured
    ]
    heads = ["Run", *(_METHODS[method] for method in methods), describe(_PREDICTED).title]
    return wide_table(heads, rows, named, ABOUT_COUNTERFACTUALS, title=title)


_PREDICTED: Final = "predicted_plain_lost_ratio"
ABOUT_COUNTERFACTUALS: Final = (
    "The EDQ of other ways to keep the weights, on the run's own updates, at about one step in a hundred. So an "
    "fp32 run tells if it needs its fp32 weights. Optimizer states and Kahan's compensation are not in it. "
    "Stochastic rounding keeps 1 in the mean; below it stands its noise, in units of the update's square. "
    "The last column is the share of updates below half a gap. All of it is over the whole run."
)


def _kept(run: wire.ComparedRun, method: str) -> wire.Number | None:
    return run.merged.get(f"{_COUNTERFACTUAL}/{method}")


def _counterfactual_cell(run: wire.ComparedRun, method: str) -> Cell:
    noise = run.merged.get(f"{_NOISE}/{method}")
    return value_text(_COUNTERFACTUAL, _kept(run, method)), f"noise {number(noise, 3)}" if noise is not None else ""


def _labelled(result: StrategyResult) -> str:
    return f"{result.title} ({len(result.runs)} runs)" if len(result.runs) > 1 else result.title


def _health(result: StrategyResult) -> list[Any]:
    apart = result.set_apart
    said = f"{len(apart)} of {len(result.runs)} not counted: {'; '.join(run.why_odd for run in apart)}"
    small = [html.Div(said, className="detail")] if apart else []
    return [judgement_sign(result.health), result.health, *small]


def _where_losses_stand(results: Sequence[StrategyResult]) -> str:
    steps = {run.loss_step for result in results for run in result.runs if run.loss_step is not None}
    names = {run.loss_name for result in results for run in result.runs}
    if len(steps) != 1 or len(names) != 1:
        return ""
    how = "validation losses" if names == {"validation_loss"} else "training losses, means of the last tenth,"
    return f"Losses are the {how} at step {steps.pop():,}."


def _mean(found: Estimate | None, key: str) -> Cell:
    if found is None:
        return UNDEFINED, ""
    told, spread = value_text(key, found.value), found.spread or 0.0
    if all(value_text(key, found.value + by) == told for by in (-spread, spread)):
        return told, ""
    return told, f"± {share_text(spread) if describe(key).unit == 'share' else number(spread, 2)}"


def _gap(result: StrategyResult) -> Cell:
    if result.is_reference:
        return "reference", ""
    gap = result.gap
    if gap is None:
        return UNDEFINED, ""
    if gap.low is None or gap.high is None:
        return signed(gap.value), ""
    return signed(gap.value), f"{signed(gap.low)} … {signed(gap.high)}{', paired' if gap.paired else ''}"


def _loss(result: StrategyResult) -> Cell:
    """Beside a gap, which may be of pairs of seeds, the mean over all seeds would say something else."""
    return _mean(result.loss, "loss") if result.gap is None else (UNDEFINED, "")


def _over(metric: str) -> Callable[[StrategyResult], Cell]:
    return lambda result: _mean(result.over_runs(metric), metric)


def _state(result: StrategyResult) -> Cell:
    key = state_key(key for run in result.runs for key in run.numbers)
    return _mean(result.over_runs(key), key)


STRATEGY_COLUMNS: Final = (
    Column(
        "Bytes per parameter",
        describe("bytes_per_parameter").help,
        lambda result: _mean(result.bytes_per_parameter, "bytes_per_parameter"),
    ),
    Column(
        "Tokens/s",
        "The newest that the training loops logged.",
        lambda result: _mean(result.tokens_per_second, "tokens_per_second"),
    ),
    Column("Loss gap", "The loss minus the reference's, at a step that all runs have reached.", _gap),
    Column("Loss", "Validation loss if all runs log one, otherwise training loss.", _loss),
    Column("EDQ", describe("edq_ratio").help, _over("edq_ratio")),
    Column("Updates lost", describe("lost_update_ratio").help, _over("lost_update_ratio")),
    Column("State decrement", describe("state_decrement_ratio/exp_avg_sq").help, _state),
)


def cost_card(results: Sequence[StrategyResult], found: Recommendation) -> dmc.Paper:
    """The card of that picture. The curves tell what is missing in it."""
    title = "Loss against bytes per parameter"
    named: dict[str, Any] = {"aria-label": title, "role": "region", "tabIndex": "0"}
    drawn = tradeoff(results, chosen=found.chosen)
    graph = dcc.Graph(id="compare-cost", figure=drawn if drawn.data else empty_figure(""), config=GRAPH_CONFIG)
    return card(
        title,
        html.Div(graph, className="figure-place cost-place", **named),
        save_buttons(title),
        kind="chart-card",
    )


def register_treat(app: dash.Dash, reader: Reader) -> None:
    """Bind the button by which people count runs as configured alike."""

    @app.callback(
        Output("compare-treated", "data"),
        Output("compare-alert", "children", allow_duplicate=True),
        Input("compare-treat", "n_clicks"),
        State("compare-rows", "data"),
        prevent_initial_call=True,
    )
    def treat_as_one(clicks: int | None, kept: str) -> tuple[Any, Any]:
        """All runs count as configured like the first, or each by its own configuration again."""
        if not clicks:
            raise dash.exceptions.PreventUpdate
        rows = wire.decode_message(kept.encode(), list[wire.RunRow], wire.JSON)
        treated = any(row.is_treated for row in rows)
        update = wire.RunUpdate(configuration="" if treated else rows[0].configuration)
        try:
            reader.ask(lambda client: [client.update_run(row.run_id, update) for row in rows])
        except CollageError as error:
            return no_update, notice(explain(error))
        return time.time(), no_update
