"""The comparison in numbers and curves: the table of runs, with their verdicts from the stored overviews, and a
figure a metric from one question for all of them, a line a run or a strategy.

`comparison.py` and the HTML report call it (`tests/dashboard/test_pages.py`). Where a run logs no throughput, the
curve of its tokens over time gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import dash_mantine_components as dmc
import msgspec
import plotly.graph_objects as go
from dash import html

from collage_dashboard.components import (
    chart_card,
    chart_note,
    judgement_sign,
    over_steps,
    run_label,
    segments,
    select,
)
from collage_dashboard.descriptions import describe, interval, metric_choices, state_key
from collage_dashboard.figures import NamedCurve, curves
from collage_dashboard.figures.series import series_of
from collage_dashboard.figures.style import empty_figure
from collage_dashboard.number_downloads import numbers_address
from collage_dashboard.pages.strategies_content import strategy_styles
from collage_dashboard.run_styles import LineStyle, strategy_title, styles_of
from collage_dashboard.server_reader import Reader, ask_each
from collage_dashboard.tables import Cell, Column, column_cells, column_heads, wide_table
from collage_dashboard.view import Lines, Scale, View, run_address
from collage_dashboard.zoom import POINTS
from collage_monitor import wire
from collage_monitor.diagnosis import finite
from collage_monitor.metrics import METRICS
from collage_monitor.number_text import count, number, value_text
from collage_monitor.seeds import curve_over_seeds
from collage_monitor.strategy_results import StrategyResult, loss_name

__all__ = [
    "CHARTS",
    "COLUMNS",
    "DEFAULT_METRIC",
    "LOSS",
    "RECENT",
    "chart_cards",
    "charted_metrics",
    "comparison_table",
    "draw_curves",
    "figure",
    "legend",
    "lines_control",
    "lines_of",
    "read_curves",
    "runs_with_throughput",
    "throughput_of",
]

Overviews = Mapping[str, wire.Overview]
RECENT: Final = "Last 32 measured steps or more, or those since the last change, on which the verdict rests."


def legend(styles: Sequence[LineStyle]) -> list[Any]:
    """One legend for all charts; the page's scripts let a press hide a line, or with Shift all others."""
    told = "Press to hide or show; with Shift, or twice, to see it alone"
    entries = []
    for style in styles:
        named: dict[str, Any] = {"data-line": style.label, "aria-pressed": "true"}
        entries.append(html.Button(run_label(style), type="button", title=told, className="line", **named))
    return entries


def comparison_table(runs: Sequence[wire.ComparedRun], overviews: Overviews) -> dmc.Paper:
    """Everything that the runs are compared by; measured numbers are those of the recent past, which their verdicts
    quote."""
    runs = [
        msgspec.structs.replace(run, merged=found.numbers) if (found := overviews.get(run.run_id)) else run
        for run in runs
    ]
    heads = ["Run", "Verdict", "Strategy", "Over", *column_heads(COLUMNS)]
    rows = [
        [
            run_label(style, run_address(run.run_id)),
            _verdict(overviews.get(run.run_id)),
            strategy_title(run.strategy, run.dtype),
            over_steps(overviews.get(run.run_id)).removeprefix("over "),
            *column_cells(COLUMNS, run),
        ]
        for run, style in zip(runs, styles_of(runs), strict=True)
    ]
    return wide_table(heads, rows, "Compared numbers", _about(runs), texts=(1, 2, 3))


def _verdict(overview: wire.Overview | None) -> html.Span:
    """What is wrong with a run, in a few words; the sentence on hover."""
    if overview is None:
        return html.Span("not evaluated yet")
    return html.Span([judgement_sign(overview.health), overview.short], title=overview.headline)


def _measured(numbers: Mapping[str, wire.Number | None], key: str) -> Cell:
    return value_text(key, numbers.get(key)), interval(key, numbers.get(f"{key}_low"), numbers.get(f"{key}_high"))


def _merged(key: str) -> Callable[[wire.ComparedRun], Cell]:
    return lambda run: _measured(run.merged, key)


def _scalar(name: str) -> Callable[[wire.ComparedRun], Cell]:
    def cell(run: wire.ComparedRun) -> Cell:
        logged = run.scalars.get(name)
        return (value_text(name, logged.value), f"step {logged.step:,}") if logged else (number(None), "")

    return cell


