"""Curves of one metric: intervals as bands, undefined as gaps, partial points as open circles.

A function from data to figure, as all of `figures/`: the page's callbacks fetch, this draws
(`tests/dashboard/figures/test_series.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import plotly.graph_objects as go

from collage_dashboard.descriptions import AXIS_TITLES, Description, describe, interval
from collage_dashboard.figures.style import (
    INK,
    WARNING,
    add_note,
    axis,
    base_figure,
    empty_figure,
    literal,
    translucent,
)
from collage_monitor import wire
from collage_monitor.alerts import Condition
from collage_monitor.diagnosis import finite
from collage_monitor.number_text import value_text

__all__ = [
    "NamedCurve",
    "SMALLEST_SPAN",
    "curves",
    "mark_events",
    "mark_steps",
    "shade_beyond",
    "smooth",
]

SMALLEST_SPAN: Final = 0.01
"""A ratio's axis never shows less than this around its curves: rounding noise must not look like an event."""
_FIXED_SCALES: Final = {"edq_ratio": (0.0, 1.1), "lost_update_ratio": (0.0, 100.0)}
"""As drawn: from nothing to all of it. What lies beyond widens the scale."""
_FEW_POINTS = 25
_MARK_PIXELS = 16
_THINNEST, _WIDER, _WIDEST = 1.8, 0.4, 3.4
Values = list[float | None]


@dataclass(frozen=True)
class NamedCurve:
    """One line: a series with the name, colour and dash under which its run appears everywhere."""

    name: str
    colour: str
    series: wire.Series
    dash: str = "solid"


_EXACT: Final = frozenset({"learning_rate"})
"""Logged scalars without noise: smoothing would bend them."""


def curves(
    metric: str,
    lines: Sequence[NamedCurve],
    *,
    smoothing: float = 0.0,
    height: int = 300,
    scale: Literal["linear", "log"] = "linear",
    is_fixed: bool = False,
) -> go.Figure:
    """The curves of `metric`; `smoothing` in [0, 1) applies to dense logged scalars, raw values behind. The page
    has one legend for all of its charts. is_fixed: what has a scale that is the same for every run stands on it.

    Earlier lines are drawn wider, so that they stay visible where a later one covers them. A logarithmic `scale`
    says how many points it cannot show.
    """
    description = describe(metric)
    drawable = [line for line in lines if any(finite(value) is not None for value in line.series.values)]
    if not drawable:
        return empty_figure(_why_empty(metric, lines), height=height)
    shown = [value for line in drawable for value in _drawn(line.series.values, description) if value is not None]
    logarithmic = scale == "log" and max(shown) > 0
    weight = smoothing if description.scalar and metric not in _EXACT else 0.0
    widths = [_THINNEST + _WIDER * (len(drawable) - 1 - place) for place in range(len(drawable))]
    traces = [
        trace
        for line, width in zip(drawable, widths, strict=True)
        for trace in _traces(line, description, weight, min(width, _WIDEST))
    ]
    first = drawable[0].series
    span = _least_span(shown, description)
    values: dict[str, Any] = {"autorangeoptions": {"include": span}} if span else {}
    if is_fixed and (ends := _fixed_ends(metric, shown)):
        values = {"autorangeoptions": {"include": ends, "clipmin": ends[0], "clipmax": ends[1]}}
    elif _is_flat(drawable):
        ends = span or [shown[0] - abs(shown[0]) / 2, shown[0] + abs(shown[0]) / 2]
        values = {"autorangeoptions": {"clipmin": ends[0], "clipmax": ends[1]}} if ends[0] < ends[1] else {}
    values = {"type": "log"} if logarithmic else values
    figure = base_figure(
        traces,
        revision=f"{metric} {first.axis} {first.layer}",
        height=height,
        hovermode="x unified" if len(lines) > 1 else "x",
        xaxis=axis(AXIS_TITLES[first.axis]),
        yaxis=axis(description.axis_title, ticksuffix=description.tick_suffix, **values),
        showlegend=False,
    )
    if description.ideal is not None and not (logarithmic and description.ideal <= 0):
        figure.add_hline(
            y=description.drawn_scale * description.ideal, line={"color": INK, "width": 1, "dash": "dot"}
        )
    beyond = [step for line in lines for step in _not_finite(line.series)]
    below = sum(value <= 0 for value in shown) if scale == "log" else 0
    notes = [f"{len(beyond):,} points are not finite, the first at step {min(beyond):,}"] if beyond else []
    notes += [f"{below:,} points are 0 or negative: a logarithm has no place for them"] if below else []
    return add_note(figure, "<br>".join(notes)) if notes else figure


