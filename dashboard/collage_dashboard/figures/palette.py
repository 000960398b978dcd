"""The one table of colours: a strategy keeps its colour on every page, for colour-blind readers too."""

from __future__ import annotations

from typing import Final

__all__ = [
    "ACCENT",
    "BELOW",
    "CLASS_COLOURS",
    "DASHES",
    "DIVERGING",
    "REFERENCE",
    "SEQUENTIAL",
    "STRATEGY_COLOURS",
    "WARNING",
    "strategy_colour",
    "translucent",
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
    "master-weights": "#009E73",
    "unknown": "#6B5A1E",
}
"""Okabe and Ito's colours where they last; the others keep their distance under protanopia and deuteranopia."""
REFERENCE: Final = "#6E6E6E"
"""Whatever keeps its weights in float32 or wider: the reference of a comparison."""
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
DIVERGING: Final = ((0.0, "#B2491A"), (0.25, "#E8A27C"), (0.5, "#E9ECEF"), (0.75, "#7FB2D6"), (1.0, "#0B5C94"))
"""Below the ideal, at it, above it. The middle is no colour of praise."""
SEQUENTIAL: Final = ((0.0, "#E9ECEF"), (0.35, "#E8A27C"), (0.7, "#C65F2B"), (1.0, "#7A2A08"))


def strategy_colour(strategy: str | None, dtype: str | None = None) -> str:
    """The colour of a strategy; plain storage in float32 or float64 is the reference."""
    if strategy in {None, "plain", "unknown"} and dtype in {"float32", "float64"}:
        return REFERENCE
    return STRATEGY_COLOURS.get(strategy or "unknown", STRATEGY_COLOURS["unknown"])


def translucent(colour: str, opacity: float) -> str:
    """'#RRGGBB' as an rgba() with `opacity`."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"
