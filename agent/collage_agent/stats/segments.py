"""Sums over blocks of elements, and over the blocks of each tensor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Columns", "block_sums"]


def block_sums(values: Tensor, block: int) -> Tensor:
    """[…, slots] → […, slots / block]: the sum of each run of `block` elements. No synchronisation."""
    return values.view(*values.shape[:-1], -1, block).sum(-1)


class Columns:
    """Which tensor each block belongs to, and sums over the blocks of each tensor.

    of_block: int64 [blocks], values below `count`, the number of tensors.
    """

    def __init__(self, of_block: Tensor, count: int) -> None:
        self.of_block = of_block
        self.count = count
        self._indices: dict[int, Tensor] = {}

    def sums(self, values: Tensor) -> Tensor:
        """Sums of values [k, blocks] fp64 over each tensor's blocks: [k, count] fp64. No synchronisation.

        One flat `scatter_add_`, because along a second axis the host takes a slow path.
        """
        rows = values.shape[0]
        index = self._indices.get(rows)
        if index is None:
            offsets = torch.arange(rows, device=values.device).unsqueeze(1) * self.count
            index = self._indices[rows] = (offsets + self.of_block).view(-1)
        sums = torch.zeros(rows * self.count, dtype=values.dtype, device=values.device)
        return sums.scatter_add_(0, index, values.reshape(-1)).view(rows, self.count)
