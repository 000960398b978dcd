"""Where the intended update stands against the grid: octaves of |u| / gap."""

from __future__ import annotations

from typing import Final

from collage_agent.stats.classes import active_elements
from collage_agent.stats.octaves import ulp_octave_counts
from collage_agent.stats.view import StepView, Sums, named
from collage_monitor.definitions import HISTOGRAM_LABELS

__all__ = ["KEYS", "measure"]

KEYS: Final = tuple(f"update_ulp_histogram/{label}" for label in HISTOGRAM_LABELS)


def measure(step: StepView) -> Sums:
    """Elements with u ≠ 0 by octave; without a u all are 0."""
    if not step.intended_known:
        return Sums(by_tensor=named(KEYS, step.block_elements.new_zeros(len(KEYS), step.tensors)))
    dtype = step.registered.dtype
    counts = ulp_octave_counts(
        step.intended, step.registered, dtype, step.tensor_of_block, step.tensors, step.block
    )
    # u = 0 was counted as underflow.
    counts[0].index_add_(0, step.tensor_of_block, active_elements(step.classes).sub_(step.block))
    return Sums(by_tensor=named(KEYS, counts))
