"""Sums over blocks of elements and over the blocks of each tensor; elements left out without a branch."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Columns", "block_sums", "leave_out", "nonfinite", "on_host"]

_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def on_host(values: Tensor) -> bool:
    """Whether NumPy may look at the values: reading them waits for no device."""
    return values.is_cpu


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
        self._starts: NDArray[np.intp] | None = None
        if on_host(of_block):
            self._starts, self._of_run = _runs(of_block)

    def sums(self, values: Tensor) -> Tensor:
        """Sums of values [k, blocks] fp64 over each tensor's blocks: [k, count] fp64. No synchronisation.

        A device takes one flat `scatter_add_`. The host adds up runs of blocks of the same tensor, of which there
        are few, four times as fast.
        """
        if self._starts is not None:
            runs = torch.from_numpy(np.add.reduceat(values.numpy(), self._starts, axis=1))
            return values.new_zeros(len(values), self.count).index_add_(1, self._of_run, runs)
        rows = values.shape[0]
        index = self._indices.get(rows)
        if index is None:
            offsets = torch.arange(rows, device=values.device).unsqueeze(1) * self.count
            index = self._indices[rows] = (offsets + self.of_block).view(-1)
        sums = torch.zeros(rows * self.count, dtype=values.dtype, device=values.device)
        return sums.scatter_add_(0, index, values.reshape(-1)).view(rows, self.count)


def _runs(of_block: Tensor) -> tuple[NDArray[np.intp], Tensor]:
    """Where each run of equal values begins, and its value [runs] int64."""
    values = of_block.numpy()
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
    return starts, torch.from_numpy(values[starts])


def nonfinite(values: Tensor) -> Tensor:
    """uint8 [n], 1 where a 16-, 32- or 64-bit float [n] is NaN or infinite, else 0. No synchronisation.

    x − x is 0 or NaN; the quiet bit of the NaN is the answer. Comparisons are several times slower on the host.
    """
    difference = values.sub(values).view(_INTEGERS[values.element_size()])
    quiet_bit = -math.frexp(torch.finfo(values.dtype).eps)[1]
    return difference.bitwise_right_shift_(quiet_bit).bitwise_and_(1).to(torch.uint8)


def leave_out(rows: Tensor, left_out: Tensor) -> None:
    """Set elements to zero in all rows [k, n] fp64, in place, where `left_out` uint8 [n] is 1.

    A product with a mask would keep NaN: the mask is applied to the bits. No synchronisation.
    """
    rows.view(torch.int64).bitwise_and_(left_out.to(torch.int64).sub_(1))
