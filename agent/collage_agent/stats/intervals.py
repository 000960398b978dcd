"""The input of `collage_monitor.statistics.intervals`: variances of a ratio's estimated numerator and denominator,
with the block as the sampling unit, and how much the sample of a tensor misses (`missed_share`).

Estimators may not change alone: the contract turns these sums into bounds, and coverage is tested by simulation
(`tests/agent/coverage.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from collage_agent.stats.block_sums import Segments
from collage_monitor.definitions import Interval
from collage_monitor.statistics.intervals import MOST_UNSEEN

__all__ = [
    "UNSEEN",
    "fourth_moments",
    "interval_keys",
    "missed_share",
    "population_factor",
    "product_rows",
    "ratio_variances",
    "tail_share",
]

UNSEEN: Final = "unseen_variance"
"""The key of `missed_share` times the variance of Σ u²."""
_SURE: Final = 2.0
_NORM_ERROR: Final = 2.0**-7
_OUTLYING: Final = 10.0
_MOST_BIAS: Final = 0.4
"""Standard errors that one element outside the sample may bring: 95 % intervals that are off by so much hold the
truth in 0.93 (Cochran, Sampling Techniques, 1.8)."""


def interval_keys(metrics: Mapping[str, Interval]) -> tuple[str, ...]:
    """The keys of `ratio_variances` and then of `fourth_moments`, for the ratios that these metrics are."""
    names = ("variance_numerator", "variance_denominator", "covariance")
    variances = [f"{name}/{metric}" for name in names for metric in metrics]
    return (*variances, *(f"fourth_moment/{metric}" for metric, pair in metrics.items() if not pair.share))


def product_rows(numerators: Tensor, denominators: Tensor) -> Tensor:
    """A·A, then B·B, then A·B of each ratio: [k, n] each → [3·k, n]. For sums by block, sum the result by
    tensor."""
    return torch.cat((numerators * numerators, denominators * denominators, numerators * denominators))


def population_factor(sampled_blocks: Tensor, population_blocks: Tensor) -> Tensor:
    """N²(1 − n/N)/n / (n − 1), fp64 [tensors], of n sampled out of N blocks: what squared deviations are scaled by.

    0 where all blocks were taken, NaN where n = 1 of many. No synchronisation.
    """
    n, total = sampled_blocks, population_blocks
    factor = total * (total - n) / (n * (n - 1))
    factor = torch.where(n == total, torch.zeros_like(factor), factor)
    return torch.where((n == 1) & (total > 1), torch.full_like(factor, torch.nan), factor)


def ratio_variances(
    products: Tensor, numerators: Tensor, denominators: Tensor, sampled_blocks: Tensor, factor: Tensor
) -> Tensor:
    """N²(1 − n/N)/n · {s_AA, s_BB, s_AB} of each tensor's estimated totals A and B: fp64 [3·k, tensors].

    numerators and denominators [k, tensors] and products (`product_rows` of the blocks) are sums over the sampled
    blocks; sampled_blocks n and their `population_factor`: fp64 [tensors]. In the products' units. 0 where all
    blocks were taken, NaN where n = 1.
    Σ(a − ā)² = Σa² − (Σa)²/n in fp64: relative error about n·ε·ā²/s², so a spread below 1e-7 of the mean is lost,
    where the interval has no width to speak of. Cochran, Sampling Techniques, 2. No synchronisation.
    """
    scaled = (products - product_rows(numerators, denominators) / sampled_blocks) * factor
    scaled[: 2 * len(numerators)].clamp_(min=0.0)
    return scaled


def fourth_moments(
    numerators: Tensor, denominators: Tensor, ratios: Tensor, segments: Segments, factor: Tensor
) -> Tensor:
    """f² · Σ d⁴ over the sampled blocks of each tensor, d = a − R·b with the tensor's own R: fp64 [k, tensors].

    numerators and denominators [k, blocks] by block, ratios R [k, tensors]: 0 where it is undefined. `factor` f:
    `population_factor`. Squared variances divided by this give the effective number of blocks. No synchronisation.
    """
    deviations = numerators - ratios.index_select(1, segments.tensor_of_block) * denominators
    return segments.sums(deviations.square_().square_()) * factor * factor


def tail_share(intended: Tensor, segments: Segments, blocks: Tensor, factor: Tensor) -> Tensor:
    """(contribution of the largest block to Σ u² / standard error from the other blocks)², fp64 [tensors].

    As `missed_share`, if the large block is in the sample: at another step the large block may be another one
    outside the sample, as with rows of rare tokens. 0 where the largest stands within _OUTLYING standard deviations
    of the others, as in sums without tails. intended [blocks]: Σ u² by block. No synchronisation.
    """
    zeros = torch.zeros_like(blocks)
    largest = zeros.scatter_reduce(0, segments.tensor_of_block, intended, "amax")
    u, uu = segments.sums(torch.stack((intended, intended * intended)))
    others = u - largest
    spread = uu - largest * largest - others * others / (blocks - 1)
    outlies = largest - others / (blocks - 1) > _OUTLYING * (spread / (blocks - 2)).sqrt()
    share = (largest * (MOST_UNSEEN / _MOST_BIAS)).square_() / (spread * factor)
    return torch.nan_to_num(share.where(outlies, 0.0), 0.0, 0.0, 0.0)


def missed_share(
    intended: Tensor,
    auxiliary: Tensor,
    whole: Tensor,
    segments: Segments,
    scale: Tensor,
    blocks: Tensor,
    factor: Tensor,
) -> Tensor:
    """(error of the sample's Σ u² / its standard error)², estimated from one auxiliary: fp64 [tensors].

    intended, auxiliary [blocks]: Σ u² and Σ x² by block. whole [2, tensors]: Σ x² over each whole tensor, and its
    largest x². scale: elements / sampled; blocks, factor: as in `ratio_variances`. Σ u² is off by
    κ·(Σ x² − its estimate), κ = the slope of u² on x² over the blocks, less twice its standard error: 0 where steps
    do not grow with x (regression estimator; Cochran, Sampling Techniques, 7). An element with a larger x² than any
    sampled block is outside the sample. No spread of sampled blocks tells of it, so κ·x² counts MOST_UNSEEN /
    _MOST_BIAS times: more than _MOST_BIAS standard errors of it are too much. Infinite where the sample saw no x
    at all, 0 where the whole is not finite. No synchronisation.
    """
    rows = (intended, auxiliary, intended * intended, auxiliary * auxiliary, intended * auxiliary)
    u, x, uu, xx, ux = segments.sums(torch.stack(rows))
    of_u, of_x, together = uu - u * u / blocks, xx - x * x / blocks, ux - u * x / blocks
    slope = together / of_x
    error = ((of_u - slope * together).clamp_(min=0.0) / (blocks - 2) / of_x).sqrt_()
    # Norms of 16-bit tensors are rounded to 16 bits.
    total, largest = whole
    missing = ((total - x * scale).abs_() - _NORM_ERROR * total).clamp_(min=0.0)
    as_large = auxiliary >= largest.index_select(0, segments.tensor_of_block)
    seen = segments.sums(as_large.to(torch.float64).unsqueeze(0))[0] > 0
    alone = torch.where(seen, 0.0, largest * (MOST_UNSEEN / _MOST_BIAS))
    off = (slope - _SURE * error).clamp_(min=0.0) * torch.maximum(missing, alone)
    share = torch.nan_to_num(off * off / (of_u * factor), 0.0, 0.0, 0.0).clamp_(min=0.0)
    return torch.where((x == 0) & (total > 0), torch.inf, share)
