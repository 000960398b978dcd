"""How much clipping takes off the gradient: made from what the optimizer saw and what the training loop logged."""

from __future__ import annotations

from typing import Final

import numpy as np

from collage_server.queries.finished import finished
from collage_server.store.contract import Points, ScalarPoints

__all__ = ["CLIP_RATIO", "UNCLIPPED", "clip_ratio"]

CLIP_RATIO: Final = "clip_ratio"
UNCLIPPED: Final = "grad_norm_unclipped"


def clip_ratio(measured: Points, unclipped: ScalarPoints) -> ScalarPoints:
    """grad_norm / grad_norm_unclipped at the single measured steps that logged it; undefined ones are left out.

    `measured` holds the statistics of `grad_norm`, one step a point; merged points are left out.
    """
    if not measured.totals or not len(unclipped.steps):
        return ScalarPoints.empty()
    norms = finished("grad_norm", measured.totals, (len(measured.steps),))
    single = np.flatnonzero(measured.counts == 1)
    _, mine, logged = np.intersect1d(measured.steps[single], unclipped.steps, return_indices=True)
    mine = single[mine]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = norms[mine] / unclipped.values[logged]
    known = np.isfinite(ratios)
    return ScalarPoints(measured.steps[mine][known], measured.times[mine][known], ratios[known])
