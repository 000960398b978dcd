"""Bytes against loss: one point per strategy, with 95 % intervals over seeds.

The comparison's page and the report draw it from `collage_monitor.strategy_results`
(`tests/dashboard/test_strategies.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import plotly.graph_objects as go

from collage_dashboard.descriptions import describe, interval
from collage_dashboard.figures.style import INK, add_note, axis, base_figure, empty_figure, literal, strategy_colour
from collage_monitor.diagnosis import NO_PROBLEM
from collage_monitor.number_text import value_text
from collage_monitor.seeds import Estimate
from collage_monitor.strategies import strategy_title
from collage_monitor.strategy_results import StrategyResult

__all__ = ["tradeoff"]

_PLOT_PIXELS: Final = (480.0, 230.0)
"""A small plot's width and height: in a larger one labels have more room."""
_DOT, _LETTER_PIXELS, _LINE_PIXELS = 6.0, 6.3, 13.0
_TOUCH_PIXELS: Final = 2.0
"""So far boxes may reach into each other: letters do not fill theirs."""
_NEAR_PIXELS: Final = 24.0
"""A label stands on the other side of its point than one as near as this, which it could be taken for."""
_LEAST_REACH: Final = 0.02
"""Half of an axis, as a share of the values on it, at least."""
_PLACES: Final = (
    "top right",
    "top left",
    "bottom right",
    "bottom left",
    "middle right",
    "middle left",
    "top center",
    "bottom center",
)
_Range = tuple[float, float]
_Box = tuple[float, float, float, float]
"""In pixels: left, bottom, right, top."""
_EXACT: Final = Estimate(0.0, 1)


@dataclass(frozen=True)
class _Point:
    result: StrategyResult
    title: str
    cost: Estimate
    loss: Estimate


def tradeoff(results: Sequence[StrategyResult], *, chosen: StrategyResult | None = None) -> go.Figure:
    """Loss above the reference against bytes a parameter; without a reference the loss itself. `chosen` has a ring.

    Strategies with a problem are hollow.
    """
    referred = any(result.is_reference for result in results)
    points = []
    for result in results:
        title = _short_title(result, results)
        spent, loss = result.bytes_per_parameter, result.loss
        if referred:
            loss = _EXACT if result.is_reference and result.loss else result.gap
        if spent is not None and loss is not None:
            points.append(_Point(result, title, spent, loss))
    if not points:
        known = any(result.bytes_per_parameter is not None for result in results)
        missing = "no loss to compare yet" if known else "no run has reported its bytes per parameter"
        return empty_figure(missing)
    points.sort(key=lambda point: point.result != chosen)
    across, up = (_room([getattr(point, name) for point in points]) for name in ("cost", "loss"))
    places = _label_places(points, across, up)
    figure = base_figure(
        [_trace(point, place, point.result == chosen) for point, place in zip(points, places, strict=True)],
        revision="bytes",
        hovermode="closest",
        showlegend=False,
        margin={"l": 56, "r": 16, "t": 16, "b": 44},
        xaxis=axis(describe("bytes_per_parameter").axis_title, range=list(across)),
        yaxis=axis("loss above the reference" if referred else "loss", range=list(up)),
    )
    if referred:
        figure.add_hline(y=0, line={"color": INK, "width": 1, "dash": "dot"})
    left_out = len(results) - len(points)
    words = "strategy is" if left_out == 1 else "strategies are"
    return add_note(figure, f"{left_out} {words} left out: a number is missing") if left_out else figure


def _short_title(result: StrategyResult, results: Sequence[StrategyResult]) -> str:
    """Without the dtype where the strategy is there in one: labels are many, and the room is small."""
    alike = [other for other in results if other.strategy == result.strategy]
    return result.title if len(alike) > 1 else strategy_title(result.strategy)


def _label(point: _Point, is_chosen: bool) -> str:
    title = literal(point.title)
    return f"<b>{title}</b>" if is_chosen else title