def series_of(answer: wire.Series, metric: str) -> wire.Series:
    """The series of one of the metrics that an answer holds."""
    return answer if answer.metric == metric else (answer.more or {})[metric]


def mark_events(figure: go.Figure, marks: Sequence[tuple[float, str]]) -> go.Figure:
    """A thin line at each of these places on the x axis; on hover, its handle above the curve names it."""
    for place, text in marks:
        line = {"color": INK, "width": 1, "dash": "dashdot"}
        figure.add_shape(type="line", x0=place, x1=place, y0=0, y1=1, yref="y domain", line=line)
        figure.add_annotation(
            x=place,
            y=1,
            yref="paper",
            text="▾",
            hovertext=literal(text),
            showarrow=False,
            yanchor="bottom",
            borderpad=0,
        )
    room = _MARK_PIXELS if marks else 0
    return figure.update_layout(margin={"t": figure.layout.margin.t + room})


def shade_beyond(figure: go.Figure, condition: Condition, drawn_scale: float = 1.0) -> go.Figure:
    """The figure with what is beyond the condition's threshold shaded.

    drawn_scale: that of the figure's metric.
    Where the curve stays further away than its own height there is no band: it would flatten the curve. On a scale
    that is the same for every run it goes to the scale's end.
    """
    shown = [float(value) for trace in figure.data for value in trace.y or () if value is not None]
    logarithmic = figure.layout.yaxis.type == "log"
    shown = [value for value in shown if math.isfinite(value) and (value > 0 or not logarithmic)]
    if not shown:
        return figure
    side, bound = condition.comparison, drawn_scale * condition.threshold
    low, high = _ends_of(figure, shown)
    height = max(high - low, drawn_scale * SMALLEST_SPAN)
    if not (low - height <= bound if side == "<" else bound <= high + height) or (logarithmic and bound <= 0):
        return figure
    edge = min(low, bound - height / 8) if side == "<" else max(high, bound + height / 8)
    edge = max(edge, bound / 2) if logarithmic and edge <= 0 else edge
    ends = sorted((edge, bound))
    figure.add_shape(
        type="rect",
        xref="x domain",
        x0=0,
        x1=1,
        yref="y",
        y0=ends[0],
        y1=ends[1],
        fillcolor=translucent(WARNING, 0.1),
        line={"width": 0},
        layer="below",
    )
    return figure


def _ends_of(figure: go.Figure, shown: Sequence[float]) -> tuple[float, float]:
    """Both ends of the scale where it is fixed, else of what is shown."""
    fixed = figure.layout.yaxis.autorangeoptions.include
    ends = [*shown, *(fixed if figure.layout.yaxis.autorangeoptions.clipmax is not None and fixed else ())]
    return min(ends), max(ends)


