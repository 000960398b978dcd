"""Decoupled weight decay alone, as a rounded operation of its own: how much of it arrives."""

from __future__ import annotations

import torch
from torch import Tensor

from collage_agent.numerics import round_to
from collage_agent.stats.segments import block_sums

__all__ = ["decay_block_sums", "decay_is_lost"]


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
    d̂ = RN(θᵛ·(1 − rate)) − θᵛ in `dtype`. `left_out` uint8 [slots]: elements that enter no sum. The product is
    rounded to fp64 first, which changes d̂ in one of 2²⁸ elements of fp32, and less often otherwise. No
    synchronisation.
    """
    intended = visible_parameter * -rate
    kept = round_to(visible_parameter * (1 - rate), dtype).to(torch.float64).sub_(visible_parameter)
    products = torch.stack((kept.mul_(intended), intended.mul(intended)))
    products.view(torch.int64).bitwise_and_(left_out.to(torch.int64).sub_(1))
    return block_sums(products, block)
