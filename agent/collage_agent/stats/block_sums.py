"""Elements and their blocks: which are finite, sums over blocks, and over the blocks of each tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from collage_agent.sample.sampling import MAXIMUM_BLOCK

__all__ = [
    "Segments",
    "block_sums",
    "flag_counts",
    "max_norms",
    "nonfinite",
    "on_host",
    "sum_is_finite",
    "zero_excluded",
]

_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
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


def on_host(values: Tensor) -> bool:
    """Whether NumPy may look at the values: reading them waits for no device."""
    return values.is_cpu


def sum_is_finite(values: Tensor) -> bool:
    """Whether values on the host add up to a number: of squares, whether each is one. NumPy looks at it."""
    return math.isfinite(values.sum().numpy())


def nonfinite(values: Tensor) -> Tensor:
    """uint8 [n], 1 where a 16-, 32- or 64-bit float [n] is NaN or infinite, else 0. No synchronisation.

    x − x is 0 or NaN; the quiet bit of the NaN is the answer. Comparisons are several times slower on the host.
    """
    difference = values.sub(values).view(_INTEGERS[values.element_size()])
    quiet_bit = -math.frexp(torch.finfo(values.dtype).eps)[1]
    return difference.bitwise_right_shift_(quiet_bit).bitwise_and_(1).to(torch.uint8)


def zero_excluded(rows: Tensor, excluded: Tensor) -> None:
    """Set elements to zero in all rows [k, n] fp64, in place, where `excluded` uint8 [n] is 1.

    A product with a mask would keep NaN: the mask is applied to the bits. No synchronisation.
    """
    rows.view(torch.int64).bitwise_and_(excluded.view(torch.int8).sub(1).to(torch.int64))


def max_norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The largest |x| of each tensor, [()] in its own dtype, NaN if one is. No synchronisation."""
    if not tensors[0].is_cpu:
        return torch._foreach_norm(tensors, math.inf)
    # On the host that norm takes twenty times as long.
    return [torch.stack(torch.aminmax(tensor)).abs_().amax() for tensor in tensors]
