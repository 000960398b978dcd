"""One self-contained HTML file about a run, or about several side by side: nothing in it is loaded from elsewhere.

It has the same figures, cells and sentences as the pages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from flask import Flask, Response, request
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from collage_dashboard.components import over_steps
from collage_dashboard.descriptions import STATE, count, describe, interval, share_text, state_key, value_text, when
from collage_dashboard.figures.style import GRAPH_CONFIG, strategy_colour
from collage_dashboard.number_downloads import file_stem
from collage_dashboard.pages.comparison_content import COLUMNS, notes_on, with_recent
from collage_dashboard.pages.comparison_curves import (
    DEFAULT_METRIC,
    LOSS,
    charted_metrics,
    draw_curves,
    lines_of,
    read_curves,
    runs_with_throughput,
)
from collage_dashboard.pages.run_about import facts_of
from collage_dashboard.pages.run_content import draw
from collage_dashboard.pages.run_marks import Story
from collage_dashboard.pages.strategies_content import (
    ABOUT_COUNTERFACTUALS,
    COSTS,
    STRATEGY_COLUMNS,
    about_strategies,
    cost_figures,
    counterfactual_cells,
    strategy_styles,
)
from collage_dashboard.run_styles import LineStyle, strategy_title, styles_of
from collage_dashboard.server_reader import Reader, explain
from collage_dashboard.view import View, comparison_of, read_address
from collage_monitor import __version__, wire
from collage_monitor.errors import CollageError, NotFound
from collage_monitor.forecast import ForecastError
from collage_monitor.judgement import CAVEATS
from collage_monitor.metrics import split_key
from collage_monitor.recommendation import recommendation
from collage_monitor.run_evidence import read_forecast
from collage_monitor.schedule import RateSchedule
from collage_monitor.strategy_results import StrategyResult, results_by_strategy, run_results

__all__ = ["file_name", "install_report", "report"]

_MEASURED = ("edq_ratio", "lost_update_ratio")
_LOGGED = ("validation_loss", "loss", "learning_rate")
Cell = tuple[str, str]


@dataclass(frozen=True)
class Chart:
    """A chart under its title."""

    title: str
    html: Markup
    wide: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a table: its name, and (value, smaller line) of each column."""

    name: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Section:
    """A section of the report. Without `heads` its table is a list of facts; `is_short`: each a small number."""

    title: str
    charts: Sequence[Chart] = ()
    rows: Sequence[Row] = ()
    heads: Sequence[str] = ()
    styles: Sequence[LineStyle] = ()
    note: str = ""
    is_short: bool = False


def report(
    reader: Reader, run_ids: Sequence[str], left_out: int = 0, *, schedule: RateSchedule | None = None
) -> str:
    """The report on one run, or the comparison of several, as HTML of about 5 MB, most of it Plotly.

    It holds at most the first `MAXIMUM_RUNS` and says how many are left out; left_out: how many runs the caller has
    already left out.
    schedule: of the learning rate; its effect on one run is forecast.

    Raises:
        CollageError: the server does not answer or refuses, there is no such run, or none is named.
    """
    view = comparison_of(run_ids)
    chosen, left_out = list(view.runs), view.left_out + left_out
    if not chosen:
        raise CollageError("no run is named; `collage-monitor list` shows the ids of those that are there")
    # The table of runs holds what was evaluated before; this evaluates what is new.
    reader.ask_together(*(lambda client, run_id=run_id: client.overview(run_id) for run_id in chosen))
    if len(chosen) == 1:
        return _about_run(reader, chosen[0], schedule)
    return _about_strategies(reader, chosen, left_out)


def file_name(names: Sequence[str]) -> str:
    """A name for the report's file, whatever the runs are called."""
    return f"{file_stem(names)}.html"


def install_report(server: Flask, reader: Reader) -> None:
    """`/report?run=…`: the report on these runs, as a file to keep."""

    @server.get("/report")
    def send() -> Response:
        view = read_address("/compare", request.query_string.decode())
        run_ids = view.runs
        try:
            names = [_name(reader, run_id) for run_id in run_ids]
            text = report(reader, run_ids, view.left_out)
        except CollageError as error:
            problem = explain(error)
            status = 404 if isinstance(error, NotFound) or not run_ids else 502
            return Response(f"{problem.title}: {problem.text}\n", status, mimetype="text/plain")
        answer = Response(text, mimetype="text/html")
        answer.headers["Content-Disposition"] = f'attachment; filename="{file_name(names)}"'
        return answer


