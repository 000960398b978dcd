"""Sums over blocks of elements, and over the blocks of each tensor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["block_sums", "column_sums"]


def block_sums(values: Tensor, block: int) -> Tensor:
    """[…, slots] → […, slots / block]: the sum of each run of `block` elements. No synchronisation."""
    return values.view(*values.shape[:-1], -1, block).sum(-1)


def column_sums(values: Tensor, columns: Tensor, count: int) -> Tensor:
    """Sums of values [k, blocks] fp64 over the blocks with equal `columns` [blocks] int64: [k, count] fp64.

    One flat `index_add_`, because along a second axis it takes a slow path on the host. No synchronisation.
    """
    rows = values.shape[0]
    offsets = torch.arange(rows, device=values.device).unsqueeze(1) * count
    sums = torch.zeros(rows * count, dtype=values.dtype, device=values.device)
    return sums.index_add_(0, (offsets + columns).view(-1), values.reshape(-1)).view(rows, count)
