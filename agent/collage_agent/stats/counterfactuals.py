"""Counterfactuals: how much other strategies would have kept of this step.

Sums only: `collage_monitor/statistics/counterfactuals.py` defines names and metrics. The bits that each strategy
would store are those of `collage_optim` (`tests/agent/stats/test_counterfactuals.py`).
"""

from __future__ import annotations

from typing import Final

import torch
from collage_optim.numerics.cast_formats import round_to_grid
from torch import Tensor

from collage_agent.stats.block_sums import block_sums
from collage_agent.stats.step_view import StepView, Sums, named

__all__ = ["COUNTERFACTUAL_SUMS", "counterfactual_block_sums", "fp8_scales", "measure"]

COUNTERFACTUAL_SUMS: Final = (
    "counterfactual_squared_sum",
    "counterfactual_kept_sum/plain/bf16",
    "counterfactual_kept_sum/light/bf16",
    "counterfactual_kept_sum/stochastic/bf16",
    "counterfactual_kept_sum/plain/fp8",
    "counterfactual_variance_sum/stochastic/bf16",
)
"""Rows of `counterfactual_block_sums`."""
_LARGEST_FP8: Final = 448.0
_BF16: Final = (8, 2.0**-126)
_E4M3: Final = (4, 2.0**-6)
"""Significant bits and the smallest normal number."""
_AT_ONCE: Final = 32_768
"""Elements worked on together: the many temporaries then stay in the cache."""


def measure(step: StepView) -> Sums:
    """How much of u other strategies would have kept; nothing unless requested."""
    if step.scales is None or not step.intended_known:
        return Sums()
    sums = counterfactual_block_sums(step.parameter, step.intended, step.scales, step.block)
    return Sums(named(COUNTERFACTUAL_SUMS, sums))


def counterfactual_block_sums(parameter: Tensor, intended: Tensor, scales: Tensor, block: int) -> Tensor:
    """Σ u², then Σ u·e of each method and the variance of stochastic rounding, by block: fp64 [6, blocks], weight².

    θ, u: fp64 [slots]; scales fp64 [blocks]: of fp8, see `fp8_scales`. θ̂ = RN(θ) is where each method starts.
    plain: e = RN(θ̂ + u) − θ̂. light: a pair that starts from r = RN(θ − θ̂) and is split once. stochastic: e = u
    in expectation, Var(e) = |d|·(gap − |d|) with d the distance of θ̂ + u to the nearest number. Sums are rounded
    to fp64 first, 2⁻⁴⁵ of a gap; there is no overflow. No synchronisation.
    """
    blocks = _AT_ONCE // block
    slots = blocks * block
    pieces = zip(
        torch.split(parameter, slots), torch.split(intended, slots), torch.split(scales, blocks), strict=True
    )
    return torch.cat([_block_sums(*piece, block) for piece in pieces], 1)


def _block_sums(parameter: Tensor, intended: Tensor, scales: Tensor, block: int) -> Tensor:
    start, _ = round_to_grid(parameter, *_BF16)
    wanted = start + intended
    plain, gap = round_to_grid(wanted, *_BF16)
    distance = wanted.sub_(plain).abs_()
    light = _light(parameter, intended, start)
    fp8 = _plain_fp8(parameter, intended, scales, block)
    rows = torch.empty(len(COUNTERFACTUAL_SUMS), len(parameter), dtype=torch.float64, device=parameter.device)
    torch.mul(intended, intended, out=rows[0])
    torch.mul(plain.sub_(start), intended, out=rows[1])
    torch.mul(light, intended, out=rows[2])
    rows[3] = rows[0]
    torch.mul(fp8, intended, out=rows[4])
    torch.mul(distance, gap.sub_(distance), out=rows[5])
    return block_sums(rows, block)


def fp8_scales(parameter: Tensor, tensor_of_block: Tensor, count: int, block: int) -> Tensor:
    """fp64 [blocks]: the scale amax / 448 of each block's tensor, 1 for a tensor of zeros. No synchronisation.

    θ = parameter [slots] floats; amax is the largest finite |θ| of the sampled elements.
    `tensor_of_block` int64 [blocks] is below `count`.
    """
    largest = parameter.abs().nan_to_num_(0.0, 0.0).view(-1, block).amax(1).to(torch.float64)
    amax = torch.zeros(count, dtype=torch.float64, device=parameter.device)
    amax.scatter_reduce_(0, tensor_of_block, largest, "amax")
    return torch.where(amax > 0, amax / _LARGEST_FP8, torch.ones_like(amax))[tensor_of_block]


def _light(parameter: Tensor, intended: Tensor, start: Tensor) -> Tensor:
    """e of a pair (θ̂, r) that takes u in exactly and is split into a pair again."""
    low, _ = round_to_grid(parameter - start, *_BF16)
    wanted = low + intended
    high, _ = round_to_grid(start + wanted, *_BF16)
    new_low, _ = round_to_grid(wanted.add_(start - high), *_BF16)
    return high.sub_(start).add_(new_low.sub_(low))


def _plain_fp8(parameter: Tensor, intended: Tensor, scales: Tensor, block: int) -> Tensor:
    """e of weights kept as e4m3 numbers times their tensor's scale; beyond the largest they stay there."""
    scale = scales.unsqueeze(1)

    def kept(values: Tensor) -> Tensor:
        scaled = (values.view(-1, block) / scale).clamp_(-_LARGEST_FP8, _LARGEST_FP8)
        return round_to_grid(scaled, *_E4M3)[0].mul_(scale).view(-1)

    start = kept(parameter)
    return kept(start + intended).sub_(start)