def mark_steps(figure: go.Figure, marks: Sequence[tuple[int, str]]) -> go.Figure:
    """A line at each of these steps of a figure over steps; their names stand above it, out of the curves' way."""
    ends = [float(at) for trace in figure.data for at in (trace.x or ()) if at is not None]
    middle = (min(ends) + max(ends)) / 2 if ends else 0.0
    names: dict[int, list[str]] = {}
    for step, name in marks:
        names.setdefault(step, []).append(name)
    for place, (step, said) in enumerate(names.items()):
        figure.add_vline(x=step, line={"color": INK, "width": 1.5, "dash": "dash"})
        figure.add_annotation(
            x=step,
            y=1,
            yref="paper",
            yshift=_MARK_PIXELS * place,
            text=literal(f"{', '.join(said)} at {step:,}"),
            showarrow=False,
            xanchor="right" if step > middle else "left",
            yanchor="bottom",
        )
    return figure.update_layout(margin={"t": figure.layout.margin.t + _MARK_PIXELS * len(names)})


def smooth(values: Values, weight: float) -> Values:
    """Exponential moving average with the start corrected for its missing past; a gap stays a gap."""
    mean, mass = 0.0, 0.0
    smoothed: Values = []
    for value in values:
        if value is None:
            smoothed.append(None)
            continue
        mean, mass = weight * mean + (1 - weight) * value, weight * mass + (1 - weight)
        smoothed.append(mean / mass)
    return smoothed


def _traces(line: NamedCurve, description: Description, smoothing: float, width: float) -> Iterator[go.Scatter]:
    series = line.series
    positions = [finite(position) for position in series.positions]
    values = _drawn(series.values, description)
    partial = _partial(series)
    whole = [None if torn else value for value, torn in zip(values, partial, strict=True)]
    yield from _band(line, description, positions, partial)
    if smoothing and sum(value is not None for value in whole) > _FEW_POINTS:
        yield _faint(line, positions, whole)
        whole = smooth(whole, smoothing)
    sizes = _marker_sizes(whole)
    yield go.Scatter(
        x=positions,
        y=whole,
        name=literal(line.name),
        legendgroup=line.name,
        mode="lines+markers" if any(sizes) else "lines",
        line={"color": line.colour, "width": width, "dash": line.dash},
        marker={"size": sizes},
        connectgaps=False,
        customdata=_hover(series),
        hovertemplate="%{customdata}",
    )
    if any(partial):
        yield _partial_points(
            line, positions, [v if torn else None for v, torn in zip(values, partial, strict=True)]
        )


def _drawn(values: Sequence[wire.Number | None], description: Description) -> Values:
    """The values as a figure has them, shares in percent; undefined and non-finite ones are None."""
    return [None if (plain := finite(value)) is None else description.drawn_scale * plain for value in values]


def _faint(line: NamedCurve, positions: Values, values: Values) -> go.Scatter:
    return go.Scatter(
        x=positions,
        y=values,
        name=literal(f"{line.name}, not smoothed"),
        legendgroup=line.name,
        mode="lines",
        line={"color": line.colour, "width": 1},
        opacity=0.3,
        connectgaps=False,
        showlegend=False,
        hoverinfo="skip",
    )


def _marker_sizes(values: Values) -> list[float]:
    """Markers for a short curve; in a long one only for points without a neighbour, which no line would show."""
    few = sum(value is not None for value in values) <= _FEW_POINTS
    padded = [None, *values, None]
    return [
        5.0 if few or (before is None and after is None) else 0.0
        for before, after in zip(padded[:-2], padded[2:], strict=True)
    ]


def _partial_points(line: NamedCurve, positions: Values, values: Values) -> go.Scatter:
    return go.Scatter(
        x=positions,
        y=values,
        name=literal(f"{line.name} (partial)"),
        legendgroup=line.name,
        mode="markers",
        marker={"symbol": "circle-open", "color": line.colour, "size": 7},
        showlegend=False,
        customdata=[value_text(line.series.metric, value) for value in line.series.values],
        hovertemplate="%{customdata}, not all ranks reported<extra></extra>",
    )


