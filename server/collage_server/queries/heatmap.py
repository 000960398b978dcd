"""A metric over layers and steps."""

from __future__ import annotations

from typing import Literal

import numpy as np

from collage_monitor import wire
from collage_monitor.statistics import reduce_steps
from collage_server.queries.finished import finished, values
from collage_server.queries.worst import worst_order
from collage_server.store.buckets import bucket_starts
from collage_server.store.contract import Points

__all__ = ["heatmap"]


def heatmap(run_id: str, metric: str, points: Points, count: int, order: Literal["depth", "worst"]) -> wire.Heatmap:
    """values[layer][point] of points whose totals are [points, layers]; "worst" judges the whole run merged."""
    size, layers = len(points.steps), len(points.layers)
    starts = bucket_starts(points.counts, count)
    ends = np.append(starts[1:], size)[: len(starts)] - 1
    merged = reduce_steps(points.totals, axis=0, starts=starts) if size else dict(points.totals)
    table = finished(metric, merged, (len(starts), layers)).T
    rows = np.arange(layers)
    if order == "worst" and size:
        whole = finished(metric, reduce_steps(points.totals, axis=0), (layers,))
        rows = worst_order(metric, whole)
    return wire.Heatmap(
        run_id=run_id,
        metric=metric,
        layers=[points.layers[row] for row in rows],
        first_steps=points.first_steps[starts].tolist(),
        steps=points.steps[ends].tolist(),
        values=[values(table[row]) for row in rows],
    )
