"""The content of the run page: head and summary, the cards behind each tab, and the figures in them.

`run.py` and the HTML report call it; it asks no server itself (`tests/dashboard/test_pages.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any, Final

import dash_mantine_components as dmc
import msgspec
import plotly.graph_objects as go
from dash import dcc, html

from collage_dashboard.components import (
    badge,
    chart_card,
    chart_note,
    menu,
    moment,
    over_steps,
    state_badge,
    verdict_line,
)
from collage_dashboard.descriptions import describe, interval, state_key
from collage_dashboard.figures import class_shares, heatmap, update_histogram
from collage_dashboard.figures.heatmap import SMALLEST_HEIGHT, block_of
from collage_dashboard.figures.histogram import CLASSES, PREDICTS
from collage_dashboard.figures.series import mark_events
from collage_dashboard.figures.style import INK, MARKED, add_note, empty_figure, literal, with_subtitle
from collage_dashboard.number_downloads import numbers_address
from collage_dashboard.pages.before_after import picked_marks
from collage_dashboard.pages.run_about import about
from collage_dashboard.pages.run_curves import FIRST, FIRST_PIXELS, Story, draw_curve, place_marks, series_between
from collage_dashboard.pages.run_layers import DEFAULT_METRIC, layer_table, logs_only
from collage_dashboard.run_styles import strategy_title
from collage_dashboard.server_reader import Reader
from collage_dashboard.view import Tab, View, write_address
from collage_dashboard.zoom import Steps, steps_within, with_zoom
from collage_monitor import wire
from collage_monitor.diagnosis import NOW_STEPS
from collage_monitor.errors import NotAuthorised, ServerRefusal
from collage_monitor.forecast import LOST, ForecastError
from collage_monitor.metrics import SCALARS, STATE_RATIOS, split_key
from collage_monitor.number_text import count, number, share_text, value_text
from collage_monitor.run_history import read_forecast
from collage_monitor.schedule import parse_schedule

__all__ = [
    "SERIES",
    "TABS",
    "draw",
    "first_curves",
    "head",
    "panel",
    "search",
    "summary",
    "tabs_of",
]


def head(run: wire.Run) -> html.Div:
    """Name, state, and the agent's observations."""
    watch = run.watch
    told: list[Any] = [state_badge(run.state)]
    if watch is not None:
        facts = (strategy_title(watch.shown_strategy), watch.dtype, watch.optimizer)
        told += [html.Span(fact, className="quiet") for fact in facts]
        if watch.strategy and watch.observed_strategy not in {"unknown", watch.strategy}:
            told.append(badge(f"observed: {strategy_title(watch.observed_strategy)}", "orange"))
    step = "no step yet" if run.last_step is None else f"step {count(run.last_step)}"
    return html.Div(
        [
            html.Span(dmc.Title(run.name, order=1, size="h3"), title=run.name, className="name"),
            *told,
            html.Div(className="spring"),
            dmc.Text(step, className="quiet", size="sm"),
            dmc.Text(["updated ", moment(run.updated_at, ago=True)], className="quiet", size="sm"),
        ],
        className="toolbar run-head",
    )


def summary(run: wire.Run, overview: wire.Overview) -> html.Div:
    """The problem, where and since when, what to do, and those of four numbers that the sentence does not say."""
    validated = "validation_loss" in run.scalars
    loss = run.scalars.get("validation_loss" if validated else "loss")
    measured = overview.numbers
    keys = [key for key in ("edq_ratio", "lost_update_ratio", state_key(measured)) if measured.get(key) is not None]
    bounds = {key: _bounds(key, overview) for key in keys}
    numbers = [_number(key, value_text(key, measured[key]), bounds[key], _now(key, overview)) for key in keys]
    if loss:
        key = "validation_loss" if validated else "loss"
        numbers.append(_number(key, number(loss.value), f"at step {loss.step:,}"))
    over = f"{over_steps(overview)}{', 95 % interval' if any(bounds.values()) else ''}"
    why = menu("Why", html.P(overview.text, className="reasons"))
    if logs_only(run):
        said = "Logs only: no optimizer is watched. collage_agent.watch(model, optimizer) tells what updates do."
        answer = html.Div(verdict_line("unknown", said), className="answer")
        return html.Div([answer, html.Div(numbers, className="numbers-line")])
    verdict = verdict_line(overview.health, overview.headline)
    return html.Div(
        [
            html.Div([verdict, html.Div([*_to_try(run, overview), why], className="actions")], className="answer"),
            html.Div([*numbers, html.Div(over, className="quiet")], className="numbers-line"),
        ]
    )


