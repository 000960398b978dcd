"""Residuals of weights that are kept as a sum θᵛ + r: how full they are, how many are zero."""

from __future__ import annotations

import torch
from torch import Tensor

from collage_agent.stats.blocks import block_sums, nonfinite
from collage_agent.stats.octaves import binade_fields, exponent_of, ulp_octave_counts
from collage_agent.stats.view import StepView, Sums, named
from collage_monitor.definitions import HISTOGRAM_LABELS

__all__ = ["RESIDUAL_SUMS", "measure", "residual_block_sums"]

RESIDUAL_SUMS = ("residual_elements", "residual_zero", "residual_fill_sum")
"""Rows of `residual_block_sums`."""
_KEYS = (*RESIDUAL_SUMS, "residual_nonfinite")
_FILLS = tuple(f"residual_fill_histogram/{label}" for label in HISTOGRAM_LABELS)
_FRACTION_BITS = 52
_BIAS = 1023
_BIAS_32 = 127


def measure(step: StepView) -> Sums:
    """How full residuals are; nothing where the weight is not kept as a sum."""
    if step.residual is None:
        return Sums()
    registered, dtype, block = step.registered, step.registered.dtype, step.block
    bad = block_sums(nonfinite(step.residual).to(torch.float64), block)
    residual = step.residual.clone()
    residual.view(torch.int64).bitwise_and_(step.left_out.to(torch.int64).sub_(1))
    sums = named(RESIDUAL_SUMS, residual_block_sums(residual, registered, dtype, step.left_out, block))
    fills = ulp_octave_counts(residual, registered, dtype, step.columns, step.tensors, block, gaps=0.5)
    # r = 0 was counted as underflow.
    filled = sums["residual_elements"] - sums["residual_zero"]
    fills[0].index_add_(0, step.columns, filled.sub_(block))
    return Sums(named(_KEYS, torch.cat((sums.array, bad.unsqueeze(0)))), named(_FILLS, fills))


def residual_block_sums(
    residual: Tensor, visible_parameter: Tensor, dtype: torch.dtype, left_out: Tensor, block: int
) -> Tensor:
    """Elements, those with r = 0, and Σ |r| / ½gap(θᵛ), over each block: fp64 [3, blocks].

    r = residual: fp64 [slots], zero where `left_out` uint8 [slots] is 1; θᵛ = visible_parameter [slots], exact in
    `dtype`, of at most 32 bits. The gap is that to θᵛ's neighbour in r's direction, so that a normalised pair is
    at most 1 full; a division by a power of two, and exact. No synchronisation.
    """
    taken = left_out.bitwise_xor(1)
    zero = residual.logical_not().view(torch.uint8).bitwise_and(taken)
    # Half a gap is 2^(field − 127) · eps / 2; its reciprocal is put together from its exponent.
    whole = _BIAS + _BIAS_32 - exponent_of(torch.finfo(dtype).eps / 2)
    field = binade_fields(residual, visible_parameter, dtype).to(torch.int64)
    reciprocal = field.neg_().add_(whole).bitwise_left_shift_(_FRACTION_BITS).view(torch.float64)
    fill = reciprocal.mul_(residual).abs_()
    fill.view(torch.int64).bitwise_and_(taken.to(torch.int64).neg_())
    return block_sums(torch.stack((taken.to(torch.float64), zero.to(torch.float64), fill)), block)
