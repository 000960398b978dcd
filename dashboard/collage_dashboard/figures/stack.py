"""Short curves of several metrics below each other on one x axis, one figure: zoom and pointer are shared.

The figures that it is given are used up: their traces move into the stack. `pages/run_curves.py` draws with it.
Heights are `stack_height`'s, and a row without a curve says why (`tests/dashboard/figures/test_marks.py`,
`tests/dashboard/test_pages.py`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, Final

import plotly.graph_objects as go

from collage_dashboard.descriptions import AXIS_TITLES, describe
from collage_dashboard.figures.style import axis, base_figure, literal

__all__ = ["stack", "stack_height"]

_ROW_PIXELS, _TITLE_PIXELS, _AXIS_PIXELS, _TOP_PIXELS = 110, 17, 38, 18
_HELP_LETTERS: Final = 60


def stack_height(rows: int) -> int:
    """Pixels of a figure of so many rows."""
    return rows * _ROW_PIXELS + _AXIS_PIXELS + _TOP_PIXELS


def stack(rows: Mapping[str, go.Figure], over: str, *, subtitle: str = "") -> go.Figure:
    """The figures `rows`, by metric, each what `curves` made of it, from top to bottom over the axis `over`.

    `subtitle` stands beside the titles of measured metrics: whose they are.
    """
    figure = base_figure(
        [],
        revision=f"stack {over} {subtitle}",
        height=stack_height(len(rows)),
        margin={"l": 56, "r": 12, "t": _TOP_PIXELS, "b": _AXIS_PIXELS},
        hovermode="x",
        hoversubplots="axis",
        hoverdistance=-1,
        showlegend=False,
        xaxis=axis(AXIS_TITLES[over], anchor="free", position=0),
    )
    for place, (metric, own) in enumerate(rows.items()):
        _add_row(figure, metric, own, place, len(rows), subtitle)
    return figure


def _add_row(figure: go.Figure, metric: str, own: go.Figure, place: int, rows: int, subtitle: str) -> None:
    name = f"y{place + 1}" if place else "y"
    top, bottom = 1 - place / rows, 1 - (place + 1) / rows
    ceiling = top - _TITLE_PIXELS / _ROW_PIXELS / rows
    description = describe(metric)
    for trace in own.data:
        figure.add_trace(trace.update(yaxis=name))
    if own.data:
        scale: dict[str, Any] = own.layout.yaxis.to_plotly_json()
        # A drag over such a low chart zooms along the shared axis only.
        scale |= {
            "title": None,
            "domain": [bottom, ceiling],
            "fixedrange": True,
            "nticks": 4,
            "tickfont": {"size": 10},
        }
        figure.update_layout({name.replace("y", "yaxis"): scale})
    for shape in own.layout.shapes:
        figure.add_shape(shape.update(yref=shape.yref.replace("y", name, 1)))
    for note in own.layout.annotations:
        figure.add_annotation(note.update(y=bottom + note.y * (ceiling - bottom)))
    title = description.axis_title + (f" · {subtitle}" if subtitle and not description.scalar else "")
    explained = textwrap.wrap(" ".join(filter(None, (description.help, description.formula))), _HELP_LETTERS)
    figure.add_annotation(
        text=literal(title),
        hovertext="<br>".join(map(literal, explained)),
        font={"size": 12},
        showarrow=False,
        x=0,
        y=top,
        xref="paper",
        yref="paper",
        xanchor="left",
        yanchor="top",
        borderpad=0,
    )
