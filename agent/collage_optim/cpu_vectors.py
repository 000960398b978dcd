"""Two aids for torch's compiler on a CPU, with which a compiled step runs at the speed of memory.

Four elements to a word: the compiler has no vectors for 16-bit integers. Beside integers it loads and stores
bfloat16 16 at a time under a mask: such a load waits for the store before it, which takes more than half of a step.
Words of four elements go whole.

Casts between a float's bits and an integer stay in registers: it writes such a cast as a store, a loop of copies
and a load. Where gcc prefers vectors of 256 bits, as it does for most processors with AVX-512, the load of 512 bits
waits for two narrower stores. A step of `split-master` over 10 million parameters then takes 1.8 times as long
(`benchmarks.optimizer`). torch's own vectors have the cast as a function, which needs no instruction: the
compiler uses it while it compiles our step.
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
"""Formats that are cast, and what they are called in C++."""
ELEMENTS = 4
_ALIGNMENT_BYTES = 8
_PACKED = {torch.bfloat16, torch.int16, torch.int8}


def words(components: State) -> State:
    """Flat vectors [4 n] of bfloat16, int16 or int8 as words [n], int32 or int64; those that lie between words are
    copied. Others, such as an fp32 gradient of a bfloat16 weight, as rows of four: [n, 4], as they are.
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
    """Whether a vector can be viewed as words; true for dtypes that are never packed."""
    return tensor.dtype not in _PACKED or tensor.storage_offset() * tensor.element_size() % _ALIGNMENT_BYTES == 0


def unpacked(word: Tensor, place: int, dtype: torch.dtype) -> Tensor:
    """The element of `dtype` in this place of each word, 0 to 3: bfloat16 as fp32, integers as int32; of rows as it
    is.
    """
    if word.dim() == 2:
        return word[:, place]
    if dtype == torch.int8:
        return word << 24 - 8 * place >> 24
    # Two at a time: lanes of 64 bits take several instructions to narrow.
    two = (word if place < 2 else word >> 32).to(torch.int32)
    if dtype == torch.int16:
        return two >> 16 if place % 2 else two << 16 >> 16
    return (two & -0x10000 if place % 2 else two << 16).view(torch.float32)


def packed(elements: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The words of these elements, as `unpacked` returns them: an integer's lower bits, an fp32's upper ones."""
    if dtype == torch.int8:
        first, second, third, fourth = elements
        return first & 0xFF | (second & 0xFF) << 8 | (third & 0xFF) << 16 | fourth << 24
    lower, upper = (_two(elements[place], elements[place + 1], dtype).to(torch.int64) for place in (0, 2))
    return lower & 0xFFFFFFFF | upper << 32


def _two(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int16:
        return first & 0xFFFF | second << 16
    first, second = (element.to(torch.float32).view(torch.int32) for element in (first, second))
    return first >> 16 & 0xFFFF | second


@contextmanager
def casts_in_registers() -> Iterator[None]:
    """Code compiled inside casts fp32 to int32 and back without going through memory; the bits are the same.

    Leans on private names of torch's compiler. One that has others casts by memory, as without this.
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
