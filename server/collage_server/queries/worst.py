"""Which layers stand out in a metric."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from collage_monitor import wire
from collage_monitor.metrics import metric, split_key
from collage_server.queries.finished import finished, number
from collage_server.store.contract import Points

__all__ = ["worst_layers", "worst_order"]

_LOWEST: Final = frozenset({"edq", "half_ulp_margin", "faithful"})
"""Besides those with the ideal 1: the less, the more is lost, or the closer."""
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
    """The k worst layers, of those in which the metric is defined, at the last of the points."""
    layers = points.layers
    if not len(points.steps):
        return []
    values = finished(key, {name: array[-1] for name, array in points.totals.items()}, (len(layers),))
    order = [index for index in worst_order(key, values) if not np.isnan(values[index])]
    return [
        wire.WorstLayer(layer=layers[index], metric=key, value=number(float(values[index]))) for index in order[:k]
    ]
