"""Reading the merged update_ulp_histogram: counts, quantiles and shares, linear in log₂ inside an octave."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from collage_monitor.metrics import HISTOGRAM_LABELS, HISTOGRAM_OCTAVES

__all__ = ["histogram_counts", "histogram_quantile", "share_below_half_gap"]

Array = NDArray[np.float64]
_EDGES = np.array([*HISTOGRAM_OCTAVES, HISTOGRAM_OCTAVES[-1] + 1], dtype=np.float64)
_HALF_GAP_BINS = 1 + HISTOGRAM_OCTAVES.index(-1)


def histogram_counts(totals: Mapping[str, Array], name: str = "update_ulp_histogram") -> Array:
    """Counts [bins, …] in the order of HISTOGRAM_LABELS (underflow, octaves, overflow); NaN where not reported."""
    present = next(totals[f"{name}/{label}"] for label in HISTOGRAM_LABELS if f"{name}/{label}" in totals)
    missing = np.full(np.shape(present), np.nan)
    return np.stack([np.asarray(totals.get(f"{name}/{label}", missing)) for label in HISTOGRAM_LABELS])


def histogram_quantile(counts: Array, share: float) -> Array:
    """log₂(|u| / gap) below which `share` of the elements stand; NaN for an empty histogram.

    Linear in log₂ inside an octave. A quantile in the underflow (overflow) bin answers the outermost edge,
    −24 (8): the true value lies beyond it.
    """
    counts = np.nan_to_num(counts, nan=0.0)
    total = counts.sum(axis=0)
    upto = np.cumsum(counts, axis=0)
    target = share * total
    index = np.clip((upto < target).sum(axis=0), 0, counts.shape[0] - 1)
    inside = np.take_along_axis(counts, index[None], axis=0)[0]
    before = np.take_along_axis(upto, index[None], axis=0)[0] - inside
    fraction = np.divide(target - before, inside, out=np.zeros_like(total), where=inside > 0)
    octave = np.clip(index - 1, 0, len(HISTOGRAM_OCTAVES) - 1)
    value = _EDGES[octave] + fraction
    value = np.where(index == 0, _EDGES[0], np.where(index == counts.shape[0] - 1, _EDGES[-1], value))
    return np.where(total > 0, value, np.nan)


def share_below_half_gap(counts: Array) -> Array:
    """Share of the elements with |u| below half a gap: the octaves up to [2⁻², 2⁻¹) and the underflow."""
    counts = np.nan_to_num(counts, nan=0.0)
    total = counts.sum(axis=0)
    below: Array = counts[:_HALF_GAP_BINS].sum(axis=0)
    share: Array = np.divide(below, total, out=np.full_like(total, np.nan), where=total > 0)
    return share
