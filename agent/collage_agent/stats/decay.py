"""Decoupled weight decay alone, as a rounded operation of its own: how much of it arrives."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from collage_agent.numerics import round_to
from collage_agent.stats.blocks import block_sums, leave_out
from collage_agent.stats.norms import squared_block_sums
from collage_agent.stats.view import StepView, Sums, named

__all__ = ["decay_block_sums", "decay_is_lost", "measure"]

_KEYS: Final = ("decay_kept_sum", "decay_squared_sum")


def measure(step: StepView) -> Sums:
    """What decoupled decay alone would keep; nothing where there is none."""
    rate, dtype = step.decay, step.registered.dtype
    if rate is None:
        return Sums()
    if not decay_is_lost(rate, dtype):
        return Sums(named(_KEYS, decay_block_sums(step.visible_parameter, rate, dtype, step.left_out, step.block)))
    if step.visible_parameter is step.parameter:
        visible_squares = step.squares["parameter"]
    else:
        finite = step.visible_parameter.clone().unsqueeze(0)
        leave_out(finite, step.left_out)
        visible_squares = squared_block_sums(finite, step.block)[0]
    squares = visible_squares * rate**2
    return Sums(named(_KEYS, torch.stack((torch.zeros_like(squares), squares))))


def decay_is_lost(rate: float | Tensor, dtype: torch.dtype) -> bool:
    """Whether decay by this rate, lr·λ, moves no number of `dtype`: it is below half the smallest gap everywhere.

    A number's smallest gap is that below a power of two, eps/2 of it. False for a tensor: it is not read.
    """
    return not isinstance(rate, Tensor) and abs(rate) < torch.finfo(dtype).eps / 4


def decay_block_sums(
    visible_parameter: Tensor, rate: float | Tensor, dtype: torch.dtype, left_out: Tensor, block: int
) -> Tensor:
    """Σ d·d̂ and Σ d² over each block: fp64 [2, blocks] in weight².

    θᵛ = visible_parameter: fp64 [slots], exact in `dtype`; rate = lr·λ, a number or a tensor [()]; d = −rate·θᵛ,
    d̂ = RN(θᵛ·(1 − rate)) − θᵛ in `dtype`, rounded once. `left_out` uint8 [slots]: elements that enter no sum. No
    synchronisation.
    """
    intended = visible_parameter * -rate
    kept = round_to(_product_to_odd(visible_parameter, 1 - rate), dtype).to(torch.float64).sub_(visible_parameter)
    products = torch.stack((kept.mul_(intended), intended.mul(intended)))
    products.view(torch.int64).bitwise_and_(left_out.to(torch.int64).sub_(1))
    return block_sums(products, block)


def _product_to_odd(values: Tensor, factor: float | Tensor) -> Tensor:
    """values · factor in fp64, rounded to odd, so that rounding it again is as good as once; values have 24 bits.

    With round hyper-parameters ties are common, and a product rounded to nearest would fall onto them. The factor's
    leading 24 bits and the rest give exact products; Boldo and Melquiond, "When double rounding is odd", 2005.
    """
    whole = torch.zeros((), dtype=torch.float64, device=values.device) + factor
    leading = whole.to(torch.float32).to(torch.float64)
    large, small = values * leading, values * (whole - leading)
    total = large + small
    error = small.sub_(total - large)
    inexact = error.ne(0) & (total.view(torch.int64) & 1).eq(0)
    step = torch.where(error.signbit() == total.signbit(), 1, -1)
    total.view(torch.int64).add_(step * inexact)
    return total
