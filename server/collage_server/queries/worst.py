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

_BY_DISTANCE: Final = frozenset({"edq_oracle_ratio", "oracle_step_norm_ratio", "oracle_displacement_ratio"})


def worst_order(key: str, values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Indices of the layers, worst first; undefined ones last, equal ones in their order.

    Metrics with the ideal 1 are worst at their lowest, those against the oracle at |1 − x|, all others at
    their highest.
    """
    ideal = metric(key).ideal
    badness = -values if ideal == 1.0 else values
    if split_key(key)[0] in _BY_DISTANCE:
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