def _trace(point: _Point, place: str | None, is_chosen: bool) -> go.Scatter:
    colour = strategy_colour(point.result.strategy, point.result.dtype)
    is_hollow = point.result.health not in NO_PROBLEM
    return go.Scatter(
        x=[point.cost.value],
        y=[point.loss.value],
        name=literal(point.title),
        mode="markers+text" if place else "markers",
        text=[_label(point, is_chosen)],
        textposition=place or "top center",
        textfont={"size": 11},
        cliponaxis=False,
        marker={
            "color": colour,
            "size": 13 if is_chosen else 10,
            "symbol": ("diamond" if point.result.is_reference else "circle") + ("-open" if is_hollow else ""),
            "line": {"color": INK, "width": 2.5 if is_chosen else 0},
        },
        error_x=_bar(point.cost, colour),
        error_y=_bar(point.loss, colour),
        customdata=[_hover(point)],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _bar(estimate: Estimate, colour: str) -> dict[str, Any] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return {
        "type": "data",
        "array": [estimate.high - estimate.value],
        "color": colour,
        "thickness": 1.5,
        "width": 4,
    }


def _hover(point: _Point) -> str:
    lines = [f"<b>{literal(point.result.title)}</b>"]
    for name, key, found in (("loss", "loss", point.loss), ("cost", "", point.cost)):
        bounds = interval(key, found.low, found.high)
        lines.append(f"{name} {value_text(key, found.value)}{f' (95 %: {bounds})' if bounds else ''}")
    runs = len(point.result.runs)
    return "<br>".join([*lines, f"{runs} {'run' if runs == 1 else 'runs'}"])


def _room(estimates: Sequence[Estimate]) -> _Range:
    """The ends of an axis with room beside its outermost points; a speck of a difference does not look large on it.

    Intervals count up to the reach of the points: two seeds' are so wide that nothing else could be seen. What goes
    beyond is cut at the edge.
    """
    values = [found.value for found in estimates]
    middle, reach = (min(values) + max(values)) / 2, (max(values) - min(values)) / 2
    reach = max(reach, _LEAST_REACH * abs(middle), _LEAST_REACH * max(abs(value) for value in values), 1e-9)
    ends = [end for found in estimates for end in (found.low, found.high) if end is not None]
    low = max(min([*values, *ends]), middle - 2 * reach)
    high = min(max([*values, *ends]), middle + 2 * reach)
    margin = 0.25 * reach
    return min(low, middle - reach) - margin, max(high, middle + reach) + margin


def _label_places(points: Sequence[_Point], across: _Range, up: _Range) -> list[str | None]:
    """The position of each point's label, so that none covers another label or a point, or seems to belong to
    another point if that can be avoided; None where there is no room: the point tells its name on hover.

    The chosen strategy's label is placed first.
    """
    centres = [
        (
            (point.cost.value - across[0]) / (across[1] - across[0]) * _PLOT_PIXELS[0],
            (point.loss.value - up[0]) / (up[1] - up[0]) * _PLOT_PIXELS[1],
        )
        for point in points
    ]
    taken = [(x - _DOT, y - _DOT, x + _DOT, y + _DOT) for x, y in centres]
    found: list[str | None] = []
    for point, (x, y) in zip(points, centres, strict=True):
        crowded = {"right" if right > x else "left" for right, _ in centres if 0 < abs(right - x) < _NEAR_PIXELS}
        places = [place for place in _PLACES if place.split()[1] not in crowded]
        places += [place for place in _PLACES if place not in places]
        boxes = {place: _box(x, y, len(point.title), place) for place in places}
        free = [
            place
            for place, box in boxes.items()
            if box[0] >= 0 and box[2] <= _PLOT_PIXELS[0] and not any(_overlap(box, other) for other in taken)
        ]
        own = [place for place in free if _is_nearest((x, y), boxes[place], centres)]
        chosen = next(iter(own or free), None)
        found.append(chosen)
        if chosen:
            taken.append(boxes[chosen])
    return found


def _is_nearest(own: Sequence[float], box: Sequence[float], centres: Sequence[Sequence[float]]) -> bool:
    """Whether no other point is nearer to a label than its own; those beside that one do not count."""
    middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    apart = [other for other in centres if math.dist(own, other) > _NEAR_PIXELS]
    return all(math.dist(own, middle) <= math.dist(other, middle) for other in apart)


def _box(x: float, y: float, characters: int, place: str) -> _Box:
    """The rectangle of a label."""
    vertical, _, side = place.partition(" ")
    width, height = characters * _LETTER_PIXELS, _LINE_PIXELS
    left = {"left": x - _DOT - width, "right": x + _DOT, "center": x - width / 2}[side]
    bottom = {"top": y + _DOT, "middle": y - height / 2, "bottom": y - _DOT - height}[vertical]
    return left, bottom, left + width, bottom + height


def _overlap(one: _Box, other: _Box) -> bool:
    ends = ((one[0], other[2]), (other[0], one[2]), (one[1], other[3]), (other[1], one[3]))
    return all(begin < end - _TOUCH_PIXELS for begin, end in ends)
