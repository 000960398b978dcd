"""Where the updates stand against the grid, |u| over the gap in octaves; and the classes of the elements.

A function from data to figure, as all of `figures/` (`tests/dashboard/figures/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import plotly.graph_objects as go

from collage_dashboard.descriptions import AXIS_TITLES, describe
from collage_dashboard.figures.style import (
    ACCENT,
    BELOW,
    CLASS_COLOURS,
    INK,
    axis,
    base_figure,
    empty_figure,
    translucent,
)
from collage_monitor import wire
from collage_monitor.diagnosis import finite
from collage_monitor.metrics import HISTOGRAM_OCTAVES
from collage_monitor.number_text import count, share_text

__all__ = ["CLASSES", "PREDICTS", "class_shares", "update_histogram"]

PREDICTS = (
    "Updates smaller than half a gap are rounded away by plain storage in the parameter's dtype. This predicts "
    "nothing for pairs or master weights."
)
_HALF_GAP = -1.0
_FIRST, _LAST = HISTOGRAM_OCTAVES[0], HISTOGRAM_OCTAVES[-1]


def update_histogram(answer: wire.Histogram, *, before: wire.Histogram | None = None) -> go.Figure:
    """Shares of the non-idle elements in octaves of |u| / gap; under- and overflow stand at the edges.

    `before` is drawn as a line over the bars.
    """
    counts = [finite(value) or 0.0 for value in answer.counts]
    total = sum(counts)
    if total <= 0:
        return empty_figure("no update measured")
    lefts = [_left(label) for label in answer.labels]
    bars = go.Bar(
        x=[left + 0.5 for left in lefts],
        y=[100 * value / total for value in counts],
        width=0.92,
        marker={"color": [BELOW if left < _HALF_GAP else ACCENT for left in lefts], "line": {"width": 0}},
        customdata=[
            f"{_octave(label)}<br>{share_text(value / total)} of the updates<br>{count(value)} elements"
            for label, value in zip(answer.labels, counts, strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure = base_figure(
        [bars, *_outline(before)],
        showlegend=False,
        revision=answer.name,
        margin={"l": 56, "r": 12, "t": 22, "b": 44},
        xaxis=axis(
            "|u| / gap, octaves",
            tickvals=list(range(_FIRST, _LAST + 2, 4)),
            ticktext=[f"2<sup>{octave}</sup>".replace("-", "−") for octave in range(_FIRST, _LAST + 2, 4)],
            autorangeoptions={"include": [_FIRST - 1.2, _LAST + 2.2]},
        ),
        yaxis=axis("share of the updates", ticksuffix=" %", rangemode="tozero"),
    )
    figure.add_vline(x=_HALF_GAP, line={"color": INK, "width": 1.5, "dash": "dash"})
    return figure.add_annotation(
        x=_HALF_GAP, y=1, yref="paper", text="half a gap", showarrow=False, xanchor="center", yanchor="bottom"
    )


def _outline(before: wire.Histogram | None) -> list[go.Scatter]:
    """The shares of an earlier time as one line."""
    counts = [finite(value) or 0.0 for value in before.counts] if before else []
    if before is None or sum(counts) <= 0:
        return []
    shares = [value / sum(counts) for value in counts]
    line = go.Scatter(
        x=[_left(label) + 0.5 for label in before.labels],
        y=[100 * share for share in shares],
        name="before",
        mode="lines",
        line={"color": INK, "width": 2, "shape": "hvh"},
        customdata=[f"before: {share_text(share)} of the updates" for share in shares],
        hovertemplate="%{customdata}<extra></extra>",
    )
    return [line]


def _left(label: str) -> int:
    edges = {"underflow": _FIRST - 1, "overflow": _LAST + 1}
    return edges[label] if label in edges else int(label)


def _octave(label: str) -> str:
    if label == "underflow":
        return f"below 2<sup>{_FIRST}</sup> gaps".replace("-", "−")
    if label == "overflow":
        return f"2<sup>{_LAST + 1}</sup> gaps and above"
    low = int(label)
    return f"2<sup>{low}</sup> to 2<sup>{low + 1}</sup> gaps".replace("-", "−")


CLASSES: Final = tuple(CLASS_COLOURS)
"""In the order in which they are stacked; together they are all elements."""


def class_shares(answers: Mapping[str, wire.Series]) -> go.Figure:
    """Stacked shares from the series of each class, by its name; a point at which one is unknown is left out."""
    present = [name for name in CLASSES if name in answers]
    if len(present) < len(CLASSES) or not answers[present[0]].steps:
        return empty_figure("no measured step yet")
    columns = [[finite(value) for value in answers[name].values] for name in CLASSES]
    positions = [finite(position) for position in answers[CLASSES[0]].positions]
    points = list(zip(positions, *columns, strict=True))
    whole = [point for point in points if all(value is not None for value in point) and sum(point[1:]) > 0]
    traces = []
    for place, name in enumerate(CLASSES, start=1):
        traces.append(
            go.Scatter(
                x=[point[0] for point in whole],
                y=[100 * point[place] / sum(point[1:]) for point in whole],
                name=name,
                mode="lines",
                line={"width": 0.5, "color": CLASS_COLOURS[name]},
                fillcolor=translucent(CLASS_COLOURS[name], 0.75),
                stackgroup="classes",
                customdata=[
                    f"{share_text(point[place] / sum(point[1:]))} ({count(point[place])} elements)"
                    for point in whole
                ],
                hovertemplate="%{customdata}",
                text=describe(name).help,
            )
        )
    first = answers[CLASSES[0]]
    return base_figure(
        traces,
        revision=f"classes {first.axis} {first.layer}",
        height=320,
        hovermode="x unified",
        xaxis=axis(AXIS_TITLES[first.axis], showgrid=False),
        yaxis=axis("share of the elements", ticksuffix=" %", autorangeoptions={"clipmin": 0, "clipmax": 100}),
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0},
    )
