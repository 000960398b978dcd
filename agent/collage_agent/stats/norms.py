"""Sums of squares: the norms of weight, gradient, intended and effective update."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["squared_block_sums"]


def squared_block_sums(rows: Tensor, block: int) -> Tensor:
    """Σ x² over each block: rows [k, slots] fp64 → [k, blocks] fp64, in the rows' units squared.

    Within 3 ulp: the norm is one pass over the rows, where a product and its sum are three. No synchronisation.
    """
    norms: Tensor = torch.linalg.vector_norm(rows.view(len(rows), -1, block), dim=-1)
    return norms.square_()