def _band(
    line: NamedCurve, description: Description, positions: Values, partial: Sequence[bool]
) -> Iterator[go.Scatter]:
    series = line.series
    if series.low is None or series.high is None:
        return
    x: Values = []
    y: Values = []
    lows, highs = _drawn(series.low, description), _drawn(series.high, description)
    for start, stop in _stretches(positions, lows, highs, partial):
        around = [*range(start, stop), *reversed(range(start, stop))]
        edge = [*lows[start:stop], *reversed(highs[start:stop])]
        x += [*(positions[place] for place in around), positions[start], None]
        y += [*edge, lows[start], None]
    if x:
        yield go.Scatter(
            x=x,
            y=y,
            name=literal(f"{line.name}, 95 % interval"),
            legendgroup=line.name,
            mode="lines",
            line={"width": 0},
            fill="toself",
            fillcolor=translucent(line.colour, 0.12),
            hoverinfo="skip",
            showlegend=False,
        )


def _stretches(
    positions: Values, lows: Values, highs: Values, partial: Sequence[bool]
) -> Iterator[tuple[int, int]]:
    start: int | None = None
    for place, (x, low, high, torn) in enumerate(zip(positions, lows, highs, partial, strict=True)):
        defined = x is not None and low is not None and high is not None and not torn
        if defined and start is None:
            start = place
        elif not defined and start is not None:
            yield start, place
            start = None
    if start is not None:
        yield start, len(positions)


def _hover(series: wire.Series) -> list[str]:
    """A line a point; the step is left out where the axis already says it."""
    texts, key = [], series.metric
    for place, value in enumerate(series.values):
        text = value_text(key, value)
        if series.low is not None and series.high is not None and series.low[place] is not None:
            text += f" (95 %: {interval(key, series.low[place], series.high[place])})"
        text += " elements" if describe(key).unit == "elements" else ""
        first, last = series.first_steps[place], series.steps[place]
        if first != last:
            text += f", steps {first:,}–{last:,}"
            text += f", single ones {interval(key, series.minimum[place], series.maximum[place])}"
        elif series.axis != "step":
            text += f", step {last:,}"
        texts.append(text)
    return texts


def _partial(series: wire.Series) -> list[bool]:
    if series.ranks is None or series.expected_ranks is None:
        return [False] * len(series.values)
    return [ranks < expected for ranks, expected in zip(series.ranks, series.expected_ranks, strict=True)]


def _not_finite(series: wire.Series) -> list[int]:
    """The steps at which the series is not finite; where a point merges several, the first of them."""
    values = zip(series.first_steps, series.values, strict=True)
    return [step for step, value in values if value is not None and finite(value) is None]


def _least_span(shown: Sequence[float], description: Description) -> list[float] | None:
    if description.unit not in {"ratio", "share"}:
        return None
    span = description.drawn_scale * SMALLEST_SPAN
    values = [*shown] if description.ideal is None else [*shown, description.drawn_scale * description.ideal]
    lowest, highest = min(values), max(values)
    if highest - lowest >= span:
        return None
    start = -span / 20 if lowest == 0 else (lowest + highest - span) / 2
    return [start, start + span]


def _fixed_ends(metric: str, shown: Sequence[float]) -> list[float] | None:
    """The ends of a scale that is the same for every run, by which two are compared at a glance."""
    ends = _FIXED_SCALES.get(metric)
    return [min(ends[0], *shown), max(ends[1], *shown)] if ends else None


def _is_flat(lines: Sequence[NamedCurve]) -> bool:
    """Whether all values and bounds are one number: Plotly would show it in the middle of an axis from -1 to 1."""
    drawn = [
        values for line in lines for values in (line.series.values, line.series.low, line.series.high) if values
    ]
    return len({finite(value) for values in drawn for value in values} - {None}) == 1


def _why_empty(metric: str, lines: Sequence[NamedCurve]) -> str:
    if any(line.series.values for line in lines):
        return "undefined at every measured step"
    if metric.startswith(("edq_oracle", "oracle_")):
        return "no oracle ran: watch(…, oracle=True) attaches one"
    if describe(metric).scalar:
        return f"nothing logged yet: collage_agent.log({{“{metric}”: …}})"
    return "no measured step yet"