def _rate(run: wire.ComparedRun) -> Cell:
    """The newest throughput that was logged, as the table of runs and the strategies have it; else that of tokens
    over time."""
    logged = run.scalars.get("tokens_per_second")
    value = logged.value if logged is not None else run.mean_scalars.get("tokens_per_second")
    return value_text("tokens_per_second", value), ""


def _state(run: wire.ComparedRun) -> Cell:
    key = state_key(run.merged)
    return value_text(key, run.merged.get(key)), key.partition("/")[2] if run.merged.get(key) is not None else ""


def _steps(run: wire.ComparedRun) -> Cell:
    return count(run.last_step), "" if run.state == "finished" else run.state


def _about(runs: Sequence[wire.ComparedRun]) -> str:
    """What the numbers are over, and what must not be read into them."""
    caution = chart_note("lost_update_ratio", [run.strategy for run in runs])
    return f"{RECENT} Small print is the 95 % interval. {caution}".rstrip()


def _column(title: str, key: str, cell: Callable[[wire.ComparedRun], Cell]) -> Column:
    return Column(title, describe(key).help, cell)


COLUMNS: Final = (
    Column("Steps", "The newest reported step.", _steps),
    _column("Validation loss", "validation_loss", _scalar("validation_loss")),
    Column("Training loss", "The newest logged value.", _scalar("loss")),
    _column("EDQ", "edq_ratio", _merged("edq_ratio")),
    _column("Oracle EDQ", "edq_oracle_ratio", _merged("edq_oracle_ratio")),
    _column("State decrement", "state_decrement_ratio/exp_avg_sq", _state),
    _column("Updates lost", "lost_update_ratio", _merged("lost_update_ratio")),
    _column("Bytes per parameter", "bytes_per_parameter", lambda run: (_scalar("bytes_per_parameter")(run)[0], "")),
    Column("Tokens/s", "The newest logged, otherwise tokens divided by the run's wall-clock time.", _rate),
)


CHARTS: Final = ("edq_ratio", "lost_update_ratio", "validation_loss")
"""The curves that always stand there; a fourth one is the reader's choice."""
LOSS: Final = 2
"""The place of the loss among them: the training loss where not every run logs a validation loss."""
DEFAULT_METRIC: Final = "state_decrement_ratio/exp_avg_sq"
_TOLD_APART: Final = 20
_THROUGHPUT: Final = "tokens_per_second"


def figure(
    comparison: wire.Comparison,
    smoothing: float,
    metric: str | None = None,
    *,
    results: Sequence[StrategyResult] = (),
    scale: Scale = "linear",
) -> go.Figure:
    """The curves of a comparison under the names and colours that the runs have everywhere on the page.

    `metric`: one of those that were compared; None: the first of them. With `results` a strategy has one curve, the
    mean over its runs.
    """
    chosen = metric or comparison.metric
    if results:
        by_id = {run.run_id: run for run in comparison.runs}
        means = [
            NamedCurve(style.label, style.colour, _mean_curve(result, by_id, chosen))
            for style, result in zip(strategy_styles(results), results, strict=True)
        ]
        return curves(chosen, means, smoothing=smoothing, scale=scale)
    lines = [
        NamedCurve(style.label, style.colour, series_of(run.series, chosen), style.dash)
        for style, run in zip(styles_of(comparison.runs), comparison.runs, strict=True)
    ]
    return curves(chosen, lines, smoothing=smoothing, scale=scale)


def lines_of(view: View, rows: Sequence[wire.RunRow]) -> Lines:
    """The meaning of a curve: a strategy if its runs have seeds of their own, unless the reader chose.

    Also for more than `_TOLD_APART` runs, whose curves would look alike.
    """
    if view.lines is not None:
        return view.lines
    if len(rows) > _TOLD_APART:
        return "strategy"
    seeds: dict[tuple[str | None, ...], list[int | None]] = {}
    for row in rows:
        kind = row.shown_strategy, row.dtype, row.configuration or row.project
        seeds.setdefault(kind, []).append(row.seed)
    several = any(len(own) > 1 and None not in own and len(set(own)) == len(own) for own in seeds.values())
    return "strategy" if several else "run"


