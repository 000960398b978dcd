"""Products of 16-bit operands on a CPU, counted while they happen, in the backward pass too.

`python -m tests.narrow_products PROGRAM ARGUMENTS…` runs a training and ends with 1 if it computed any.
"""

import runpy
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["NarrowProducts"]

_PRODUCTS = ("mm", "mv", "dot", "linear", "matmul", "attention", "conv", "gru", "lstm", "rnn")


class NarrowProducts(TorchDispatchMode):
    """Within it, `found` lists torch's operations on a CPU that multiply bf16 or fp16 operands."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        narrow = [t for t in tensors if t.dtype in (torch.bfloat16, torch.float16) and t.device.type == "cpu"]
        name = function.overloadpacket.__name__
        if narrow and any(part in name for part in _PRODUCTS):
            self.found.append(name)
        return function(*arguments, **(named or {}))


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with NarrowProducts() as seen:
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(f"products of 16-bit operands: {sorted(set(seen.found))}" if seen.found else 0)