def _number(key: str, value: str, beside: str, now: str = "") -> html.Div:
    """A number in one line: its name, its value with what qualifies it, and where it is now."""
    description, named = describe(key), dict[str, Any]({"data-metric": key})
    shown = html.Div([html.B(value), html.Span(f" {beside}", className="quiet")] if beside else html.B(value))
    title = html.Div(description.title, title=description.help, className="quiet")
    return html.Div([title, shown, *([html.Div(now)] if now else [])], className="number", **named)


def _bounds(key: str, overview: wire.Overview) -> str:
    """The interval of a mean; not of one that moves, or of a single step, which it would make look exact."""
    if overview.now.get(key) is not None or overview.measured_steps < 2:
        return ""
    return interval(key, overview.numbers.get(f"{key}_low"), overview.numbers.get(f"{key}_high"))


def _now(key: str, overview: wire.Overview) -> str:
    """The newest steps' value where the number moves, unless the sentence has it."""
    told = value_text(key, overview.now.get(key))
    return "" if overview.now.get(key) is None or told in overview.headline else f"now {told}"


def _to_try(run: wire.Run, overview: wire.Overview) -> list[Any]:
    """What to try, in a few words, and how: the optimizer's line, and the checkpoint's."""
    if not overview.advice:
        return []
    choices = [choice for entry in overview.advice for choice in entry.choices if choice.strategy is not None]
    if not choices:
        return [html.P(overview.advised, className="try")]
    named = list(dict.fromkeys(choice.strategy for choice in choices if choice.strategy))
    lines = [entry.choices[0].code for entry in overview.advice if entry.choices]
    lines += [f"collage-monitor convert --to {named[0]} --output NEW CHECKPOINT"]
    how = [html.P(overview.advised, className="reasons"), dmc.Code("\n".join(lines), block=True)]
    tried = write_address(View(project=run.project, by="strategy"))
    how.append(dcc.Link("Strategies that this project has tried", href="".join(tried)))
    shown = menu(f"Try {' or '.join(map(strategy_title, named[:2]))}: how", *how)
    return [html.Div(shown, className="cure")]


TABS: Final[dict[Tab, str]] = {
    "layers": "Overview",
    "table": "Layers",
    "histogram": "Histogram",
    "curves": "Curves",
    "norms": "Norms",
    "states": "States",
    "classes": "Elements",
    "oracle": "Oracle",
    "about": "About",
}
SERIES: Final[dict[Tab, tuple[str, ...]]] = {
    # Beside each other in pairs: the first of each stand below one another.
    "curves": (
        "loss",
        "validation_loss",
        "edq_ratio",
        "edq_visible_ratio",
        "lost_update_ratio",
        "half_ulp_margin",
        "learning_rate",
    ),
    "norms": ("grad_norm", "param_norm", "intended_norm", "effective_norm", "update_to_weight_ratio"),
    "oracle": (
        "edq_oracle_ratio",
        "oracle_displacement_ratio",
        "oracle_step_norm_ratio",
        "oracle_drift_ratio",
    ),
}
"""The curves of each tab that has a fixed list of them."""


_UNKNOWN: Final = Story()


def tabs_of(run: wire.Run) -> dict[Tab, str]:
    """The tabs that have something to show, by name."""
    return {name: TABS[name] for name in ("layers", "about")} if logs_only(run) else TABS


