"""Variances of a ratio's estimated numerator and denominator, with the block as the sampling unit."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["population_factor", "product_rows", "ratio_variances"]


def product_rows(numerators: Tensor, denominators: Tensor) -> Tensor:
    """A·A, B·B and A·B of each block, to be summed by tensor: [k·m + k + k·m, blocks] fp64.

    numerators [k, m, blocks], denominators [k, blocks]: block totals; m numerators share a denominator.
    """
    shared = numerators * denominators.unsqueeze(1)
    return torch.cat(((numerators * numerators).flatten(0, 1), denominators * denominators, shared.flatten(0, 1)))


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
    """N²(1 − n/N)/n · {s_AA, s_BB, s_AB} of each tensor's estimated totals A and B.

    numerators [k, m, tensors], denominators [k, tensors] and products (`product_rows`) are sums over the sampled
    blocks; sampled_blocks n and their `population_factor`: fp64 [tensors].
    Returns fp64 [3, k·m, tensors] in the products' units. 0 where all blocks were taken, NaN where n = 1.
    Σ(a − ā)² = Σa² − (Σa)²/n in fp64: relative error about n·ε·ā²/s², so a spread below 1e-7 of the mean is lost,
    where the interval has no width to speak of. Cochran, Sampling Techniques, 2. No synchronisation.
    """
    k, m, tensors = numerators.shape
    scaled = (products - product_rows(numerators, denominators) / sampled_blocks) * factor
    scaled[: k * m + k].clamp_(min=0.0)
    of_numerators, of_products = scaled[: k * m], scaled[k * m + k :]
    of_denominators = scaled[k * m : k * m + k].unsqueeze(1).expand(k, m, tensors).reshape(k * m, tensors)
    return torch.stack((of_numerators, of_denominators, of_products))
