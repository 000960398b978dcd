"""Variances of a ratio's estimated numerator and denominator, with the block as the sampling unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_agent.stats.segments import column_sums

__all__ = ["ratio_variances"]


def ratio_variances(
    blocks: Tensor,
    pairs: Sequence[tuple[int, int]],
    columns: Tensor,
    sampled_blocks: Tensor,
    population_blocks: Tensor,
) -> Tensor:
    """N²(1 − n/N)/n · {s_AA, s_BB, s_AB} of each tensor's estimated totals A and B.

    blocks [k, n_blocks] fp64: block totals; `pairs`: rows (numerator A, denominator B); columns [n_blocks] int64:
    the tensor of each block; sampled_blocks n and population_blocks N, fp64 [tensors].
    Returns fp64 [3, len(pairs), tensors] in the products' units. 0 where all blocks were taken, NaN where n = 1.
    Two passes: the squares of the centred block totals, so nothing cancels. Cochran, Sampling Techniques, 2.
    No synchronisation.
    """
    count = len(sampled_blocks)
    used = sorted({row for pair in pairs for row in pair})
    values = blocks[used]
    means = column_sums(values, columns, count) / sampled_blocks
    centred = values - means.index_select(1, columns)
    numerators = [used.index(a) for a, _ in pairs]
    denominators = [used.index(b) for _, b in pairs]
    left, right = centred[numerators], centred[denominators]
    products = torch.cat((left * left, right * right, left * right))
    n, total = sampled_blocks, population_blocks
    factor = total * (total - n) / (n * (n - 1))
    factor = torch.where(n == total, torch.zeros_like(factor), factor)
    factor = torch.where((n == 1) & (total > 1), torch.full_like(factor, torch.nan), factor)
    return (column_sums(products, columns, count) * factor).view(3, len(pairs), count)
