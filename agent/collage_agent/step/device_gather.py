"""One launch that copies the sampled blocks of many tensors on a device, in place of a call for each tensor.

The kernel finds its elements by tables: where each tensor begins, how many elements it has, and which block of
which tensor goes where. It copies bits, whatever their dtype. A thread of its own compiles it, because the training
must not wait for a compiler. Until then, and if there is no Triton, `gather.py` copies the same bits tensor by
tensor (`tests/agent/sample/test_device_gather.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from threading import Thread
from typing import Any, Final, cast

import numpy as np
import torch
from collage_optim.device_code import built
from collage_optim.device_step import OPTIONS, launches, stream_of, table
from collage_optim.from_host import from_host
from collage_optim.tensor_step import local_part
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

__all__ = ["DeviceGather", "kernel_source", "prepare"]

_LOGGER = logging.getLogger("collage_agent")
_PLAIN: Final = {Tensor, Parameter}
_NAME: Final = "gather"
_BLOCKS: Final = 128
"""Blocks that one program of the kernel copies."""
_LANES: Final = 8
_WORDS: Final = (8, 4, 2, 1)
_HEADER: Final = 2


def kernel_source(word: int) -> str:
    """The kernel that copies words of so many bytes. Programs: [blocks / _BLOCKS, buffers].

    table: int64 [buffers, _HEADER + tensors], for each buffer its address, the bytes of an element, and where each
    tensor's elements begin. sizes: int64 [3 + tensors]: the number of blocks, the elements of a block, the
    number of tensors, and the elements of each. tensors, numbers: int64 [blocks], the tensor that a block belongs
    to, and which of its blocks it is. What lies behind a tensor's last element is copied as zeros.
    """
    pointer = f"tl.pointer_type(tl.int{8 * word})"
    return f"""
import triton
import triton.language as tl


@triton.jit
def {_NAME}(table, sizes, tensors, numbers):
    blocks = tl.load(sizes)
    row = table + tl.program_id(1).to(tl.int64) * (tl.load(sizes + 2) + {_HEADER})
    element = tl.load(row + 1)
    words = tl.load(sizes + 1) * element // {word}
    block = tl.program_id(0).to(tl.int64) * {_BLOCKS} + tl.arange(0, {_BLOCKS})
    listed = block < blocks
    tensor = tl.load(tensors + block, mask=listed, other=0)
    first = tl.load(numbers + block, mask=listed, other=0) * words
    end = tl.load(sizes + 3 + tensor) * element // {word}
    begin = tl.load(row + {_HEADER} + tensor)
    lanes = tl.arange(0, {_LANES})
    for start in range(0, words, {_LANES}):
        within = start + lanes
        there = listed[:, None] & (within < words)[None, :]
        place = first[:, None] + within[None, :]
        source = (begin[:, None] + place * {word}).to({pointer})
        value = tl.load(source, mask=there & (place < end[:, None]), other=0)
        target = (tl.load(row) + (block[:, None] * words + within[None, :]) * {word}).to({pointer})
        tl.store(target, value, mask=there)
