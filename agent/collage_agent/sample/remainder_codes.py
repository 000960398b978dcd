"""Integers that optimizers keep beside 16-bit weights, decoded to the part that rounding cut off.

A weight p and its integer k stand for a longer number θ = p + r. The codes differ in the value of one unit of k,
and in its direction: away from zero, or upwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from collage_optim.numerics.formats import gap_outwards
from torch import Tensor

__all__ = ["RemainderCode", "SIGNED_BITS", "SIGNED_BYTE", "codes_of"]


@dataclass(frozen=True)
class RemainderCode:
    """One meaning of the integer k beside a 16-bit weight p: r = k · gap(p) / units.

    words: the code's name for people. units: how many make a gap. unsigned: k is never negative. outwards: k is
    added to the bits of p, so it counts away from zero, in gaps of its direction (half as wide below a power of
    two); otherwise k is added to the value, in ulps.
    """

    words: str
    units: int
    unsigned: bool = False
    outwards: bool = True

    def appends_bits(self, weight: torch.dtype) -> bool:
        """Whether appending the bits of k to those of p gives θ in fp32."""
        return weight == torch.bfloat16 and self.outwards and self.units in (2**8, 2**16)

    def joined(self, weight: Tensor, counts: Tensor) -> Tensor:
        """θ as a new fp32 tensor: the bits of p, bfloat16, lengthened by `counts`, int32 of the same shape."""
        value = weight.to(torch.float32)
        value.view(torch.int32).add_(counts, alpha=2**16 // self.units)
        return value

    def residual(self, weight: Tensor, integers: Tensor) -> Tensor:
        """r = θ − p of the same shape, fp64 or, if it holds r, fp32; exact if `units` is a power of two.

        NaN where p is not finite. weight: bfloat16 or float16. integers: 8 or 16 bits, read by `unsigned` whatever
        their dtype says; floats hold values of k. No synchronisation.
        """
        if integers.is_floating_point():
            counts = integers.to(torch.int32)
        else:
            counts = integers.view(torch.int8 if integers.element_size() == 1 else torch.int16).to(torch.int32)
            if self.unsigned:
                counts.bitwise_and_(2 ** (8 * integers.element_size()) - 1)
        if not self.outwards:
            away = torch.zeros((), dtype=torch.int32, device=weight.device)
            return gap_outwards(weight, away).mul_(counts).div_(self.units)
        if weight.is_cpu and weight.dtype == torch.bfloat16:
            # Not finite: p is, or k reaches below zero itself.
            found = self.joined(weight, counts).sub_(weight)
            if math.isfinite(found.sum().numpy()):
                return found
        gap = gap_outwards(weight, counts.bitwise_right_shift(31))
        # Away from zero is upwards for one sign and downwards for the other.
        return gap.mul_(torch.where(weight.signbit(), -counts, counts)).div_(self.units)


SIGNED_BITS: Final = RemainderCode("the signed remainder of rounding to nearest, 16 bits", 2**16)
"""The code of TransformerEngine and Megatron: bits of θ = (bits of p · 2^16) + k."""

SIGNED_BYTE: Final = RemainderCode("the signed remainder of rounding to nearest, 8 bits", 2**8)

_CODES: Final = {
    8: (
        RemainderCode("a fraction of half a gap, 8 bits", 254, outwards=False),
        SIGNED_BYTE,
        RemainderCode("8 bits appended", 2**8, unsigned=True),
    ),
    16: (
        RemainderCode("a fraction of half a gap, 16 bits", 65534, outwards=False),
        SIGNED_BITS,
        RemainderCode("16 bits appended", 2**16, unsigned=True),
    ),
}
_FP16_CODES: Final = (
    RemainderCode("the signed remainder of rounding fp32 to fp16, 13 bits", 2**13),
    RemainderCode("13 bits of fp32 appended", 2**13, unsigned=True),
)
_INTEGERS: Final = frozenset((torch.int8, torch.uint8, torch.int16, torch.uint16))


def codes_of(integers: torch.dtype, weight: torch.dtype) -> Iterator[RemainderCode]:
    """Yield the codes that integers of this dtype can be in beside weights of that dtype; none for other dtypes."""
    if integers not in _INTEGERS or weight not in (torch.bfloat16, torch.float16):
        return
    yield from _CODES[8 * integers.itemsize]
    if integers.itemsize == 2 and weight == torch.float16:
        yield from _FP16_CODES
