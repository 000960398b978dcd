"""Variances of a ratio's estimated numerator and denominator, with the block as the sampling unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["population_factor", "product_rows", "ratio_variances", "variance_keys"]


def variance_keys(metrics: Sequence[str]) -> tuple[str, ...]:
    """The keys of `ratio_variances`, for the ratios that these metrics are."""
    names = ("variance_numerator", "variance_denominator", "covariance")
    return tuple(f"{name}/{metric}" for name in names for metric in metrics)


def product_rows(numerators: Tensor, denominators: Tensor) -> Tensor:
    """A·A, then B·B, then A·B of each ratio: [k, n] each → [3·k, n]. Of blocks, they are to be summed by tensor."""
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