def panel(view: View, run: wire.Run) -> Any:
    """The content of the view's tab."""
    if view.tab == "about":
        return about(run)
    if logs_only(run):
        named = sorted(run.scalars, key=lambda key: (key not in SCALARS, key))
        return html.Div([_card("series", key) for key in named], className="charts")
    strategy = run.watch.shown_strategy if run.watch else None
    if view.tab == "layers":
        metric = view.metric or DEFAULT_METRIC
        title = f"{describe(metric).title} by layer"
        return _card("heatmap", metric, title=title, height=SMALLEST_HEIGHT, wide=True)
    if view.tab == "table":
        return layer_table(run)
    if view.tab == "histogram":
        title = "Update size against the grid"
        return html.Div(_card("histogram", "predicted_plain_lost_ratio", title=title, note=PREDICTS, wide=True))
    if view.tab == "classes":
        title = "What became of each element"
        return html.Div(_card("classes", "lost", title=title, note=_ABOUT_CLASSES, wide=True))
    if view.tab == "curves" and view.query:
        word = view.query.lower()
        found = [key for key in (*run.latest, *run.scalars) if word in f"{key} {describe(key).title}".lower()]
        none = html.P(f"Nothing that this run measures or logs has {view.query!r} in its name.", className="crumbs")
        cards = [_card("series", key, strategy=strategy) for key in found[:_FOUND]]
        return html.Div(cards or none, className="charts pairs")
    if view.tab == "curves" and view.panels:
        return html.Div([_card("series", key, strategy=strategy) for key in view.panels], className="charts pairs")
    keys = SERIES.get(view.tab) or tuple(sorted(filter(_is_kept_beside, run.latest), key=_states_first))
    if not keys:
        return html.P("The optimizer's states were not measured.", className="crumbs")
    beside = run.beside if view.tab == "curves" else ()
    cards = [_card("series", key, strategy=strategy) for key in (*keys, *beside)]
    return html.Div(cards, className="charts pairs" if view.tab == "curves" else "charts")


_FOUND: Final = 24
"""Curves that a search shows."""
_ABOUT_CLASSES: Final = (
    "Lost: intended, and rounded away. Idle: nothing was intended. Distorted: off by more than half. "
    "Shares are of all elements."
)


def search(view: View, run: wire.Run) -> list[Any]:
    """The search over all that the run measures and logs, and the reader's own charts, in the order chosen."""
    told = f"Search {len(run.latest) + len(run.scalars):,} metrics"
    named = dict.fromkeys((*run.latest, *run.scalars, *view.panels))
    offered = [{"value": key, "label": f"{describe(key).title} ({key})"} for key in named]
    return [
        dmc.TextInput(id="run-query", value=view.query, placeholder=told, w=260, mb=10, **{"aria-label": told}),
        dmc.MultiSelect(
            id="run-panels",
            value=list(view.panels),
            data=offered,
            placeholder="" if view.panels else "Charts of your own, in order",
            searchable=True,
            clearable=True,
            limit=100,
            size="sm",
            mb=10,
            className="panels",
            **{"aria-label": "Charts of your own, in order: the page's address keeps them"},
        ),
    ]


def _is_kept_beside(key: str) -> bool:
    """Whether a metric is about what the optimizer keeps beside the weights."""
    return split_key(key)[0] in {
        *STATE_RATIOS,
        "residual_fill_ratio",
        "residual_zero_ratio",
        "residual_dropped_ratio",
    }


def _states_first(key: str) -> tuple[bool, str]:
    return split_key(key)[0] not in STATE_RATIOS, key


def first_curves(view: View, run: wire.Run) -> list[Any]:
    """Loss, EDQ and updates lost, on the scales that they have in every run; above the heatmap alone."""
    shown = view.tab == "layers" and not logs_only(run)
    return [_card("first", key, height=FIRST_PIXELS) for key in FIRST] if shown else []


def _card(
    kind: str,
    metric: str,
    *,
    strategy: str | None = None,
    title: str = "",
    note: str = "",
    wide: bool = False,
    height: int = 300,
) -> html.Div:
    notes = " ".join(filter(None, (note, chart_note(metric, [strategy]) if kind == "series" else "")))
    chart = {"kind": kind, "metric": metric}
    figure = {"type": "run-figure", **chart}
    return html.Div(
        [
            chart_card(metric, figure, title=title, note=notes, height=height, is_map=kind == "heatmap"),
            dcc.Store(id={"type": "run-answer", **chart}),
            dcc.Store(id={"type": "run-digest", **chart}),
        ],
        className="wide" if wide else "",
    )