def lines_control(view: View, rows: Sequence[wire.RunRow]) -> Any:
    """The choice of what a curve represents."""
    titles = {"run": "A run", "strategy": "Mean of a strategy"}
    return segments("compare-lines", "A curve is", titles, lines_of(view, rows))


def chart_cards(view: View, rows: Sequence[wire.RunRow]) -> list[Any]:
    """The cards of the charts, the reader's choice last."""
    strategies = [row.shown_strategy for row in rows]
    cards = [
        chart_card(
            key,
            f"compare-chart-{place}",
            note=chart_note(key, strategies),
            title="Loss" if place == LOSS and key != CHARTS[LOSS] else "",
            has_keys=place == 0,
        )
        for place, key in enumerate(charted_metrics(rows))
    ]
    measured = {key for row in rows if row.overview for key in row.overview.numbers}
    metrics = measured | {name for name, entry in METRICS.items() if not entry.label} | {DEFAULT_METRIC}
    scalars = {key for row in rows for key in row.scalars} | {"learning_rate", "loss"}
    chosen = view.metric or DEFAULT_METRIC
    if describe(chosen).scalar:
        scalars |= {chosen}
    offered = metric_choices(metrics | {chosen}, scalars)
    header = select("compare-metric", "Metric", offered, chosen, searchable=True, allowDeselect=False, maw=320)
    return [*cards, chart_card(chosen, f"compare-chart-{len(CHARTS)}", header=header)]


def charted_metrics(rows: Sequence[wire.RunRow]) -> tuple[str, ...]:
    """`CHARTS`, with the loss that these runs are compared by."""
    return (*CHARTS[:LOSS], loss_name(rows)) if rows else CHARTS


def read_curves(
    reader: Reader, view: View, rows: Sequence[wire.RunRow], metrics: Sequence[str]
) -> dict[str, wire.Comparison | str]:
    """The comparison that holds each metric, from one request; or the reason if the server refuses it.

    The part that a view's zoom shows, which is a range of steps.
    """
    first, last = map(int, view.zoom) if view.zoom else (None, None)
    there = [row.run_id for row in rows]
    if not there:
        return dict.fromkeys(metrics, "none of these runs is there")
    return ask_each(
        metrics,
        lambda some: reader.ask(
            lambda client: client.compare(
                there, some, axis=view.axis, points=POINTS, first_step=first, last_step=last
            )
        ),
    )


def draw_curves(
    found: wire.Comparison | str, metric: str, view: View, results: Sequence[StrategyResult] = ()
) -> go.Figure:
    """The figure of a metric, or why the server refused it; with `results` a curve is a strategy's mean."""
    if isinstance(found, str):
        return empty_figure(found)
    drawn = figure(found, view.smoothing, metric, results=results, scale=view.scale)
    ends = (int(view.zoom[0]), int(view.zoom[1])) if view.zoom and view.axis == "step" else (None, None)
    return drawn.update_layout(meta={"numbers": numbers_address(view, (metric,), ends)})


def _mean_curve(result: StrategyResult, runs: Mapping[str, wire.ComparedRun], metric: str) -> wire.Series:
    own = [series_of(runs[run.run_id].series, metric) for run in result.counted if run.run_id in runs]
    return own[0] if len(own) == 1 else curve_over_seeds(own)


def runs_with_throughput(reader: Reader, found: wire.Comparison | str) -> Sequence[wire.ComparedRun] | None:
    """The compared runs, with a throughput for those that log only their tokens; None where they were refused."""
    if isinstance(found, str):
        return None
    silent = [run.run_id for run in found.runs if "tokens" in run.scalars and _THROUGHPUT not in run.mean_scalars]
    if not silent:
        return found.runs
    tokens = reader.ask(lambda client: client.compare(silent, "tokens", axis="time", points=2))
    rates = {
        run.run_id: {_THROUGHPUT: rate} for run in tokens.runs if (rate := throughput_of(run.series)) is not None
    }
    return [
        msgspec.structs.replace(run, mean_scalars={**run.mean_scalars, **rates.get(run.run_id, {})})
        for run in found.runs
    ]


def throughput_of(series: wire.Series) -> float | None:
    """Tokens per second of wall clock between the first and the last point; None with fewer than two."""
    points = [
        (seconds, tokens)
        for position, value in zip(series.positions, series.values, strict=True)
        if (seconds := finite(position)) is not None and (tokens := finite(value)) is not None
    ]
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
