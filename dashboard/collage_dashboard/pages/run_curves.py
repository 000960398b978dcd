"""The curves of a run's first screen: loss, EDQ, updates lost and learning rate on one axis, with what happened.

`run.py` lays out the card and its controls. `run_content.py` draws it by `draw_stack`, and curves behind the tabs
by `draw_curve`. `draw_stack` and `series_between` ask the server. Figures are `figures/series.py`'s and
`figures/stack.py`'s, marks are `run_marks.py`'s (`tests/dashboard/test_pages.py`,
`tests/browser/test_first_screen.py`). Ids are fixed: callbacks of `run.py`, `assets/figures.js`
and tests find parts by them. `beside`: names that second writers log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import dash_mantine_components as dmc
import msgspec
import plotly.graph_objects as go
from dash import dcc, html

from collage_dashboard.components import (
    axis_control,
    card,
    curve_keys,
    labelled,
    save_buttons,
    scale_control,
    select,
    smoothing_control,
)
from collage_dashboard.descriptions import describe
from collage_dashboard.figures import NamedCurve, curves, stack
from collage_dashboard.figures.heatmap import short_layer
from collage_dashboard.figures.series import mark_events, series_of
from collage_dashboard.figures.stack import stack_height
from collage_dashboard.figures.style import GRAPH_CONFIG, empty_figure
from collage_dashboard.pages.before_after import change_controls
from collage_dashboard.pages.run_marks import Story, mark_curve, marks_in_words, place_marks
from collage_dashboard.server_reader import Reader, ask_each
from collage_dashboard.view import View
from collage_dashboard.zoom import POINTS, Steps
from collage_monitor import wire
from collage_monitor.client import Client

__all__ = [
    "STACKED",
    "WHOLE_MODEL",
    "curve_controls",
    "curves_card",
    "draw_curve",
    "draw_stack",
    "series_between",
    "stacked_metrics",
]

STACKED: Final = ("loss", "edq_ratio", "lost_update_ratio", "learning_rate")
"""From top to bottom."""
WHOLE_MODEL: Final = "whole model"
_MOST_BESIDE: Final = 4
_TITLE: Final = "Curves of the run"
_MARK_KEYS: Final = "; n and p ask what changed at the next and the previous mark"
_CHART: Final = {"kind": "stack", "metric": "stack"}


def stacked_metrics(beside: Sequence[str]) -> tuple[str, ...]:
    """The charts of the stack, from top to bottom: last a few of the second writers' values."""
    return (*STACKED, *beside[:_MOST_BESIDE])


def curves_card(controls: Any, story: Story) -> dmc.Paper:
    """The card of the stacked curves, under the controls that act on all curves of the page."""
    height = stack_height(len(stacked_metrics(story.beside)))
    figure = empty_figure("", height=height)
    graph = dcc.Graph(
        id={"type": "run-figure", **_CHART}, figure=figure, config=GRAPH_CONFIG, clear_on_unhover=True
    )
    foot = [html.Div(marks_in_words(story.marks), id="run-marks"), save_buttons(_TITLE)]
    return card(
        controls,
        html.Div(graph, id="run-stack", style={"minHeight": f"{height}px"}, **curve_keys(_TITLE, _MARK_KEYS)),
        html.Div(foot, className="chart-foot"),
        dcc.Store(id={"type": "run-answer", **_CHART}),
        dcc.Store(id={"type": "run-digest", **_CHART}),
        kind="chart-card",
        mt=14,
    )


def curve_controls(view: View, layers: list[str]) -> html.Div:
    """What acts on every curve of the page: those of the first screen, and those behind the tabs."""
    chosen = view.layer if view.layer in layers else WHOLE_MODEL
    offered = [{"value": WHOLE_MODEL, "label": "Whole model"}]
    offered += [{"value": name, "label": short_layer(name)} for name in layers]
    layer = select(
        "run-layer", "Curves of", offered, chosen, searchable=True, allowDeselect=False, limit=200, w=300
    )
    controls = [
        labelled("Curves of", layer),
        axis_control("run-axis", view),
        scale_control("run-scale", view),
        smoothing_control("run-smoothing", view),
        *change_controls(view),
    ]
    return html.Div(controls, className="controls")


def draw_stack(_metric: str, view: View, reader: Reader, steps: Steps, story: Story) -> go.Figure:
    """The stacked curves between `steps`; measured ones are of the view's layer.

    Raises:
        CollageError: the server does not answer, or refuses the token.
    """
    keys = stacked_metrics(story.beside)
    logged = [key for key in keys if key in story.beside or describe(key).scalar]
    measured = [key for key in keys if key not in logged]
    found: dict[str, wire.Series | str] = {}
    for answers in reader.ask_together(
        *(
            lambda client, keys=keys, layer=layer: ask_each(
                keys, lambda some: series_between(client, view, some, layer, steps)
            )
            for keys, layer in ((measured, view.layer), (logged, None))
        )
    ):
        found |= answers
    unmarked = msgspec.structs.replace(story, marks=())
    figure = stack(
        {key: _curve(key, found[key], view, unmarked) for key in keys}, view.axis, subtitle=view.layer or ""
    )
    whole = next((answer for answer in found.values() if isinstance(answer, wire.Series) and answer.steps), None)
    return mark_events(figure, place_marks(story.marks, whole), over="paper") if whole else figure


def _curve(metric: str, answer: wire.Series | str, view: View, story: Story) -> go.Figure:
    if isinstance(answer, str):
        return empty_figure(answer)
    answer = series_of(answer, metric)
    return draw_curve(metric, describe(metric).axis_title, answer, view, story)


def draw_curve(metric: str, name: str, answer: wire.Series, view: View, story: Story) -> go.Figure:
    """One curve of a run, under its name, with what `mark_curve` marks."""
    line = NamedCurve(name, story.colour, answer)
    return mark_curve(curves(metric, [line], smoothing=view.smoothing, scale=view.scale), metric, answer, story)


def series_between(
    client: Client, view: View, metrics: str | Sequence[str], layer: str | None, steps: Steps
) -> wire.Series:
    """One metric or several of the view's run, on its axis, between `steps`."""
    return client.series(
        view.runs[0],
        metrics,
        layer=layer,
        axis=view.axis,
        points=POINTS,
        first_step=steps[0],
        last_step=steps[1],
    )