def draw(
    kind: str, metric: str, view: View, reader: Reader, story: Story = _UNKNOWN, *, zoom_count: int = 0
) -> go.Figure:
    """The figure of a kind of `_DRAWERS` for `metric`. `zoom_count`: as `with_zoom` has it.

    A metric that the server refuses is an empty figure with its reason.

    Raises:
        CollageError: the server does not answer, or refuses the token.
    """
    known = {step for step, _ in story.marks}
    unsaid = kind == "first" and story.since is not None and story.since not in known
    began = [(story.since, "it began")] if unsaid and story.since is not None else []
    story = msgspec.structs.replace(story, marks=[*story.marks, *began, *picked_marks(view)])
    try:
        if kind == "histogram":
            return _histogram(view, reader, story.since)
        steps = steps_within(view, reader)
        drawn = _DRAWERS[kind](metric, view, reader, steps, story)
        shown = tuple(CLASSES) if kind == "classes" else (metric,)
        numbers = numbers_address(view, shown, steps, by_layer=kind == "heatmap")
        return with_zoom(drawn, view, zoom_count).update_layout(meta={"numbers": numbers})
    except NotAuthorised:
        raise
    except ServerRefusal as error:
        return empty_figure(str(error))


def _series(metric: str, view: View, reader: Reader, steps: Steps, story: Story) -> go.Figure:
    answer = _read_series(metric, view, reader, steps)
    name = "whole model" if describe(metric).scalar or not view.layer else view.layer
    drawn = draw_curve(metric, name, answer, view, story)
    return drawn if describe(metric).scalar else with_subtitle(drawn, name)


def _first(metric: str, view: View, reader: Reader, steps: Steps, story: Story) -> go.Figure:
    """A curve of the first screen: its card says what it is, so that its axes need not."""
    answer = _read_series(metric, view, reader, steps)
    name = view.layer or "whole model"
    drawn = draw_curve(metric, name, answer, view, story, is_first=True)
    drawn.update_layout(margin={"l": 40, "r": 8, "b": 24})
    drawn.update_yaxes(title=None, nticks=5).update_xaxes(title=None, nticks=6)
    of_layer = bool(view.layer) and not describe(metric).scalar
    turned = ""
    if metric == "lost_update_ratio" and drawn.data:
        foretold = _foretell(drawn, view, reader, story) if view.schedule and not of_layer else ""
        turned = _turned(view, reader, answer, story) or foretold
    if not turned:
        return with_subtitle(drawn, name) if of_layer else drawn
    # In the room that its mark has already.
    top = drawn.layout.margin.t
    if of_layer:
        own = f"…{name[1 - _NAMED :]}" if len(name) > _NAMED else name
        turned = f"{own}: {turned.replace('step ', '')}"
    return with_subtitle(drawn, turned).update_layout(margin={"t": top})


def _foretell(figure: go.Figure, view: View, reader: Reader, story: Story) -> str:
    """Draw the share that will be lost if the rate follows the view's schedule, dotted, behind the curve; the first
    step from which on it is too much, or why that is not known."""
    try:
        schedule = parse_schedule(view.schedule)
        found = reader.ask(lambda client: read_forecast(client, view.runs[0], schedule)).strategies[0]
    except NotAuthorised:
        raise
    except (ForecastError, ServerRefusal, ValueError) as error:
        add_note(figure, "<br>".join(wrap(literal(f"No forecast: {error}"), _NOTE)))
        return ""
    if view.axis == "step" and found.shares:
        steps, shares = zip(*found.shares, strict=True)
        figure.add_scatter(
            x=steps,
            y=[100 * share for share in shares],
            name="forecast",
            mode="lines",
            line={"color": story.colour, "width": 1.5, "dash": "dot"},
            hovertemplate="forecast: %{y:.1f} %<extra></extra>",
        )
    if found.onset is None:
        return "forecast: not lost in this run"
    until = "the end" if found.latest is None else f"{found.latest:,}"
    told = f"forecast: over {share_text(LOST)} from step {found.onset:,}"
    if view.axis == "step":
        mark_events(figure, [(found.onset, f"{told} ({found.earliest:,} to {until})")])
    return told


_NOTE: Final = 40
"""Characters of a line over a curve of the first screen."""
_NAMED: Final = 14
"""Characters of a layer's name that stand above a curve with what changed there."""


