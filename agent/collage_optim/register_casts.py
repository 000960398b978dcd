"""The compiled step's casts between a float's bits and an integer stay in registers.

On a CPU torch's compiler writes such a cast as a store, a loop of copies and a load. Where gcc prefers vectors of
256 bits, as it does for most processors with AVX-512, the load of 512 bits waits for two narrower stores: a step of
`split-master` over 10 million parameters then takes 1.8 times as long (`benchmarks.optimizer`). torch's own vectors
have the cast as a function, which needs no instruction; here the compiler is told so while it compiles our step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

__all__ = ["casts_in_registers"]

_COMPILING: Final = threading.RLock()
_CAST: Final = {torch.float32: "float", torch.int32: "int32_t"}
"""Formats that are cast, and what they are called in C++."""


@contextmanager
def casts_in_registers() -> Iterator[None]:
    """What is compiled within casts fp32 to int32 and back without memory; the bits are the same.

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
