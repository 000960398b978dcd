"""A merged histogram: of one measured step, or of the whole run."""

from __future__ import annotations

import numpy as np

from collage_monitor import wire
from collage_monitor.metrics import HISTOGRAM_LABELS
from collage_monitor.statistics import histogram_counts, reduce_steps
from collage_server.queries.finished import values
from collage_server.store.contract import Points

__all__ = ["histogram"]


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
        counts=values(counts),
    )