def _name(reader: Reader, run_id: str) -> str:
    return reader.ask(lambda client: client.run(run_id).name)


def _about_run(reader: Reader, run_id: str, schedule: RateSchedule | None) -> str:
    run, overview = reader.ask_together(lambda client: client.run(run_id), lambda client: client.overview(run_id))
    view = View(page="run", runs=(run_id,))
    watch = run.watch
    strategy = watch.shown_strategy if watch else None
    story = Story(strategy_colour(strategy, watch.dtype if watch else None))
    step = "no step yet" if run.last_step is None else f"step {count(run.last_step)}"
    curves = [key for key in _LOGGED if key in run.scalars]
    curves += [*_MEASURED, *sorted(key for key in run.latest if split_key(key)[0] == STATE)]
    charts = [_chart(describe(key).title, draw("series", key, view, reader, story), key) for key in curves]
    charts.append(_chart("Update size against the grid", draw("histogram", "", view, reader), "histogram"))
    charts.append(_chart("EDQ of each layer", draw("heatmap", "edq_ratio", view, reader), "heatmap", wide=True))
    sections = [
        Section(
            "Numbers",
            rows=_numbers(run, overview),
            note=f"{over_steps(overview).capitalize()}, with 95 % intervals.",
            is_short=True,
        ),
        Section("Curves", charts=charts),
    ]
    if overview.worst:
        sections.append(
            Section(
                "Layers that lose the most",
                rows=[*map(_worst, overview.worst)],
                heads=_WORST_HEADS,
                note=_WORST_NOTE,
            )
        )
    if schedule is not None:
        sections.append(_forecast(reader, run_id, schedule))
    written = [("Tags", ", ".join(run.tags)), ("Notes", run.notes)]
    facts = [entry for entry in written if entry[1]] + facts_of(run)
    sections.append(Section("About the run", rows=[Row(name, [(text, "")]) for name, text in facts]))
    kept = strategy_title(strategy, watch.dtype) if watch else "not watched"
    subtitle = f"{run.project} · {kept} · {run.state}, {step} · updated {when(run.updated_at)}"
    return _rendered(
        run.name, subtitle, overview.headline, [*filter(None, [overview.verdict, overview.advice])], sections
    )


_WORST_HEADS = ("Layer", "Share of the lost energy", "EDQ", "Updates lost")
_WORST_NOTE = "Lost energy: Σu² − Σue, over the same steps as the numbers."


def _forecast(reader: Reader, run_id: str, schedule: RateSchedule) -> Section:
    try:
        found = reader.ask(lambda client: read_forecast(client, run_id, schedule))
    except ForecastError as error:
        return Section("Forecast", rows=[Row("Not known", [(str(error), "")])])
    rows = [Row(strategy_title(own.strategy, None), [(own.text, "")]) for own in found.strategies]
    return Section("Forecast", rows=rows, note=found.assumes)


def _numbers(run: wire.Run, overview: wire.Overview) -> list[Row]:
    keys = (*_MEASURED, state_key(overview.numbers), "edq_oracle_ratio", "half_ulp_margin")
    rows = [
        Row(
            describe(key).title,
            [
                (
                    value_text(key, value),
                    interval(key, overview.numbers.get(f"{key}_low"), overview.numbers.get(f"{key}_high")),
                )
            ],
        )
        for key in keys
        if (value := overview.numbers.get(key)) is not None
    ]
    logged = ("validation_loss", "loss", "bytes_per_parameter", "tokens_per_second")
    return rows + [
        Row(describe(key).title, [(value_text(key, entry.value), f"at step {entry.step:,}")])
        for key in logged
        if (entry := run.scalars.get(key)) is not None
    ]


def _worst(entry: wire.LayerLoss) -> Row:
    measured = [value_text(key, getattr(entry, key)) for key in _MEASURED]
    return Row(entry.layer, [(text, "") for text in (share_text(entry.share), *measured)])


