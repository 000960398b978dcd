"""Stochastic rounding: up or down at random, so that the expected value is the number itself."""

import torch
from torch import Tensor

from collage_agent.numerics.formats import gap_towards, neighbour, round_to

__all__ = ["stochastic_round"]


def stochastic_round(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round each element to one of its two neighbours in `dtype`, the nearer the likelier: E[result] = x.

    x: any shape, fp32 or fp64, on the generator's device; the numbers drawn come from `generator` alone.
    Representable numbers stay. From fp32 to bfloat16 sixteen random bits are added below the last kept one, which
    is exactly unbiased; elsewhere a uniform fp64 number is compared with the discarded share. Beyond the largest
    number the upper neighbour is infinity, except in float8_e4m3fn, which saturates. What is not finite passes
    unchanged. No synchronisation. References: Forsythe 1950; Connolly, Higham and Mary 2021.
    """
    if x.dtype == torch.float32 and dtype == torch.bfloat16:
        return _random_low_bits(x, generator)
    toward_zero = round_to(x, dtype)
    exceeds = toward_zero.to(torch.float64).abs() > x.to(torch.float64).abs()
    toward_zero = torch.where(exceeds, neighbour(toward_zero, -x).view(dtype), toward_zero)
    rest = x.to(torch.float64) - toward_zero.to(torch.float64)
    share = rest.abs() / gap_towards(toward_zero, x)
    drawn = torch.rand(x.shape, dtype=torch.float64, device=x.device, generator=generator)
    beyond = neighbour(toward_zero, x)
    if dtype == torch.float8_e4m3fn:
        # This format has no infinity and saturates: past its largest number there is only NaN.
        drawn = torch.where(torch.isnan(beyond.to(torch.float32)), torch.inf, drawn)
    return torch.where(drawn < share, beyond, toward_zero)


def _random_low_bits(x: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to bfloat16: a carry out of the sixteen discarded bits happens with the probability they stand for."""
    drawn = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
    drawn.random_(-(2**63), None, generator=generator)
    bits = drawn.view(torch.int16)[: x.numel()].view(x.shape).to(torch.int32).bitwise_and_(0xFFFF)
    bits.add_(x.contiguous().view(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(torch.isfinite(x), bits.view(torch.float32), x).to(torch.bfloat16)