"""


_KERNELS: dict[tuple[torch.device, int], Any] = {}
"""The kernel for each device and size of a word; None while it is being compiled, or if it cannot be."""


def prepare(device: torch.device) -> None:
    """Start compiling for a CUDA device. Waits for nothing."""
    if device.type == "cuda":
        _kernel_of(device, _WORDS[0])


def _kernel_of(device: torch.device, word: int) -> Any:
    """The kernel, or None if it is not ready; the first call starts the thread that compiles it."""
    key = device, word
    if key not in _KERNELS:
        _KERNELS[key] = None
        # No daemon: Python would end the thread inside the compiler, and the process with it.
        Thread(target=_build, args=key, name="collage-gather").start()
    return _KERNELS[key]


def _build(device: torch.device, word: int) -> None:
    """Compile the kernel. Loading it is left to the first launch: a CUDA graph could be in the making now."""
    try:
        kernel = built(_NAME, kernel_source(word))
        with torch.cuda.device(device):
            kernel.warmup(*[torch.int64] * 4, grid=(1, 1), **OPTIONS)
    except Exception as error:  # Triton's failures have no common class, and nothing may reach the training.
        _give_up(device, error)
    else:
        _KERNELS[device, word] = kernel


def _give_up(device: torch.device, error: Exception) -> None:
    _KERNELS.update({(device, word): None for word in _WORDS})
    _LOGGER.info("the sample is gathered tensor by tensor: %s: %s", type(error).__name__, error)


class DeviceGather:
    """Gathers the blocks of one layout on a device. Its tables stay there; addresses are sent when they change.

    block: elements of a block. tensors: int64 [blocks] on the device, the tensor of each block; numbers: int64
    [blocks], which of its tensor's blocks it is. elements: of each tensor, counted from `starts`; None: it has no
    others. orders: axes of a tensor from the slowest to the fastest in memory; None: they are in order.
    """

    def __init__(
        self,
        block: int,
        tensors: Tensor,
        numbers: NDArray[np.int64],
        elements: Sequence[int],
        starts: Sequence[int | None],
        orders: Sequence[tuple[int, ...] | None],
    ) -> None:
        self._block, self._tensors, self._host_numbers = block, tensors, numbers
        self._elements = np.array(elements, dtype=np.int64)
        self._starts = np.array([start or 0 for start in starts], dtype=np.int64)
        self._is_part = np.array([start is not None for start in starts], dtype=np.bool_)
        self._orders = None if set(orders) <= {None} else list(orders)

    def fill(self, columns: Sequence[tuple[Sequence[Any], Tensor]]) -> list[bool]:
        """Fill buffers [slots], each with the blocks of its tensors; returns which of them were filled.

        Left out are those of tensors that are not dense memory of the buffer's dtype on its device; all of them,
        while there is no kernel. Synchronises nothing.
        """
        device = self._tensors.device
        none = [False] * len(columns)
        if not launches(device) or not len(self._host_numbers):
            return none
        rows = [self._row(tensors, buffer) for tensors, buffer in columns]
        found = [row for row in rows if row is not None]
        kernel = _kernel_of(device, self._word(np.stack(found))) if found else None
        if kernel is None:
            return none
        grid = -(-len(self._host_numbers) // _BLOCKS), len(found)
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                kernel[grid](_sent(np.stack(found), device), self._sizes, self._tensors, self._numbers, **OPTIONS)
        except Exception as error:
            _give_up(device, error)
            return none
        return [row is not None for row in rows]

    def _row(self, tensors: Sequence[Any], buffer: Tensor) -> NDArray[np.int64] | None:
        """The buffer's row of the table; None: the kernel cannot read one of the tensors."""
        own = [*map(local_part, tensors)]
        if not set(map(type, own)) <= _PLAIN:
            return None
        if {(tensor.dtype, tensor.device, tensor.layout) for tensor in own} != {
            (buffer.dtype, buffer.device, torch.strided)
        }:
            return None
        if self._orders is not None:
            pairs = zip(own, self._orders, strict=True)
            own = [tensor if order is None else tensor.permute(order) for tensor, order in pairs]
        lengths = np.fromiter(map(Tensor.numel, own), np.int64, len(own))
        begin = np.fromiter(map(Tensor.data_ptr, own), np.int64, len(own))
        ends = self._starts + self._elements
        fits = np.where(self._is_part, lengths >= ends, lengths == ends) & ((begin != 0) | (ends == 0))
        if not fits.all() or not all(map(Tensor.is_contiguous, own)):
            return None
        item = buffer.element_size()
        return np.concatenate(([buffer.data_ptr(), item], begin + self._starts * item))

    def _word(self, rows: NDArray[np.int64]) -> int:
        """The most bytes, up to eight, of which all addresses and sizes are multiples."""
        items = rows[:, 1]
        sizes = np.multiply.outer(items, self._elements)
        bits = np.bitwise_or.reduce(np.delete(rows, 1, axis=1), axis=None)
        bits |= np.bitwise_or.reduce(sizes, axis=None) | np.bitwise_or.reduce(items * self._block) | _WORDS[0]
        return int(bits & -bits)

    @cached_property
    def _sizes(self) -> Tensor:
        head = [len(self._host_numbers), self._block, len(self._elements)]
        return from_host(np.concatenate((np.array(head, dtype=np.int64), self._elements)), self._tensors.device)

    @cached_property
    def _numbers(self) -> Tensor:
        return from_host(self._host_numbers, self._tensors.device)


def _sent(rows: NDArray[np.int64], device: torch.device) -> Tensor:
    """The table on the device. Weights and states keep their addresses, and gradients have few."""
    return cast(Tensor, table(stream_of(device), ("gather", rows.tobytes()), from_host, rows, device))
