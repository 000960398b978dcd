"""Blocks of many tensors on the host, copied in one call by where they lie in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

__all__ = ["BlockAddresses", "BlockPlaces"]

_PLAIN: Final = {Tensor, Parameter}
_LARGEST_UNIT, _SMALLEST_UNIT = 64, 16
"""Bytes that NumPy copies at a time: a cache line, or what the addresses leave of it."""


@dataclass(frozen=True)
class BlockPlaces:
    """Of each block its tensor and its number there, int64 [blocks]; a block has `block` elements.

    Of each tensor: the element that its blocks are counted from, and how many elements it has.
    """

    tensors: NDArray[np.int64]
    numbers: NDArray[np.int64]
    block: int
    starts: NDArray[np.int64]
    elements: Sequence[int]


class BlockAddresses:
    """Where the blocks of tensors of one dtype lie; worked out again when a tensor's memory is another.

    A call for each tensor instead takes a tenth of the measured step. Addresses keep no memory alive: they are read
    only while the tensors are there.
    """

    def __init__(self, places: BlockPlaces) -> None:
        self._places = places
        self._of: Sequence[Tensor] = ()
        self._found_at: list[int] = []
        self._memory: NDArray[Any] = np.empty(0)
        self._units = np.empty(0, dtype=np.intp)

    def copy_blocks(self, tensors: Sequence[Tensor], target: NDArray[np.uint8], *, lasting: bool) -> bool:
        """Copy the blocks to the bytes `target`; False: the tensors do not lie in memory as that needs it.

        lasting: the same tensors will come again, and are remembered.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        moved = addresses != self._found_at
        known = not moved and len(tensors) == len(self._of) and all(map(is_, tensors, self._of))
        size = len(target) // len(self._places.numbers)
        widths = repeat(size // self._places.block)
        # Also where memory alone is another: `.data` may have become smaller, or of another dtype.
        if not known and not all(map(_is_readable, tensors, self._places.elements, widths)):
            return False
        self._of = tensors if lasting else ()
        if moved and not self._find(addresses, size):
            return False
        self._memory.take(self._units, 0, target.view(self._memory.dtype), "clip")
        return True

    def _find(self, addresses: list[int], size: int) -> bool:
        """size: of a block, in bytes."""
        self._found_at = []
        begins = np.array(addresses) + self._places.starts * (size // self._places.block)
        lowest = int(begins.min())
        begins -= lowest
        unit = math.gcd(_LARGEST_UNIT, size, *begins.tolist())
        if not all(addresses) or unit < _SMALLEST_UNIT:
            return False
        units = (begins // unit)[self._places.tensors] + self._places.numbers * (size // unit)
        self._units = units if size == unit else np.add.outer(units, np.arange(size // unit)).reshape(-1)
        self._memory = np.asarray(_Memory(lowest, int(self._units.max()) + 1, unit))
        self._found_at = addresses
        return True


def _is_readable(tensor: Tensor, elements: int, width: int) -> bool:
    """Whether it holds so many elements of `width` bytes, one behind the other in the host's memory."""
    plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout == torch.strided
    return plain and tensor.numel() == elements and tensor.itemsize == width and tensor.is_contiguous()


class _Memory:
    """The memory from an address on, so many units of so many bytes, to be read as an array."""

    def __init__(self, address: int, count: int, unit: int) -> None:
        read_only = (address, True)
        self.__array_interface__ = {"data": read_only, "shape": (count,), "typestr": f"|V{unit}", "version": 3}
