"""Where the intended update stands against the grid: octaves of |u| / gap, by exponents alone."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from collage_monitor.metrics import HISTOGRAM_LABELS, HISTOGRAM_OCTAVES

__all__ = ["BINS", "ulp_octave_counts"]

BINS: Final = len(HISTOGRAM_LABELS)
_FRACTION_BITS: Final = 52
_MAGNITUDE: Final = 2**63 - 1
_BIAS: Final = 1023


def ulp_octave_counts(
    intended: Tensor, visible_parameter: Tensor, dtype: torch.dtype, columns: Tensor, count: int, block: int
) -> Tensor:
    """Elements by octave of |u| / gap: fp64 [BINS, count], bins in the order of HISTOGRAM_LABELS.

    The gap is that from θᵛ to its neighbour in `dtype` in u's direction: half as wide downwards from a power of
    two, the smallest subnormal below the normal range. u = intended, θᵛ = visible_parameter: fp64 [slots], θᵛ
    exact in `dtype`. `columns` [blocks] int64 names the tensor of each block of `block` elements.
    u = 0 falls into the underflow: the caller takes it out. Gaps are powers of two, so the octave is a difference
    of exponents and exact. No synchronisation.
    """
    info = torch.finfo(dtype)
    smallest_exponent = _exponent(info.smallest_normal)
    gap_below_exponent = -_exponent(info.eps)
    update = intended.contiguous().view(torch.int64)
    value = visible_parameter.contiguous().view(torch.int64)
    # An infinitesimal move towards zero lowers a power of two into the binade below; −1 in the bits does the same.
    towards_zero = torch.bitwise_xor(update, value).bitwise_right_shift_(63)
    exponent = torch.bitwise_and(value, _MAGNITUDE).add_(towards_zero).bitwise_right_shift_(_FRACTION_BITS)
    exponent.clamp_(min=smallest_exponent + _BIAS)
    octave = torch.bitwise_and(update, _MAGNITUDE).bitwise_right_shift_(_FRACTION_BITS).sub_(exponent)
    first = HISTOGRAM_OCTAVES[0] - 1
    bins = octave.clamp_(first - gap_below_exponent, first + BINS - 1 - gap_below_exponent)
    offsets = columns * BINS + (gap_below_exponent - first)
    bins.view(-1, block).add_(offsets.unsqueeze(1))
    counts = torch.zeros(count * BINS, dtype=torch.float64, device=intended.device)
    ones = torch.ones(1, dtype=torch.float64, device=intended.device).expand(bins.numel())
    return counts.scatter_add_(0, bins, ones).view(count, BINS).t()


def _exponent(power_of_two: float) -> int:
    return int(torch.tensor(power_of_two, dtype=torch.float64).log2().item())
