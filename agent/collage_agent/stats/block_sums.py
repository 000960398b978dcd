"""Sums over blocks of elements, and over the blocks of each tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from collage_agent.sample.sampling import MAXIMUM_BLOCK

__all__ = ["Segments", "block_sums", "flag_counts"]

_LANES: Final = 0x0101_0101_0101_0101


def block_sums(values: Tensor, block: int) -> Tensor:
    """[…, slots] → […, slots / block]: the sum of each block of `block` elements. No synchronisation."""
    return values.view(*values.shape[:-1], -1, block).sum(-1)


def flag_counts(flags: Tensor, block: int) -> Tensor:
    """How many flags of each block are set: bool, or uint8 of 0 and 1, [k, slots] → fp64 [k, slots / block].

    `block` is a multiple of 8, at most 32. Eight flags are added at a time, as the bytes of one integer; multiplied
    by a one in each byte, it has their sum in the highest. No synchronisation.
    """
    if block > MAXIMUM_BLOCK:
        raise ValueError(f"block={block}; a count must fit a byte: pass at most {MAXIMUM_BLOCK}")
    words = flags.view(torch.int64).view(len(flags), -1, block // 8).sum(-1)
    return words.mul_(_LANES).bitwise_right_shift_(56).to(torch.float64)


@dataclass(frozen=True)
class Segments:
    """The blocks of each tensor: `tensor_of_block` int64 [blocks] says which one a block is of, of `count`."""

    tensor_of_block: Tensor
    count: int

    def sums(self, values: Tensor) -> Tensor:
        """Sums of values [k, blocks] over each tensor's blocks: [k, count], their dtype. No synchronisation."""
        # Transposed: adding whole rows of numbers is faster than adding columns, copy included.
        rows = values.t().contiguous()
        return values.new_zeros(self.count, len(values)).index_add_(0, self.tensor_of_block, rows).t()
