"""Layers beside each other: a heatmap, the worst of them, and a merged histogram.

Pure: points in, answers out; `api/layer_answers.py` and the newest step's worst layers come from here. The form of
an answer is the contract's (`tests/server/test_series.py`).
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from collage_monitor import wire
from collage_monitor.metrics import HISTOGRAM_LABELS, metric, split_key
from collage_monitor.statistics import finished, histogram_counts, merge_starts, reduce_steps
from collage_server.store.records import Points

__all__ = [
    "heatmap",
    "histogram",
    "worst_layers",
    "worst_order",
]

_LOWEST: Final = frozenset({"edq", "half_ulp_margin", "faithful"})
"""Metrics that are worst at their lowest, besides those whose ideal is 1."""
_BY_DISTANCE: Final = frozenset({"edq_oracle_ratio", "oracle_step_norm_ratio", "oracle_displacement_ratio"})


def worst_order(key: str, values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Indices of the layers, worst first; undefined ones last, equal ones in their order.

    Metrics with the ideal 1, the distance from half a gap and what arrived are worst at their lowest, metrics
    against the oracle at |1 − x|, all others at their highest.
    """
    name = split_key(key)[0]
    badness = -values if metric(key).ideal == 1.0 or name in _LOWEST else values
    if name in _BY_DISTANCE:
        badness = np.abs(1.0 - values)
    return np.argsort(-np.where(np.isnan(badness), -np.inf, badness), kind="stable")


def worst_layers(key: str, points: Points, k: int) -> list[wire.WorstLayer]:
    """The k worst layers at the last point; layers without the metric are left out."""
    layers = points.layers
    if not len(points.steps):
        return []
    values = finished(key, {name: array[-1] for name, array in points.totals.items()}, (len(layers),))
    order = [index for index in worst_order(key, values) if not np.isnan(values[index])]
    return [
        wire.WorstLayer(layer=layers[index], metric=key, value=wire.defined(float(values[index])))
        for index in order[:k]
    ]


def heatmap(run_id: str, key: str, points: Points, count: int, order: Literal["depth", "worst"]) -> wire.Heatmap:
    """values[layer][point] of points whose totals are [points, layers]; "worst" judges all points merged."""
    size, layers = len(points.steps), len(points.layers)
    starts = merge_starts(points.counts, count)
    ends = np.append(starts[1:], size)[: len(starts)] - 1
    merged = reduce_steps(points.totals, axis=0, starts=starts) if size else dict(points.totals)
    table = finished(key, merged, (len(starts), layers)).T
    rows = np.arange(layers)
    if order == "worst" and size:
        whole = finished(key, reduce_steps(points.totals, axis=0), (layers,))
        rows = worst_order(key, whole)
    return wire.Heatmap(
        run_id=run_id,
        metric=key,
        layers=[points.layers[row] for row in rows],
        first_steps=points.first_steps[starts].tolist(),
        steps=points.steps[ends].tolist(),
        values=[wire.undefined_to_none(table[row]) for row in rows],
    )


def histogram(run_id: str, name: str, points: Points, layer: str | None, *, merged: bool) -> wire.Histogram:
    """Counts by bin of points whose totals are one-dimensional: all of them merged, or the last one alone.

    A bin that no stream declares is empty as soon as any other is known; all are null where nothing was reported.
    """
    size = len(points.steps)
    counts = np.full(len(HISTOGRAM_LABELS), np.nan)
    if size and points.totals:
        chosen = points.totals if merged else {key: array[-1:] for key, array in points.totals.items()}
        counts = histogram_counts(reduce_steps(chosen, axis=0), name)
        if not np.isnan(counts).all():
            counts = np.nan_to_num(counts, nan=0.0)
    return wire.Histogram(
        run_id=run_id,
        name=name,
        layer=layer,
        first_step=int(points.first_steps[0 if merged else -1]) if size else None,
        step=int(points.steps[-1]) if size else None,
        labels=list(HISTOGRAM_LABELS),
        counts=wire.undefined_to_none(counts),
    )