def _turned(view: View, reader: Reader, answer: wire.Series, story: Story) -> str:
    """'88.0 % → < 0.01 % since step 101': lost in the last points before the step that was clicked, else before the
    cure, and from there on; "" where there is none, or nothing on one side."""
    since = view.step if view.step is not None else story.cured
    if since is None:
        return ""
    before = [first for first, last in zip(answer.first_steps, answer.steps, strict=True) if last < since]
    if not before or answer.steps[-1] < since:
        return ""
    spans = ((before[-NOW_STEPS:][0], since - 1), (since, None))
    ends = reader.ask_together(
        *(
            lambda client, span=span: client.series(
                view.runs[0], answer.metric, layer=view.layer, points=1, first_step=span[0], last_step=span[1]
            )
            for span in spans
        )
    )
    old, new = (value_text(answer.metric, end.values[-1] if end.values else None) for end in ends)
    return f"{old} → {new} since step {since:,}"


def _heatmap(metric: str, view: View, reader: Reader, steps: Steps, story: Story) -> go.Figure:
    run_id = view.runs[0]
    as_in_table = view.order == "worst" and metric in _OF_THE_LOSS
    answer, *known = reader.ask_together(
        lambda client: client.heatmap(
            run_id, metric, order=view.order, first_step=steps[0], last_step=steps[1], axis=view.axis
        ),
        *([lambda client: client.overview(run_id).worst] if as_in_table else []),
        *([lambda client: client.layers(run_id).layers] if view.rows == "type" else []),
    )
    answer = _ordered(answer, [entry.layer for entry in known.pop(0)]) if as_in_table else answer
    groups = None
    if view.rows == "block":
        groups = {name: block_of(name) for name in answer.layers}
    elif view.rows == "type":
        groups = {layer.name: layer.module_type for layer in known[0]}
    drawn = heatmap(answer, selected=view.layer, groups=groups)
    began = [] if story.since is None else [(story.since, "")]
    lines: tuple[dict[str, Any], ...] = (
        {"color": INK, "width": 1, "dash": "dashdot"},
        {"color": MARKED, "width": 2},
    )
    for marks, line in zip((began, picked_marks(view)), lines, strict=True):
        for place, _ in place_marks(marks, answer) if drawn.data else ():
            drawn.add_vline(x=place, line=line)
    return drawn


def _ordered(answer: wire.Heatmap, first: Sequence[str]) -> wire.Heatmap:
    """The heatmap with these layers first, as the table of the layers that lose the most has them."""
    rows = dict(zip(answer.layers, answer.values, strict=True))
    order = [*(name for name in first if name in rows), *(name for name in rows if name not in set(first))]
    return msgspec.structs.replace(answer, layers=order, values=[rows[name] for name in order])


def _histogram(view: View, reader: Reader, since: int | None) -> go.Figure:
    """At the view's step, or since the change, or over the run; the line shows the time before the change."""
    changed = since if since is not None and (view.step is None or view.step >= since) else None
    run_id, layer, step = view.runs[0], view.layer, view.step
    first = changed if step is None else None
    questions = [lambda client: client.histogram(run_id, layer=layer, step=step, first_step=first)]
    if changed is not None:
        questions.append(lambda client: client.histogram(run_id, layer=layer, last_step=changed - 1))
    answer, *before = reader.ask_together(*questions)
    drawn = update_histogram(answer, before=before[0] if before else None)
    if answer.step is None:
        return drawn
    told = f"{layer or 'whole model'}, {_over(answer)}"
    if len(drawn.data) > 1:
        told += f"; line: before the change, {_over(before[0])}"
    return with_subtitle(drawn, told)


def _over(answer: wire.Histogram) -> str:
    if answer.first_step == answer.step:
        return f"step {count(answer.step)}"
    return f"steps {count(answer.first_step)} to {count(answer.step)}"


def _classes(_metric: str, view: View, reader: Reader, steps: Steps, _story: Story) -> go.Figure:
    shares = {name: _read_series(name, view, reader, steps) for name in CLASSES}
    return with_subtitle(class_shares(shares), view.layer or "whole model")


def _read_series(metric: str, view: View, reader: Reader, steps: Steps) -> wire.Series:
    layer = None if describe(metric).scalar else view.layer
    return reader.ask(lambda client: series_between(client, view, metric, layer, steps))


_OF_THE_LOSS: Final = frozenset({"edq_ratio", "lost_update_ratio"})
"""Metrics whose worst layers are those that lose the most; of others, those that are worst by the metric."""
_DRAWERS: Final = {"first": _first, "series": _series, "heatmap": _heatmap, "classes": _classes}
"""How charts are drawn, by their kind; a histogram has no axis of steps."""
