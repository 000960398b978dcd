"""The curves of a comparison: one question for all of them, and a figure a metric, a line a run or a strategy.

Where a run logs no throughput, the curve of its tokens over time gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import plotly.graph_objects as go

from collage_dashboard.components import chart_card, chart_note, segments, select
from collage_dashboard.descriptions import describe, metric_choices
from collage_dashboard.figures import NamedCurve, curves
from collage_dashboard.figures.style import empty_figure
from collage_dashboard.number_downloads import numbers_address
from collage_dashboard.pages.comparison_content import curve_of
from collage_dashboard.pages.strategies_content import strategy_styles
from collage_dashboard.run_styles import styles_of
from collage_dashboard.server_reader import Reader, ask_each
from collage_dashboard.view import Lines, Scale, View
from collage_dashboard.zoom import POINTS
from collage_monitor import wire
from collage_monitor.diagnosis import finite
from collage_monitor.metrics import METRICS
from collage_monitor.seeds import curve_over_seeds
from collage_monitor.strategy_results import StrategyResult, loss_name

__all__ = [
    "CHARTS",
    "DEFAULT_METRIC",
    "LOSS",
    "chart_cards",
    "charted_metrics",
    "draw_curves",
    "figure",
    "lacks_throughput",
    "lines_control",
    "lines_of",
    "read_curves",
    "runs_with_throughput",
    "throughput_of",
    "with_throughput",
]

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
        return curves(chosen, means, smoothing=smoothing, legend=False, scale=scale)
    lines = [
        NamedCurve(style.label, style.colour, curve_of(run, chosen), style.dash)
        for style, run in zip(styles_of(comparison.runs), comparison.runs, strict=True)
    ]
    return curves(chosen, lines, smoothing=smoothing, legend=False, scale=scale)


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
    own = [curve_of(runs[run.run_id], metric) for run in result.counted if run.run_id in runs]
    return own[0] if len(own) == 1 else curve_over_seeds(own)


def runs_with_throughput(reader: Reader, found: wire.Comparison | str) -> Sequence[wire.ComparedRun] | None:
    """The compared runs, with a throughput for those that log only their tokens; None where they were refused."""
    if isinstance(found, str):
        return None
    if not lacks_throughput(found.runs):
        return found.runs
    there = [run.run_id for run in found.runs]
    return with_throughput(
        found.runs, reader.ask(lambda client: client.compare(there, "tokens", axis="time", points=2))
    )


def lacks_throughput(runs: Sequence[wire.ComparedRun]) -> bool:
    """Whether some run logs `tokens` but no `tokens_per_second`."""
    return any(_THROUGHPUT not in run.mean_scalars and "tokens" in run.scalars for run in runs)


def with_throughput(runs: Sequence[wire.ComparedRun], tokens: wire.Comparison) -> list[wire.ComparedRun]:
    """The runs with their throughput filled in where it was not logged; `tokens` compares `tokens` over time."""
    rates = {run.run_id: throughput_of(run.series) for run in tokens.runs}
    return [
        run
        if _THROUGHPUT in run.mean_scalars or (known := rates.get(run.run_id)) is None
        else msgspec.structs.replace(run, mean_scalars={**run.mean_scalars, _THROUGHPUT: known})
        for run in runs
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
