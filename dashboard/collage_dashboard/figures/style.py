"""What all figures share: quiet axes, transparent paper (one figure serves light and dark), empty states."""

from __future__ import annotations

from html import escape
from typing import Any, Final

import plotly.graph_objects as go

__all__ = ["FONT", "GRAPH_CONFIG", "INK", "add_note", "axis", "base_figure", "empty_figure", "literal"]

FONT: Final = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
INK: Final = "#7A828A"
"""Readable on white and on near-black."""
GRID: Final = "rgba(128,136,144,0.18)"
GRAPH_CONFIG: Final[Any] = {
    "displaylogo": False,
    "displayModeBar": "hover",
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg"},
}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a quiet grid."""
    return {
        "title": {"text": title, "font": {"size": 12}, "standoff": 8},
        "gridcolor": GRID,
        "linecolor": GRID,
        "tickfont": {"size": 11},
        "zeroline": False,
        "automargin": True,
        **more,
    }


def base_figure(traces: list[Any], *, revision: str = "", height: int = 300, **layout: Any) -> go.Figure:
    """A figure of the house. While `revision` stays the same, a live update keeps the reader's zoom."""
    return go.Figure(
        data=traces,
        layout={
            "template": "none",
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": FONT, "size": 12, "color": INK},
            "margin": {"l": 56, "r": 12, "t": 8, "b": 44},
            "height": height,
            "hoverlabel": {
                "font": {"family": FONT, "size": 12, "color": "#F1F3F5"},
                "bgcolor": "#2B3035",
                "bordercolor": "#2B3035",
                "align": "left",
            },
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": INK, "activecolor": "#0072B2"},
            "uirevision": revision or "constant",
            **layout,
        },
    )


def empty_figure(text: str, *, height: int = 300) -> go.Figure:
    """A figure without data that says why."""
    figure = base_figure([], height=height, xaxis={"visible": False}, yaxis={"visible": False})
    return figure.add_annotation(text=literal(text), showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")


def add_note(figure: go.Figure, text: str) -> go.Figure:
    """A small line in the upper left corner, for what the curves themselves cannot show."""
    return figure.add_annotation(
        text=text, showarrow=False, x=0, y=1, xref="paper", yref="paper", xanchor="left", yanchor="top"
    )


def literal(text: str) -> str:
    """Text that a figure shows as it is: Plotly reads a part of HTML, and names are the user's."""
    return escape(text, quote=False)
