"""Formats that copies of weights are cast to, for inference say; MXFP8 and NVFP4 with their scales.

Everything here works element by element or block by block, stays on the tensor's device and never synchronises it.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from collage_optim.numerics.formats import power_of_two

__all__ = ["CAST_FORMATS", "CastFormat", "coded", "round_to_grid", "scaled"]


@dataclass(frozen=True)
class CastFormat:
    """What a copy of weights is kept in: numbers of `bits` significant bits, normal from `smallest`, to `largest`.

    `dtype`: torch's own, whose overflow is infinity; without one, numbers beyond the largest become the largest.
    `block`: so many neighbours along the last dimension share a scale; `of_tensor`: the tensor has a scale, too.
    """

    bits: int
    smallest: float
    largest: float
    dtype: torch.dtype | None = None
    block: int = 1
    of_tensor: bool = False


CAST_FORMATS: Final = {
    "bf16": CastFormat(8, 2.0**-126, torch.finfo(torch.bfloat16).max, torch.bfloat16),
    "fp16": CastFormat(11, 2.0**-14, 65504.0, torch.float16),
    "fp8_e4m3": CastFormat(4, 2.0**-6, 448.0),
    "fp8_e5m2": CastFormat(3, 2.0**-14, 57344.0),
    "mxfp8": CastFormat(4, 2.0**-6, 448.0, block=32),
    "nvfp4": CastFormat(2, 1.0, 6.0, block=16, of_tensor=True),
}
_EXPONENT: Final = 0x7FF << 52
_ROUNDS_TO_WHOLE: Final = 1.5 * 2.0**52
_SCALES: Final = CAST_FORMATS["fp8_e4m3"]
"""What NVFP4 keeps its blocks' scales in."""
_LARGEST_FP32: Final = torch.finfo(torch.float32).max


def scaled(numbers: Tensor, scales: Tensor | None, kind: CastFormat) -> Tensor:
    """What the numbers of `coded` stand for: [n], exact in fp64; without scales the numbers themselves."""
    return numbers if scales is None else numbers.view(-1, kind.block).mul(scales).view(-1)


def coded(values: Tensor, kind: CastFormat, largest: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The numbers that a copy of weights keeps: [n], and what each block's are times, fp64 [n / block, 1]; or None.

    values: fp32 or fp64 [n], blocks of `kind.block` one after the other; largest fp32 [n / block]: the largest
    |value| of each block's whole tensor, for NVFP4. Rounding is to nearest, ties to even. NaN or infinite where a
    value of the block is not finite. No synchronisation.

    MXFP8: a block's scale is the smallest power of two, 2^−127 to 2^127, with which none of its numbers exceeds 448
    (OCP Microscaling Formats 1.0, whose own choice of the scale may saturate; Transformer Engine's is this one).
    NVFP4 in fp32 arithmetic: s = 6·448 / largest; the block's scale b = RN(amax / 6 · s) in e4m3; numbers are
    RN(value · 1 / (b · 1/s)) in e2m1 and stand for themselves times b · 1/s (NVIDIA, arXiv 2509.25149).
    """
    if kind.dtype is not None:
        # By the format's own grid it takes a third of the passes of `round_to`, to the same numbers.
        on_grid = round_to_grid(values, kind.bits, kind.smallest)[0] if values.dtype == torch.float64 else values
        return on_grid.to(kind.dtype), None
    if kind.of_tensor:
        assert largest is not None
        return _coded_with_two_scales(values, kind, largest)
    wide = values.to(torch.float64)
    if kind.block == 1:
        return _saturated(wide, kind), None
    blocks = wide.view(-1, kind.block)
    scale = _power_of_two_scale(blocks.abs().amax(1, keepdim=True), kind)
    return _saturated(blocks / scale, kind).view(-1), scale


def round_to_grid(values: Tensor, bits: int, smallest: float) -> tuple[Tensor, Tensor]:
    """Values fp64 [n] rounded to nearest, ties to even, into a format, and the gap between its numbers there.

    The format has `bits` significant bits and normal numbers from `smallest` on, a power of two; it has no largest.
    Adding 1.5·2⁵² gaps and taking them off again rounds to whole gaps. NaN where a value is not finite. No
    synchronisation.
    """
    gap = values.view(torch.int64).bitwise_and(_EXPONENT).view(torch.float64)
    gap.clamp_(min=smallest).mul_(2.0 ** (1 - bits))
    large = gap * _ROUNDS_TO_WHOLE
    return large.add(values).sub_(large), gap


def _saturated(values: Tensor, kind: CastFormat) -> Tensor:
    bounded = values.clamp(-kind.largest, kind.largest)
    return round_to_grid(torch.where(values.isfinite(), bounded, torch.nan), kind.bits, kind.smallest)[0]


def _power_of_two_scale(largest: Tensor, kind: CastFormat) -> Tensor:
    """The smallest power of two that brings `largest` fp64 within the format; NaN where it is not finite."""
    mantissa, exponent = torch.frexp(largest)
    own_mantissa, own_exponent = math.frexp(kind.largest)
    exponent = (exponent - own_exponent + mantissa.gt(own_mantissa)).clamp(-127, 127)
    return torch.where(largest.isfinite(), power_of_two(exponent.to(torch.int64)), torch.nan)


def _coded_with_two_scales(values: Tensor, kind: CastFormat, largest: Tensor) -> tuple[Tensor, Tensor]:
    blocks = values.to(torch.float32).view(-1, kind.block)
    whole = largest.to(torch.float32).unsqueeze(1)
    # A number over a tensor would be the tensor's reciprocal times the number: two roundings.
    encode = torch.full_like(whole, kind.largest * _SCALES.largest).div_(whole).clamp_(max=_LARGEST_FP32)
    decode = encode.reciprocal()
    wanted = blocks.abs().amax(1, keepdim=True).div(kind.largest).mul(encode)
    scale = _saturated(wanted.to(torch.float64), _SCALES)
    inverse = scale.to(torch.float32).mul(decode).reciprocal().clamp(max=_LARGEST_FP32)
    numbers = _saturated(blocks.mul(inverse).to(torch.float64), kind)
    return numbers.view(-1), scale * decode.to(torch.float64)
