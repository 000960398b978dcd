"""Two aids for torch's compiler on a CPU, with which a compiled step runs at the speed of memory.

Words: four elements travel as one integer. The compiler has no vectors for 16-bit integers, and beside integers it
loads and stores bfloat16 under a mask. Such a load waits for the store before it, for more than half of a step.

Casts in registers: the compiler writes a cast between a float's bits and an integer as a store, a loop of copies
and a load. If gcc prefers 256-bit vectors, as it does on most processors with AVX-512, the 512-bit load waits for
two narrower stores, and a step of `split-master` over 10 million parameters takes 1.8 times as long
(`benchmarks.optimizer`). While it compiles our step, it uses the cast of torch's own vectors, which costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from collage_optim.arithmetic import State

__all__ = ["ELEMENTS", "begins_at_a_word", "casts_in_registers", "packed", "unpacked", "words"]

_COMPILING: Final = threading.RLock()
_CAST: Final = {torch.float32: "float", torch.int32: "int32_t"}
"""The dtypes that are cast, with their names in C++."""
ELEMENTS = 4
_ALIGNMENT_BYTES = 8
_PACKED = {torch.bfloat16, torch.int16, torch.int8}


def words(components: State) -> State:
    """View flat vectors [4 n] of bfloat16, int16 or int8 as words [n], int32 or int64; copy unaligned ones first.
    View vectors of other dtypes, such as an fp32 gradient, as rows of four [n, 4].
    """
    found = {}
    for name, tensor in components.items():
        if tensor.dtype not in _PACKED:
            found[name] = tensor.view(-1, ELEMENTS)
            continue
        aligned = tensor if begins_at_a_word(tensor) else tensor.clone()
        found[name] = aligned.view(torch.int32 if tensor.element_size() == 1 else torch.int64)
    return found


def begins_at_a_word(tensor: Tensor) -> bool:
    """Whether a vector is aligned to words; true for dtypes that are never packed."""
    return tensor.dtype not in _PACKED or tensor.storage_offset() * tensor.element_size() % _ALIGNMENT_BYTES == 0


def unpacked(word: Tensor, place: int, dtype: torch.dtype) -> Tensor:
    """The element of `dtype` at `place` (0 to 3) of each word: bfloat16 as fp32, integers as int32."""
    if word.dim() == 2:  # Rows, as `words` makes them of other dtypes.
        return word[:, place]
    if dtype == torch.int8:
        return word << 24 - 8 * place >> 24
    # Narrow two elements at once, because narrowing a 64-bit lane takes several instructions.
    two = (word if place < 2 else word >> 32).to(torch.int32)
    if dtype == torch.int16:
        return two >> 16 if place % 2 else two << 16 >> 16
    return (two & -0x10000 if place % 2 else two << 16).view(torch.float32)


def packed(elements: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Join four elements, as `unpacked` returns them, to words: an integer's lower bits, an fp32's upper bits."""
    if dtype == torch.int8:
        first, second, third, fourth = elements
        return first & 0xFF | (second & 0xFF) << 8 | (third & 0xFF) << 16 | fourth << 24
    lower, upper = (_joined_pair(elements[place], elements[place + 1], dtype).to(torch.int64) for place in (0, 2))
    return lower & 0xFFFFFFFF | upper << 32


def _joined_pair(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int16:
        return first & 0xFFFF | second << 16
    first, second = (element.to(torch.float32).view(torch.int32) for element in (first, second))
    return first >> 16 & 0xFFFF | second


@contextmanager
def casts_in_registers() -> Iterator[None]:
    """Make code that is compiled inside cast fp32 to int32 and back without memory; the bits are the same.

    It relies on private names of torch's compiler; a compiler without them casts through memory.
    """
    with _COMPILING:
        try:
            from torch._inductor.codegen.cpp import CppVecKernel, CppVecOverrides
            from torch._inductor.virtualized import V

            written: Any = CppVecOverrides
            by_memory = written.to_dtype_bitcast
            vectors_of = CppVecKernel._get_num_vectors
        except (ImportError, AttributeError):
            yield
            return

        def cast(x: Any, dtype: torch.dtype, src_dtype: torch.dtype) -> Any:
            if dtype in _CAST and src_dtype in _CAST and vectors_of(V.kernel, src_dtype) == 1:
                return f"at::vec::cast<{_CAST[dtype]}>({x})"
            return by_memory(x, dtype, src_dtype)

        written.to_dtype_bitcast = staticmethod(cast)
        try:
            yield
        finally:
            written.to_dtype_bitcast = staticmethod(by_memory)
