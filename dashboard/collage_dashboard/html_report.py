"""One self-contained HTML file about a run, or about several side by side: nothing in it is loaded from elsewhere.

It has the same figures, cells and sentences as the pages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from flask import Flask, Response, request
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from collage_dashboard.components import over_steps
from collage_dashboard.descriptions import describe, interval, state_key, when
from collage_dashboard.figures import tradeoff
from collage_dashboard.figures.picture import picture
from collage_dashboard.figures.style import strategy_colour
from collage_dashboard.number_downloads import file_stem
from collage_dashboard.pages.comparison_content import (
    DEFAULT_METRIC,
    LOSS,
    charted_metrics,
    comparison_table,
    draw_curves,
    lines_of,
    read_curves,
    runs_with_throughput,
)
from collage_dashboard.pages.run_about import facts_of
from collage_dashboard.pages.run_content import draw
from collage_dashboard.pages.run_curves import Story
from collage_dashboard.pages.strategies_content import (
    counterfactual_table,
    strategy_styles,
    strategy_table,
)
from collage_dashboard.prerendering import static_html
from collage_dashboard.run_styles import LineStyle, strategy_title, styles_of
from collage_dashboard.server_reader import Reader, refusal_answer
from collage_dashboard.tables import scrollable, table
from collage_dashboard.view import View, comparison_of, read_address
from collage_monitor import __version__, wire
from collage_monitor.diagnosis import CAVEATS
from collage_monitor.errors import CollageError
from collage_monitor.forecast import ForecastError
from collage_monitor.metrics import STATE_RATIOS, split_key
from collage_monitor.number_text import count, share_text, value_text
from collage_monitor.recommendation import recommendation
from collage_monitor.run_history import read_forecast
from collage_monitor.schedule import RateSchedule
from collage_monitor.strategy_results import results_by_strategy, run_results

__all__ = ["install_report", "report"]

_MEASURED = ("edq_ratio", "lost_update_ratio")
_LOGGED = ("validation_loss", "loss", "learning_rate")
_CHART_PIXELS, _WIDE_PIXELS = 600.0, 1230.0


Chart = tuple[str, Markup, bool]
"""A chart under its title; whether it takes the whole width."""


@dataclass(frozen=True)
class Section:
    """A section of the report: charts, numbers (name, value, detail), and parts of pages as they are there."""

    title: str = ""
    charts: Sequence[Chart] = ()
    numbers: Sequence[tuple[str, str, str]] = ()
    styles: Sequence[LineStyle] = ()
    content: Any = None
    note: str = ""

    @property
    def words(self) -> Markup:
        """The parts of pages as HTML; their links lead nowhere from a file."""
        return Markup(re.sub(r"</?a\b[^>]*>", "", static_html(self.content)))


def report(
    reader: Reader, run_ids: Sequence[str], left_out: int = 0, *, schedule: RateSchedule | None = None
) -> str:
    """The report on one run, or the comparison of several, as HTML without a script; charts are SVG.

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
    # The table of runs holds stored judgements; this makes new ones.
    reader.ask_together(*(lambda client, run_id=run_id: client.overview(run_id) for run_id in chosen))
    if len(chosen) == 1:
        return _about_run(reader, chosen[0], schedule)
    return _about_strategies(reader, chosen, left_out)


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
            return refusal_answer(error, 502 if run_ids else 404)
        answer = Response(text, mimetype="text/html")
        answer.headers["Content-Disposition"] = f'attachment; filename="{file_stem(names)}.html"'
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
    curves += [*_MEASURED, *sorted(key for key in run.latest if split_key(key)[0] in STATE_RATIOS)]
    charts = [_chart(describe(key).title, draw("series", key, view, reader, story)) for key in curves]
    charts.append(_chart("Update size against the grid", draw("histogram", "", view, reader)))
    charts.append(_chart("Updates lost by layer", draw("heatmap", "lost_update_ratio", view, reader), wide=True))
    bounded = any(key.endswith("_low") for key in overview.numbers)
    over = f"{over_steps(overview).capitalize()}{', with 95 % intervals' if bounded else ''}."
    sections = [
        Section("Numbers", numbers=_numbers(run, overview), note=over),
        Section("Curves", charts=charts),
    ]
    if overview.worst:
        sections.append(Section("Layers that lose the most", content=_worst_layers(overview)))
    if schedule is not None:
        sections.append(_forecast(reader, run_id, schedule))
    written = [("Tags", ", ".join(run.tags)), ("Notes", run.notes)]
    facts = [entry for entry in written if entry[1]] + facts_of(run)
    sections.append(Section("About the run", content=table((), facts, texts=(1,))))
    kept = strategy_title(strategy, watch.dtype) if watch else "not watched"
    subtitle = f"{run.project} · {kept} · {run.state}, {step} · updated {when(run.updated_at)}"
    return _rendered(
        run.name, subtitle, overview.headline, [*filter(None, [overview.text, overview.advised])], sections
    )


