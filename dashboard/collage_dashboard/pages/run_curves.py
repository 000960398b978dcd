"""The curves of a run: loss, EDQ and updates lost side by side on its first screen, the others behind tabs.

`run.py` lays out what acts on all of them, `run_content.py` the charts; marks are `run_marks.py`'s
(`tests/dashboard/figures/test_marks.py`, `tests/browser/test_first_screen.py`). Ids are fixed: callbacks of
`run.py`, `assets/figures.js` and tests find parts by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import dash_mantine_components as dmc
import plotly.graph_objects as go
from dash import html

from collage_dashboard.components import (
    axis_control,
    labelled,
    menu,
    scale_control,
    segments,
    select,
    smoothing_control,
)
from collage_dashboard.figures import NamedCurve, curves
from collage_dashboard.figures.heatmap import short_layer
from collage_dashboard.pages.before_after import change_controls
from collage_dashboard.pages.run_marks import Story, mark_curve
from collage_dashboard.view import View
from collage_dashboard.zoom import POINTS, Steps
from collage_monitor import wire
from collage_monitor.client import Client

__all__ = ["FIRST", "FIRST_PIXELS", "MARK_KEYS", "WHOLE_MODEL", "curve_controls", "draw_curve", "series_between"]

FIRST: Final = ("loss", "edq_ratio", "lost_update_ratio")
"""The curves of the first screen, from left to right."""
FIRST_PIXELS: Final = 204
"""Their height: at least 160 of it are the curve's."""
WHOLE_MODEL: Final = "whole model"
MARK_KEYS: Final = "; n and p ask what changed at the next and the previous mark"


def curve_controls(view: View, layers: list[str]) -> html.Details:
    """Behind one button what acts on every chart of the page; beside it the step that is asked about."""
    chosen = view.layer if view.layer in layers else WHOLE_MODEL
    offered = [{"value": WHOLE_MODEL, "label": "Whole model"}]
    offered += [{"value": name, "label": short_layer(name)} for name in layers]
    layer = select("run-layer", "Curves of", offered, chosen, searchable=True, allowDeselect=False, limit=200)
    schedule = dmc.TextInput(
        id="run-schedule",
        value=view.schedule,
        placeholder="cosine:3e-4:100:10000",
        debounce=True,
        size="xs",
        w=220,
        **{"aria-label": "Schedule of the learning rate: kind, rate, warm-up, steps"},
    )
    controls = [
        labelled("Curves of", layer),
        axis_control("run-axis", view),
        scale_control("run-scale", view),
        smoothing_control("run-smoothing", view),
        segments("run-order", "Layers", {"depth": "By depth", "worst": "Worst first"}, view.order),
        segments("run-rows", "Grouped", {"all": "No", "block": "By block", "type": "By module type"}, view.rows),
        *change_controls(view),
        labelled("Learning-rate schedule, for a forecast", schedule),
    ]
    return menu("Axes", *controls)


def draw_curve(
    metric: str, name: str, answer: wire.Series, view: View, story: Story, *, is_first: bool = False
) -> go.Figure:
    """One curve of a run, under its name, with what `mark_curve` marks; on the first screen on a fixed scale."""
    line = NamedCurve(name, story.colour, answer)
    height = FIRST_PIXELS if is_first else 300
    drawn = curves(metric, [line], smoothing=view.smoothing, scale=view.scale, height=height, is_fixed=is_first)
    return mark_curve(drawn, metric, answer, story)


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
