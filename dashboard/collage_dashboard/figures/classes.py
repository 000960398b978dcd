"""The class of each element: the shares of the five classes over the run, stacked to 100 %."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import plotly.graph_objects as go

from collage_dashboard.descriptions import AXIS_TITLES, describe
from collage_dashboard.figures.style import CLASS_COLOURS, axis, base_figure, empty_figure, translucent
from collage_monitor import wire
from collage_monitor.diagnosis import finite
from collage_monitor.number_text import count, share_text

__all__ = ["CLASSES", "class_shares"]

CLASSES: Final = tuple(CLASS_COLOURS)
"""In the order in which they are stacked; together they are all elements."""


def class_shares(answers: Mapping[str, wire.Series], *, height: int = 320) -> go.Figure:
    """Stacked shares from the series of each class, by its name; a point at which one is unknown is left out."""
    present = [name for name in CLASSES if name in answers]
    if len(present) < len(CLASSES) or not answers[present[0]].steps:
        return empty_figure("no measured step yet", height=height)
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
        height=height,
        hovermode="x unified",
        xaxis=axis(AXIS_TITLES[first.axis], showgrid=False),
        yaxis=axis("share of the elements", ticksuffix=" %", autorangeoptions={"clipmin": 0, "clipmax": 100}),
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0},
    )
