"""Layers over steps, one colour a cell: neutral at the metric's ideal, stronger the further away from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import plotly.graph_objects as go

from collage_dashboard.descriptions import AXIS_TITLES, Description, describe, finite
from collage_dashboard.figures.style import (
    DIVERGING,
    MARKED,
    SEQUENTIAL,
    add_note,
    axis,
    base_figure,
    empty_figure,
    literal,
)
from collage_monitor import wire

__all__ = ["REACH", "heatmap", "short_layer", "short_layers"]

ROW_PIXELS: Final = 18
SMALLEST_HEIGHT: Final = 240
LARGEST_HEIGHT: Final = 760
_LABEL_CHARACTERS = 34
REACH: Final = 0.5
"""How far from its ideal a metric has the full colour: fixed, so that a colour means the same in every heatmap."""
_SMALLEST_NORM = 1e-300


def heatmap(answer: wire.Heatmap, *, selected: str | None = None) -> go.Figure:
    """The heatmap of one metric; its height follows the number of layers up to a screen, then rows get thinner.

    A metric without an ideal is coloured by its logarithm. Undefined cells stay empty.
    """
    description = describe(answer.metric)
    height = min(max(SMALLEST_HEIGHT, ROW_PIXELS * len(answer.layers) + 90), LARGEST_HEIGHT)
    cells = [[finite(value) for value in row] for row in answer.values]
    known = [value for row in cells for value in row if value is not None]
    if not known:
        return empty_figure("no layer has a value yet", height=SMALLEST_HEIGHT)
    logarithmic = _is_logarithmic(description)
    gap = 1 if len(answer.steps) <= 80 and len(answer.layers) <= 60 else 0
    step = "step" if answer.first_steps == answer.steps else "merged up to step"
    on_steps = answer.axis == "step"
    places = answer.steps if on_steps else [finite(position) for position in answer.positions]
    if not on_steps:
        step = AXIS_TITLES[answer.axis]
    trace = go.Heatmap(
        x=places,
        y=answer.layers,
        z=[[_height_of(value, logarithmic) for value in row] for row in cells],
        customdata=cells if logarithmic else None,
        hovertemplate=f"%{{y}}<br>{step} %{{x}}<br>%{{{'customdata' if logarithmic else 'z'}:.4g}}<extra></extra>",
        colorbar=_colour_bar(description),
        xgap=gap,
        ygap=gap,
        hoverongaps=False,
        **_colours(description),
    )
    figure = base_figure(
        [trace],
        revision=f"{answer.metric} {answer.axis} {len(answer.layers)}",
        height=height,
        xaxis=axis(AXIS_TITLES[answer.axis], showgrid=False),
        yaxis=_layer_axis(answer.layers, height, selected),
    )
    if selected in answer.layers:
        place = answer.layers.index(selected)
        ends = {"x0": 0, "x1": 1, "xref": "x domain", "y0": place - 0.5, "y1": place + 0.5, "yref": "y"}
        figure.add_shape(type="rect", line={"color": MARKED, "width": 2}, **ends)
    beyond = sum(value is not None and finite(value) is None for row in answer.values for value in row)
    return add_note(figure, f"{beyond} cells are not finite") if beyond else figure


def short_layers(names: Sequence[str]) -> dict[str, str]:
    """The layers' names without what all of them begin and end with, cut in the middle where still long."""
    parts = [name.split(".") for name in names]
    least = min(map(len, parts), default=0) - 1
    first = 0
    while len(names) > 1 and first < least and len({own[first] for own in parts}) == 1:
        first += 1
    last = 0
    while len(names) > 1 and last < least - first and len({own[-1 - last] for own in parts}) == 1:
        last += 1
    found = {}
    for name, own in zip(names, parts, strict=True):
        text = ".".join(own[first : len(own) - last])
        half = _LABEL_CHARACTERS // 2
        found[name] = text if len(text) <= _LABEL_CHARACTERS else f"{text[: half - 1]}…{text[-half:]}"
    return found


def short_layer(name: str) -> str:
    """A layer's name cut from the left, where names resemble each other."""
    return name if len(name) <= _LABEL_CHARACTERS else "…" + name[-_LABEL_CHARACTERS + 1 :]


def _is_logarithmic(description: Description) -> bool:
    return description.ideal is None and description.unit != "octaves"


def _height_of(value: float | None, logarithmic: bool) -> float | None:
    if value is None:
        return None
    height = math.log10(max(abs(value), _SMALLEST_NORM)) if logarithmic else value
    return float(f"{height:.6g}")


def _colours(description: Description) -> dict[str, Any]:
    """A fixed scale for each metric with an ideal; what is beyond its ends has the colour of the end."""
    if description.ideal is None:
        return {"colorscale": "Cividis"}
    if description.ideal == 0.0:
        return {"colorscale": [list(stop) for stop in SEQUENTIAL], "zmin": 0.0, "zmax": 1.0}
    return {
        "colorscale": [list(stop) for stop in DIVERGING],
        "zmin": description.ideal - REACH,
        "zmax": description.ideal + REACH,
    }


def _colour_bar(description: Description) -> dict[str, Any]:
    title = f"log₁₀ {description.title}" if _is_logarithmic(description) else description.title
    return {"title": {"text": title, "side": "right"}, "thickness": 10, "outlinewidth": 0, "tickfont": {"size": 11}}


def _layer_axis(layers: list[str], height: int, selected: str | None) -> dict[str, Any]:
    every = max(1, math.ceil(len(layers) * 13 / max(height - 90, 1)))
    shown, short = layers[::every], short_layers(layers)
    texts = [literal(short[name]) for name in shown]
    if selected in layers:
        place = layers.index(selected)
        near = {layers[at] for at in range(max(place - every + 1, 0), min(place + every, len(layers)))}
        kept = [(name, text) for name, text in zip(shown, texts, strict=True) if name not in near]
        kept.append((selected, f"<b>▸ {literal(short_layer(selected))}</b>"))
        shown, texts = [name for name, _ in kept], [text for _, text in kept]
    return axis(
        "",
        type="category",
        tickmode="array",
        tickvals=shown,
        ticktext=texts,
        autorange="reversed",
        showgrid=False,
    )
