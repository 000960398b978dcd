"""Layers over steps, one colour a cell: neutral at the metric's ideal, stronger the further away from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from collage_dashboard.descriptions import AXIS_TITLES, Description, describe, short_name
from collage_dashboard.figures.picture import coloured, rgb
from collage_dashboard.figures.style import (
    DIVERGING,
    MARKED,
    SEQUENTIAL,
    add_note,
    axis,
    base_figure,
    empty_figure,
    literal,
    stepped,
)
from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from collage_monitor.diagnosis import finite

__all__ = ["REACH", "block_of", "heatmap", "short_layer", "short_layers", "thumbnails"]

ROW_PIXELS: Final = 18
SMALLEST_HEIGHT: Final = 240
LARGEST_HEIGHT: Final = 900
_LABEL_CHARACTERS = 34
REACH: Final = 0.5
"""How far from its ideal a metric has the full colour: fixed, so that a colour means the same in every heatmap."""
_SMALLEST_NORM = 1e-300
_GROUP = "▾ "


def heatmap(
    answer: wire.Heatmap, *, selected: str | None = None, groups: Mapping[str, str] | None = None
) -> go.Figure:
    """The heatmap of one metric; its height follows the number of layers up to a screen, then rows get thinner.

    A metric without an ideal is coloured by its logarithm. Undefined cells stay empty. `groups`, by layer: layers
    of one group stand together under its name, groups and layers in the answer's order. What a cell says on hover
    is written in the browser, by `assets/figures.js`: here it would be as large as the heatmap once more. Cells are
    float64 [rows, steps], NaN where there is none; `growth.as_sent` writes them for the browser.
    """
    description = describe(answer.metric)
    rows = _rows(answer.layers, groups)
    height = min(max(SMALLEST_HEIGHT, ROW_PIXELS * len(rows) + 90), LARGEST_HEIGHT)
    by_layer = dict(zip(answer.layers, answer.values, strict=True))
    no_cell = [None] * len(answer.steps)
    cells = np.array([by_layer.get(row, no_cell) for row in rows], dtype=np.float64)
    beyond = int(np.isinf(cells).sum()) + sum(value == "NaN" for row in answer.values for value in row)
    cells = description.drawn_scale * np.where(np.isfinite(cells), cells, np.nan)
    if np.isnan(cells).all():
        return empty_figure("no layer has a value yet", height=SMALLEST_HEIGHT)
    logarithmic = _is_logarithmic(description)
    gap = 1 if len(answer.steps) <= 80 and len(rows) <= 60 else 0
    step = "step" if answer.first_steps == answer.steps else "merged up to step"
    on_steps = answer.axis == "step"
    places = answer.steps if on_steps else [finite(position) for position in answer.positions]
    if not on_steps:
        step = AXIS_TITLES[answer.axis]
    bound = _bound(answer.metric)
    scales = stepped(bound) if bound else {}
    form = "share" if description.unit == "share" else "ratio" if description.ideal == 1.0 else "number"
    trace = go.Heatmap(
        x=places,
        y=list(rows),
        z=_heights(cells, logarithmic),
        customdata=cells if logarithmic else None,
        hovertemplate=f"%{{y}}<br>{step} %{{x:,}}<br>%{{text}}<extra></extra>",
        meta={"form": form, **scales, **({"bound": bound} if bound and on_steps else {})},
        colorbar=_colour_bar(description),
        xgap=gap,
        ygap=gap,
        hoverongaps=False,
        **{**_colours(description), **({"colorscale": scales["light"]} if scales else {})},
    )
    figure = base_figure(
        [trace],
        revision=f"{answer.metric} {answer.axis} {len(rows)}",
        height=height,
        xaxis=axis(AXIS_TITLES[answer.axis], showgrid=False),
        yaxis=_layer_axis(rows, height, selected),
    )
    if selected in rows:
        place = list(rows).index(selected)
        ends = {"x0": 0, "x1": 1, "xref": "x domain", "y0": place - 0.5, "y1": place + 0.5, "yref": "y"}
        figure.add_shape(type="rect", line={"color": MARKED, "width": 2}, **ends)
    return add_note(figure, f"{beyond} cells are not finite") if beyond else figure


def thumbnails(answer: wire.Heatmap) -> dict[str, NDArray[np.uint8]]:
    """The cells of a share lost as small pictures RGBA [rows, columns, 4], for the light ground and the dark.

    A pixel a cell, clear where it is undefined; of more layers than `_THUMBNAIL_ROWS` the worst of neighbours. No
    picture where nothing is known.
    """
    cells = np.array(answer.values, dtype=np.float64).reshape(len(answer.layers), len(answer.steps))
    known = np.where(np.isfinite(cells), cells, -1.0)
    if not known.size or known.max() < 0:
        return {}
    parts = np.array_split(known, min(len(known), _THUMBNAIL_ROWS))
    worst = np.stack([part.max(axis=0) for part in parts])
    levels = np.where(worst < 0, np.nan, worst)
    return {
        scheme: coloured(levels, [(at, rgb(colour)) for at, colour in stops])
        for scheme, stops in stepped(_bound(answer.metric) or 1.0).items()
    }


_THUMBNAIL_ROWS: Final = 64


def block_of(layer: str) -> str:
    """The block that a layer is part of, 'layers.3' of 'layers.3.mlp.weight'; else its outermost module."""
    parts = layer.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def _rows(layers: Sequence[str], groups: Mapping[str, str] | None) -> dict[str, str]:
    """Label by row: each layer, and before the layers of a group a row with its name, which holds no cell."""
    if groups is None:
        return {name: literal(text) for name, text in short_layers(layers).items()}
    members: dict[str, list[str]] = {}
    for name in layers:
        members.setdefault(groups.get(name) or "unknown", []).append(name)
    rows: dict[str, str] = {}
    for group, names in members.items():
        rows[_GROUP + group] = f"<b>{literal(short_layer(group))}</b>"
        rows |= {name: literal(text) for name, text in short_layers(names).items()}
    return rows


def short_layers(names: Sequence[str]) -> dict[str, str]:
    """The layers' names without their common beginning and end, cut in the middle if still long."""
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
        found[name] = short_name(".".join(own[first : len(own) - last]), _LABEL_CHARACTERS)
    return found


