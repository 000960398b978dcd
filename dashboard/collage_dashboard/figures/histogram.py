"""Where the updates stand against the grid: |u| over the gap in octaves, with the half gap marked.

A function from data to figure, as all of `figures/`: the page's callbacks fetch, this draws
(`tests/dashboard/figures/test_histogram.py`).
"""

from __future__ import annotations

import plotly.graph_objects as go

from collage_dashboard.figures.style import ACCENT, BELOW, INK, axis, base_figure, empty_figure
from collage_monitor import wire
from collage_monitor.diagnosis import finite
from collage_monitor.metrics import HISTOGRAM_OCTAVES
from collage_monitor.number_text import count, share_text

__all__ = ["PREDICTS", "update_histogram"]

PREDICTS = (
    "Updates smaller than half a gap are rounded away by plain storage in the parameter's dtype. This predicts "
    "nothing for pairs or master weights."
)
_HALF_GAP = -1.0
_FIRST, _LAST = HISTOGRAM_OCTAVES[0], HISTOGRAM_OCTAVES[-1]


def update_histogram(
    answer: wire.Histogram, *, before: wire.Histogram | None = None, height: int = 300
) -> go.Figure:
    """Shares of the non-idle elements in octaves of |u| / gap; under- and overflow stand at the edges.

    `before` is drawn as a line over the bars.
    """
    counts = [finite(value) or 0.0 for value in answer.counts]
    total = sum(counts)
    if total <= 0:
        return empty_figure("no update measured", height=height)
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
        height=height,
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
