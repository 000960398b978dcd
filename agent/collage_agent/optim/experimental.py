"""Experiments with eight bits: two ways to keep a weight in three bytes. Not among the strategies, and may change.

`Bf16WithInt8` keeps a bfloat16 number and, in an int8, what it lacks in 256ths of its ulp: 2**-15 in three bytes,
and the high part feeds a matrix product as it is. `E4m3Triple` keeps an expansion of three float8_e4m3fn numbers
under one power-of-two scale a tensor: 2**-14, and needs joining before use.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from collage_agent.numerics.expansions import join, split
from collage_agent.numerics.formats import ulp

__all__ = ["EXPERIMENTAL_STORAGES", "Bf16WithInt8", "E4m3Triple", "ExperimentalStorage"]

_STEPS_IN_AN_ULP = 256.0
_LARGEST_E4M3 = 448.0


class Bf16WithInt8(NamedTuple):
    """value = high + low * ulp(high) / 256; three bytes an element; relative error at most 2**-15."""

    high: Tensor
    low: Tensor

    @classmethod
    def store(cls, value: Tensor) -> "Bf16WithInt8":
        """Round fp32 of any shape. Half an ulp is 128 steps; int8 holds 127 upwards. No synchronisation."""
        high = value.to(torch.bfloat16)
        unit = ulp(high).to(torch.float32) / _STEPS_IN_AN_ULP
        steps = torch.round((value - high.to(torch.float32)) / unit)
        return cls(high, steps.clamp_(-128, 127).to(torch.int8))

    def load(self) -> Tensor:
        """The value kept, as fp32."""
        unit = ulp(self.high).to(torch.float32) / _STEPS_IN_AN_ULP
        return self.high.to(torch.float32) + self.low.to(torch.float32) * unit


class E4m3Triple(NamedTuple):
    """value = (first + second + third) * scale; three bytes an element and four for the tensor."""

    first: Tensor
    second: Tensor
    third: Tensor
    scale: Tensor

    @classmethod
    def store(cls, value: Tensor) -> "E4m3Triple":
        """Round fp32 of any shape, under the power of two that brings its largest element just below 448."""
        largest = value.abs().amax() if value.numel() else torch.zeros((), device=value.device)
        exponent = torch.ceil(torch.log2(largest.clamp(min=2.0**-100) / _LARGEST_E4M3))
        scale = torch.exp2(exponent)
        first, second, third = split(value / scale, torch.float8_e4m3fn, 3)
        return cls(first, second, third, scale)

    def load(self) -> Tensor:
        """The value kept, as fp32."""
        return join(self.first, self.second, self.third, dtype=torch.float32) * self.scale


ExperimentalStorage = Bf16WithInt8 | E4m3Triple

EXPERIMENTAL_STORAGES: dict[str, Callable[[Tensor], ExperimentalStorage]] = {
    "experimental-bf16-int8": Bf16WithInt8.store,
    "experimental-e4m3-triple": E4m3Triple.store,
}
"""Name to the function that stores a weight; what it returns has `load`."""