def _about_strategies(reader: Reader, run_ids: Sequence[str], left_out: int) -> str:
    found = reader.ask(lambda client: client.run_table(run_ids=run_ids, limit=len(run_ids), differing=True)).rows
    by_id = {row.run_id: row for row in found}
    rows = [by_id[run_id] for run_id in run_ids]
    view = View(page="compare", runs=tuple(run_ids))
    metrics = (*charted_metrics(rows), DEFAULT_METRIC)
    answers = read_curves(reader, view, rows, metrics)
    runs = runs_with_throughput(reader, answers[metrics[LOSS]]) or ()
    results = results_by_strategy(run_results(rows, runs))
    by_run = lines_of(view, rows) == "run"
    styles = styles_of(runs) if by_run else strategy_styles(results)
    curves = [
        _chart(describe(key).title, draw_curves(answers[key], key, view, () if by_run else results), key)
        for key in metrics
    ]
    said = recommendation(results, left_out)
    overviews = {row.run_id: row.overview for row in rows if row.overview}
    recent = with_recent(runs, overviews)
    costs = [
        _chart(f"Loss against {describe(cost).title.lower()}", figure, cost)
        for cost, figure in zip(COSTS, cost_figures(results, said), strict=True)
    ]
    sections = [
        Section(
            "Strategies",
            charts=costs,
            rows=[_strategy(result) for result in results],
            heads=("Strategy", "Verdict", *(column.title for column in STRATEGY_COLUMNS)),
            note=about_strategies(results),
        ),
        Section("Curves", charts=curves, styles=styles),
        Section("Runs", rows=_runs(recent, overviews), heads=_RUN_HEADS, note=notes_on(recent)),
    ]
    heads, cells = counterfactual_cells(runs)
    if cells:
        kept = [Row(style.label, own) for style, own in cells]
        sections.append(
            Section("The same steps, kept otherwise", rows=kept, heads=heads, note=ABOUT_COUNTERFACTUALS)
        )
    subtitle = f"{len(rows)} runs of {', '.join(dict.fromkeys(row.project for row in rows))}"
    return _rendered("Strategies", subtitle, said.text, said.reasons, sections)


_RUN_HEADS = ("Run", "Strategy", "What is said of it", *(column.title for column in COLUMNS))


def _strategy(result: StrategyResult) -> Row:
    runs = len(result.runs)
    name = f"{result.title} ({runs} runs)" if runs > 1 else result.title
    return Row(name, [(result.health, ""), *(column.cell(result) for column in STRATEGY_COLUMNS)])


def _runs(runs: Sequence[wire.ComparedRun], overviews: dict[str, wire.Overview]) -> list[Row]:
    return [
        Row(
            style.label,
            [
                (strategy_title(run.strategy, run.dtype), ""),
                (overviews[run.run_id].headline if run.run_id in overviews else "Not evaluated yet.", ""),
                *(column.cell(run) for column in COLUMNS),
            ],
        )
        for style, run in zip(styles_of(runs), runs, strict=True)
    ]


def _chart(title: str, figure: go.Figure, key: str, *, wide: bool = False) -> Chart:
    identifier = re.sub(r"[^a-z0-9]+", "-", key.lower())
    drawn = to_html(
        figure,
        include_plotlyjs=False,
        full_html=False,
        config={**GRAPH_CONFIG, "responsive": True},
        div_id=f"chart-{identifier}",
        default_height=f"{figure.layout.height}px",
    )
    return Chart(title, Markup(drawn), wide)


def _rendered(title: str, subtitle: str, answer: str, reasons: Iterable[str], sections: Sequence[Section]) -> str:
    pages = Environment(
        loader=PackageLoader("collage_dashboard", "templates"), autoescape=True, undefined=StrictUndefined
    )
    return pages.get_template("report.html").render(
        title=title,
        subtitle=subtitle,
        answer=answer,
        reasons=[reason for reason in reasons if reason and reason != answer],
        sections=sections,
        plotly=Markup(get_plotlyjs()),
        limits=CAVEATS,
        written=when(time.time()),
        version=__version__,
    )
