"""The style of all figures: colours (a strategy keeps its own on every page), quiet axes, empty figures.

All figures take their colours and axes from here; no page sets any of its own.
"""

from __future__ import annotations

from hashlib import blake2b
from html import escape
from typing import Any, Final

import plotly.graph_objects as go

__all__ = [
    "ACCENT",
    "BELOW",
    "CLASS_COLOURS",
    "DASHES",
    "DIVERGING",
    "GRAPH_CONFIG",
    "INK",
    "MARKED",
    "REFERENCE",
    "SEQUENTIAL",
    "STRATEGY_COLOURS",
    "WARNING",
    "add_note",
    "axis",
    "base_figure",
    "digest",
    "empty_figure",
    "literal",
    "stepped",
    "strategy_colour",
    "translucent",
    "with_subtitle",
]

STRATEGY_COLOURS: Final = {
    "plain": "#D55E00",
    "stochastic": "#E69F00",
    "kahan": "#CC79A7",
    "light": "#56B4E9",
    "light-stochastic": "#8FD14F",
    "plus": "#0072B2",
    "full": "#4B1FA8",
    "fp32-states": "#9C1038",
    "split-master": "#38B85D",
    "split-master-16bit": "#0B16F9",
    "split-master-8bit": "#6B63E0",
    "split-24bit-8bit": "#5C1C56",
    "coupled-9": "#6A4CF9",
    "coupled-8": "#343183",
    "coupled-7": "#7899FD",
    "integer-remainder": "#F88C9D",
    "master-weights": "#009E73",
    "unknown": "#6B5A1E",
}
"""Okabe and Ito's colours where they last; the others keep their distance under protanopia and deuteranopia."""
REFERENCE: Final = "#6E6E6E"
"""Whatever keeps its weights in float32 or wider: the reference of a comparison."""
_DARKER: Final = 0.45
"""So far apart are two dtypes of one strategy that colour-blind readers tell them from each other and from all."""
ACCENT: Final = "#0072B2"
WARNING: Final = "#D55E00"
BELOW: Final = "#D55E00"
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
CLASS_COLOURS: Final = {
    "faithful": "#0072B2",
    "distorted": "#E69F00",
    "lost": "#D55E00",
    "idle": "#B8B8B8",
    "nonfinite": "#CC79A7",
}
_PALE: Final = "rgba(134,142,150,0.16)"
"""The colour of nothing to say: quiet on white and on near-black."""
MARKED: Final = "#9C36B5"
DIVERGING: Final = (
    (0.0, "#B2491A"),
    (0.25, "#D5804F"),
    (0.45, "#EBA985"),
    (0.5, _PALE),
    (0.55, "#94BEDC"),
    (0.75, "#4E93C2"),
    (1.0, "#0B5C94"),
)
"""Below the ideal, at it, above it. The middle is no colour of praise; a tenth of the way off nothing is pale."""
SEQUENTIAL: Final = ((0.0, _PALE), (0.35, "#E8A27C"), (0.7, "#C65F2B"), (1.0, "#7A2A08"))


def stepped(bound: float) -> dict[str, list[list[Any]]]:
    """Scales of a share that is bad from `bound` on, for light and dark: pale below it, a step there, and then the
    further from the page's ground the worse."""
    ends = {
        "light": ("#F1F4F8", "#CBD5E4", "#F8B26A", "#C65F2B", "#7A2A08"),
        "dark": ("#2A3036", "#4A586B", "#A5501C", "#EE8A3C", "#FFE9C7"),
    }
    middle = (1.0 + bound) / 2
    return {
        scheme: [[0.0, none], [bound, below], [bound, begins], [middle, half], [1.0, all_of_it]]
        for scheme, (none, below, begins, half, all_of_it) in ends.items()
    }


def strategy_colour(strategy: str | None, dtype: str | None = None) -> str:
    """The colour of a strategy, darker in float16; plain storage in float32 or float64 is the reference."""
    if strategy in {None, "plain", "unknown"} and dtype in {"float32", "float64"}:
        return REFERENCE
    colour = STRATEGY_COLOURS.get(strategy or "unknown", STRATEGY_COLOURS["unknown"])
    if dtype != "float16":
        return colour
    return "#" + "".join(f"{round(_DARKER * int(colour[place : place + 2], 16)):02X}" for place in (1, 3, 5))


def translucent(colour: str, opacity: float) -> str:
    """'#RRGGBB' as an rgba() with `opacity`."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


_FONT: Final = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
INK: Final = "#737C85"
"""Readable on white and on near-black."""
_GRID: Final = "rgba(128,136,144,0.18)"
GRAPH_CONFIG: Final[Any] = {
    "displaylogo": False,
    "displayModeBar": "hover",
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg"},
}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a quiet grid; its numbers are written as all others are: 12,000."""
    return {
        "title": {"text": title, "font": {"size": 12}, "standoff": 8},
        "gridcolor": _GRID,
        "linecolor": _GRID,
        "tickfont": {"size": 11},
        "zeroline": False,
        "automargin": True,
        "separatethousands": True,
        **more,
    }


def base_figure(traces: list[Any], *, revision: str = "", height: int = 300, **layout: Any) -> go.Figure:
    """A figure in the dashboard's style. While `revision` stays the same, a live update keeps the reader's zoom."""
    return go.Figure(
        data=traces,
        layout={
            "template": "none",
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": _FONT, "size": 12, "color": INK},
            "margin": {"l": 56, "r": 12, "t": 8, "b": 44},
            "height": height,
            "hoverlabel": {
                "font": {"family": _FONT, "size": 12, "color": "#F1F3F5"},
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
    """A small line in the upper left corner, for facts that the curves cannot show."""
    return figure.add_annotation(
        text=text, showarrow=False, x=0, y=1, xref="paper", yref="paper", xanchor="left", yanchor="top"
    )


def digest(shown: Any) -> str:
    """What changes with a figure, rows or a component: what is shown already need not travel again."""
    written = shown.to_json() if isinstance(shown, go.Figure) else repr(shown)
    return blake2b(str(written).encode(), digest_size=12).hexdigest()


def with_subtitle(figure: go.Figure, text: str) -> go.Figure:
    """A line above the chart that says what it shows: a layer, steps."""
    figure.update_layout(
        title={"text": literal(text), "font": {"size": 12}, "x": 0, "xanchor": "left", "y": 0.99, "yanchor": "top"}
    )
    return figure.update_layout(margin={"t": figure.layout.margin.t + 20})


def literal(text: str) -> str:
    """Text that a figure shows as it is: Plotly reads a part of HTML, and names are the user's."""
    return escape(text, quote=False)
