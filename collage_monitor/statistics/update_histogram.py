"""The intended update relative to a weight's gap: a histogram of |u| / gap in octaves, and the metrics from it.

A bin travels as the statistic `update_ulp_histogram/LABEL`, with a label of HISTOGRAM_LABELS. Streams declare it
and servers store it under that name: neither the name nor the octaves may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from collage_monitor.definitions import HISTOGRAM_LABELS, HISTOGRAM_OCTAVES, Array, Definition, Metric, sums

__all__ = [
    "DEFINITION",
    "histogram_counts",
    "histogram_quantile",
]

_EDGES: Final = np.array([*HISTOGRAM_OCTAVES, HISTOGRAM_OCTAVES[-1] + 1], dtype=np.float64)
_HALF_GAP_BINS: Final = 1 + HISTOGRAM_OCTAVES.index(-1)


def histogram_counts(totals: Mapping[str, Array], name: str = "update_ulp_histogram") -> Array:
    """Counts [bins, …] in the order of HISTOGRAM_LABELS (underflow, octaves, overflow); NaN where not reported.

    Raises:
        KeyError: no bin of it was reported.
    """
    present = next((totals[f"{name}/{label}"] for label in HISTOGRAM_LABELS if f"{name}/{label}" in totals), None)
    if present is None:
        raise KeyError(name)
    missing = np.full(np.shape(present), np.nan)
    return np.stack([np.asarray(totals.get(f"{name}/{label}", missing)) for label in HISTOGRAM_LABELS])


def histogram_quantile(counts: Array, share: float) -> Array:
    """log₂(|u| / gap) that `share` of the elements do not reach; NaN for an empty histogram.

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


def _share_below_half_gap(counts: Array) -> Array:
    """Share of the elements with |u| below half a gap: the octaves up to [2⁻², 2⁻¹) and the underflow."""
    counts = np.nan_to_num(counts, nan=0.0)
    total = counts.sum(axis=0)
    below: Array = counts[:_HALF_GAP_BINS].sum(axis=0)
    share: Array = np.divide(below, total, out=np.full_like(total, np.nan), where=total > 0)
    return share


def _half_ulp_margin(counts: Array) -> Array:
    return histogram_quantile(counts, 0.5) + 1.0


def _half_ulp_lr_factor(counts: Array) -> Array:
    return np.exp2(-1.0 - histogram_quantile(counts, 0.1))


DEFINITION = Definition(
    statistics=tuple(
        sums(
            "elements",
            needs=("intended",),
            label="octave",
            update_ulp_histogram="Non-idle elements by |u| / gap, in octaves.",
        )
    ),
    metrics=(
        Metric(
            "predicted_plain_lost_ratio",
            "Below half a gap",
            "share",
            "share of update_ulp_histogram below ½",
            "Share of the updates that plain storage in this dtype would round away. "
            "Predicts nothing for pairs or master weights.",
            needs=("update_ulp_histogram",),
            finish=_share_below_half_gap,
            ideal=0.0,
        ),
        Metric(
            "half_ulp_margin",
            "Half-ulp margin",
            "octaves",
            "median log₂(|u| / ½gap)",
            "Positive: the median update is large enough for plain storage.",
            needs=("update_ulp_histogram",),
            finish=_half_ulp_margin,
        ),
        Metric(
            "half_ulp_lr_factor",
            "Half-ulp learning-rate factor",
            "factor",
            "2^(−1 − tenth percentile of log₂(|u| / gap))",
            "Factor on the learning rate at which 10 % of the updates would stand below half a gap. "
            "It describes the grid; it is no advice to raise the learning rate.",
            needs=("update_ulp_histogram",),
            finish=_half_ulp_lr_factor,
        ),
    ),
)