def short_layer(name: str) -> str:
    """A layer's name cut from the left, where names resemble each other."""
    return name if len(name) <= _LABEL_CHARACTERS else "…" + name[-_LABEL_CHARACTERS + 1 :]


def _is_logarithmic(description: Description) -> bool:
    return description.ideal is None and description.unit != "octaves"


def _heights(cells: NDArray[np.float64], logarithmic: bool) -> NDArray[np.float64]:
    """What is drawn of the cells, in six digits: more only take longer to send."""
    heights = np.log10(np.maximum(np.abs(cells), _SMALLEST_NORM)) if logarithmic else cells
    with np.errstate(divide="ignore"):
        digits = 5 - np.floor(np.log10(np.abs(heights)))
    scale = 10.0 ** np.clip(np.nan_to_num(np.abs(digits), posinf=0.0), 0, 300)
    rounded = np.where(digits >= 0, np.round(heights * scale) / scale, np.round(heights / scale) * scale)
    return np.where(heights == 0, 0.0, rounded)


def _colours(description: Description) -> dict[str, Any]:
    """A fixed scale for each metric with an ideal; values beyond an end have its colour."""
    if description.ideal is None:
        return {"colorscale": "Cividis"}
    if description.ideal == 0.0:
        return {"colorscale": [list(stop) for stop in SEQUENTIAL], "zmin": 0.0, "zmax": description.drawn_scale}
    return {
        "colorscale": [list(stop) for stop in DIVERGING],
        "zmin": description.drawn_scale * (description.ideal - REACH),
        "zmax": description.drawn_scale * (description.ideal + REACH),
    }


def _bound(metric: str) -> float | None:
    """Beyond which share lost an alert fires: there the scale has its step, of which `assets/figures.js` takes the
    page's, light or dark, and from there on it tells since when."""
    bounds = [
        condition.threshold
        for alert in ALERTS.values()
        for condition in alert.drawn
        if metric == "lost_update_ratio" and condition.series == f"collage_{metric}"
    ]
    return min(bounds, default=None)


def _colour_bar(description: Description) -> dict[str, Any]:
    logarithmic = _is_logarithmic(description)
    title = f"log₁₀ {description.title}" if logarithmic else description.title
    suffix = "" if logarithmic else description.tick_suffix
    shape = {"thickness": 10, "outlinewidth": 0, "tickfont": {"size": 11}, "ticksuffix": suffix}
    return {"title": {"text": title, "side": "right"}, **shape}


def _layer_axis(rows: Mapping[str, str], height: int, selected: str | None) -> dict[str, Any]:
    """Labels that do not touch: the selected layer's first, then groups, then as many layers as fit between."""
    every = max(1, math.ceil(len(rows) * 13 / max(height - 90, 1)))
    names = list(rows)
    wanted = sorted(range(len(names)), key=lambda at: (names[at] != selected, not names[at].startswith(_GROUP), at))
    kept: list[int] = []
    for at in wanted:
        if all(abs(at - other) >= every for other in kept):
            kept.append(at)
    kept.sort()
    return axis(
        "",
        type="category",
        tickmode="array",
        tickvals=[names[at] for at in kept],
        ticktext=[
            f"<b>▸ {literal(short_layer(selected))}</b>" if names[at] == selected else rows[names[at]]
            for at in kept
        ],
        autorange="reversed",
        showgrid=False,
    )
