"""Intended updates, or residuals, in units of their weight's gap: counts by octave of |u| / gap.

The bins are sent as `update_ulp_histogram/LABEL`, one for each of the contract's HISTOGRAM_LABELS, in their order.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from collage_agent.stats.classes import active_elements
from collage_agent.stats.step_view import StepView, Sums, named
from collage_monitor.definitions import HISTOGRAM_LABELS, HISTOGRAM_OCTAVES

__all__ = ["KEYS", "binade_fields", "exponent_of", "measure", "ulp_octave_counts"]

KEYS: Final = tuple(f"update_ulp_histogram/{label}" for label in HISTOGRAM_LABELS)
_BINS: Final = len(HISTOGRAM_LABELS)
_FRACTION_BITS: Final = 52
_FIELD: Final = 2**11 - 1
_BIAS: Final = 1023
_FRACTION_BITS_32: Final = 23
_MAGNITUDE_32: Final = 2**31 - 1
_BIAS_32: Final = 127


def measure(step: StepView) -> Sums:
    """Elements with u ≠ 0 by octave; without a u all are 0."""
    if not step.intended_known:
        return Sums(by_tensor=named(KEYS, step.block_elements.new_zeros(len(KEYS), step.tensors)))
    dtype = step.registered.dtype
    counts = ulp_octave_counts(
        step.intended, step.registered_in_fp32, dtype, step.tensor_of_block, step.tensors, step.block
    )
    # u = 0 was counted as underflow.
    counts[0].index_add_(0, step.tensor_of_block, active_elements(step.classes).sub_(step.block))
    return Sums(by_tensor=named(KEYS, counts))


def ulp_octave_counts(
    intended: Tensor,
    visible_parameter: Tensor,
    dtype: torch.dtype,
    tensor_of_block: Tensor,
    count: int,
    block: int,
    *,
    gaps: float = 1.0,
    fields: Tensor | None = None,
) -> Tensor:
    """Elements by octave of |u| / gap: fp64 [BINS, count], bins in the order of HISTOGRAM_LABELS.

    The gap is that from θᵛ to its neighbour in `dtype` in u's direction: half as wide downwards from a power of
    two, the smallest subnormal below the normal range. u = intended: fp64 [slots]; θᵛ = visible_parameter [slots],
    exact in `dtype`, of at most 32 bits, in that or a wider format. `tensor_of_block` [blocks] int64 is of blocks
    of `block` slots, below `count`.
    u = 0 falls into the underflow: the caller takes it out. Gaps are powers of two, so the octave is a difference
    of exponents and exact. `gaps`: a power of two, count octaves of |u| / (gaps · gap) instead. `fields`:
    the `binade_fields`, if they are known. No synchronisation.
    """
    shift = _BIAS - _BIAS_32 + exponent_of(torch.finfo(dtype).eps) + exponent_of(gaps)
    exponent = binade_fields(intended, visible_parameter, dtype) if fields is None else fields
    # The sign is masked away once the numbers are half as wide.
    field = intended.view(torch.int64).bitwise_right_shift(_FRACTION_BITS).to(torch.int32).bitwise_and_(_FIELD)
    octave = field.sub_(exponent)
    first = HISTOGRAM_OCTAVES[0] - 1
    bins = octave.clamp_(first + shift, first + _BINS - 1 + shift)
    offsets = tensor_of_block.to(torch.int32) * _BINS - (first + shift)
    bins.view(-1, block).add_(offsets.unsqueeze(1))
    counts = torch.zeros(count * _BINS, dtype=torch.float64, device=intended.device)
    ones = torch.ones((), dtype=torch.float64, device=intended.device).expand(bins.numel())
    return counts.index_add_(0, bins, ones).view(count, _BINS).t()


def binade_fields(direction: Tensor, visible_parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """int32 [n]: fp32's exponent field of the binade that θᵛ's gap in the direction of a sign belongs to.

    direction: fp64 [n]; θᵛ as in `ulp_octave_counts`. The gap is 2^(field − 127) · eps of `dtype`. No
    synchronisation.
    """
    value = visible_parameter.to(torch.float32).view(torch.int32)
    # An infinitesimal move towards zero lowers a power of two into the binade below; −1 in the bits does the same.
    towards_zero = direction.to(torch.float32).view(torch.int32).bitwise_xor_(value).bitwise_right_shift_(31)
    field = value.bitwise_and(_MAGNITUDE_32).add_(towards_zero).bitwise_right_shift_(_FRACTION_BITS_32)
    return field.clamp_(min=exponent_of(torch.finfo(dtype).smallest_normal) + _BIAS_32)


def exponent_of(power_of_two: float) -> int:
    """log₂ of a power of two."""
    return math.frexp(power_of_two)[1] - 1