def _worst_layers(overview: wire.Overview) -> Any:
    rows = [
        (
            entry.layer,
            share_text(entry.share),
            value_text("edq_ratio", entry.edq_ratio),
            value_text("lost_update_ratio", entry.lost_update_ratio),
        )
        for entry in overview.worst
    ]
    return scrollable([table(("Layer", "Share of the loss", "EDQ", "Updates lost"), rows)], "The worst layers")


def _forecast(reader: Reader, run_id: str, schedule: RateSchedule) -> Section:
    try:
        found = reader.ask(lambda client: read_forecast(client, run_id, schedule))
    except ForecastError as error:
        return Section("Forecast", content=table((), [("Not known", str(error))], texts=(1,)))
    rows = [(strategy_title(own.strategy, None), own.text) for own in found.strategies]
    return Section("Forecast", content=table((), rows, texts=(1,)), note=found.assumes)


def _numbers(run: wire.Run, overview: wire.Overview) -> list[tuple[str, str, str]]:
    keys = (*_MEASURED, state_key(overview.numbers), "edq_oracle_ratio", "half_ulp_margin")
    logged = ("validation_loss", "loss", "bytes_per_parameter", "tokens_per_second")
    numbers = overview.numbers
    return [
        *(
            (
                describe(key).title,
                value_text(key, value),
                interval(key, numbers.get(f"{key}_low"), numbers.get(f"{key}_high")),
            )
            for key in keys
            if (value := numbers.get(key)) is not None
        ),
        *(
            (describe(key).title, value_text(key, entry.value), f"at step {entry.step:,}")
            for key in logged
            if (entry := run.scalars.get(key)) is not None
        ),
    ]


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
        _chart(describe(key).title, draw_curves(answers[key], key, view, () if by_run else results))
        for key in metrics
    ]
    said = recommendation(results, left_out)
    overviews = {row.run_id: row.overview for row in rows if row.overview}
    costs = [_chart("Loss against bytes per parameter", tradeoff(results, chosen=said.chosen))]
    sections = [
        Section("Strategies", charts=costs, content=strategy_table(results)),
        Section("Curves", charts=curves, styles=styles),
        Section("Runs", content=comparison_table(runs, overviews)),
    ]
    if (kept := counterfactual_table(runs)) is not None:
        sections.append(Section(content=kept))
    subtitle = f"{len(rows)} runs of {', '.join(dict.fromkeys(row.project for row in rows))}"
    return _rendered("Strategies", subtitle, said.brief or said.text, [said.text, *said.reasons], sections)


def _chart(title: str, figure: go.Figure, *, wide: bool = False) -> Chart:
    return title, Markup(picture(figure, title, _WIDE_PIXELS if wide else _CHART_PIXELS)), wide


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
        limits=CAVEATS,
        written=when(time.time()),
        version=__version__,
    )
