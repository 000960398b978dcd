"""Formats that copies of weights are cast to, for inference say, with their scales, and routes through several.

Everything here works element by element or block by block, stays on the tensor's device and never synchronises it.

The agent's casts and counterfactuals read `CAST_FORMATS`. Standards fix the codes and scales of each format;
`tests/numerics/test_cast_formats.py` tests all codes.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import torch
from torch import Tensor

from collage_optim.numerics.formats import power_of_two

__all__ = ["CAST_FORMATS", "CastCodes", "CastFormat", "CastRoute", "coded", "round_to_grid", "route_of"]


@dataclass(frozen=True)
class CastFormat:
    """The format of a copy of weights: numbers of `bits` significant bits, normal from `smallest`, to `largest`.

    `dtype`: torch's own, whose overflow is infinity; without it, numbers beyond the largest become the largest.
    `scale`: what numbers are times. `block`: so many neighbours along the last dimension have one scale, or share
    it with `tile` rows × columns of the last two dimensions, or with a channel: `tile` (1, 0), what has one index
    in the first dimension. `of_tensor`: a scale depends on the whole tensor.
    `integers`: codes are whole numbers from the first to the last of them; from 0 on, with a zero point.
    """

    bits: int
    smallest: float
    largest: float
    dtype: torch.dtype | None = None
    scale: Literal["none", "power of two", "fp32", "e4m3"] = "none"
    block: int = 1
    tile: tuple[int, int] | None = None
    of_tensor: bool = False
    integers: tuple[int, int] | None = None

    @property
    def by_channel(self) -> bool:
        """Whether what has one index in the first dimension has one scale."""
        return self.tile == _CHANNEL


_CHANNEL: Final = (1, 0)
_E4M3: Final = (4, 2.0**-6, 448.0)
_E2M1: Final = (2, 1.0, 6.0)
_INT8: Final = (7, 1.0, 127.0)
_INT4: Final = (3, 1.0, 7.0)
CAST_FORMATS: Final = {
    "bf16": CastFormat(8, 2.0**-126, torch.finfo(torch.bfloat16).max, torch.bfloat16),
    "fp16": CastFormat(11, 2.0**-14, 65504.0, torch.float16),
    "fp8_e4m3": CastFormat(*_E4M3),
    "fp8_e5m2": CastFormat(3, 2.0**-14, 57344.0),
    "fp8_tensor": CastFormat(*_E4M3, scale="fp32", of_tensor=True),
    "fp8_block128": CastFormat(*_E4M3, scale="fp32", block=16, tile=(128, 128)),
    "fp8_block128_ue8m0": CastFormat(*_E4M3, scale="power of two", block=16, tile=(128, 128)),
    "mxfp8": CastFormat(*_E4M3, scale="power of two", block=32),
    "nvfp4": CastFormat(*_E2M1, scale="e4m3", block=16, of_tensor=True),
    "nvfp4_2d": CastFormat(*_E2M1, scale="e4m3", block=16, tile=(16, 16), of_tensor=True),
    "int8_tensor": CastFormat(*_INT8, scale="fp32", of_tensor=True, integers=(-128, 127)),
    "int8_channel": CastFormat(*_INT8, scale="fp32", tile=_CHANNEL, integers=(-128, 127)),
    "int4_channel": CastFormat(*_INT4, scale="fp32", tile=_CHANNEL, integers=(-8, 7)),
    "int4_group32": CastFormat(*_INT4, scale="fp32", block=32, integers=(-8, 7)),
    "int4_group128": CastFormat(*_INT4, scale="fp32", block=16, tile=(1, 128), integers=(-8, 7)),
    "uint4_group32": CastFormat(4, 1.0, 15.0, scale="fp32", block=32, integers=(0, 15)),
}
_EXPONENT: Final = 0x7FF << 52
_ROUNDS_TO_WHOLE: Final = 1.5 * 2.0**52
_SCALES: Final = CAST_FORMATS["fp8_e4m3"]
"""What NVFP4 keeps its blocks' scales in."""
_FP32: Final = torch.finfo(torch.float32)


@dataclass(frozen=True)
class CastRoute:
    """How a copy is made: cast to each format of `before` in turn, which have no scales, then to `last`."""

    before: tuple[CastFormat, ...]
    last: CastFormat

    @property
    def bits(self) -> int:
        """Significant bits that are left at the end."""
        return min(kind.bits for kind in (*self.before, self.last))


@cache
def route_of(name: str) -> CastRoute:
    """The route that a name stands for: "mxfp8", or "bf16>mxfp8" by way of bf16.

    Raises:
        KeyError: no format is called that.
    """
    kinds = [CAST_FORMATS[part] for part in name.split(">")]
    return CastRoute(tuple(kinds[:-1]), kinds[-1])


@dataclass(frozen=True)
class CastCodes:
    """The content of a copy: numbers [n], and for equal runs of them their scales, the tensor's and zero points,
    fp64 [runs, 1]; or None."""

    numbers: Tensor
    scales: Tensor | None = None
    tensor_scale: Tensor | None = None
    zero_points: Tensor | None = None

    def values(self) -> Tensor:
        """The values, [n], exact in fp64: numbers less zero points, times scales; without scales the numbers."""
        if self.scales is None:
            return self.numbers
        scales = self.scales if self.tensor_scale is None else self.scales * self.tensor_scale
        runs = self.numbers.view(len(scales), -1)
        return (runs if self.zero_points is None else runs - self.zero_points).mul(scales).view(-1)


def coded(
    values: Tensor, route: CastRoute, *, tensor: Tensor | None = None, tile: Tensor | None = None
) -> CastCodes:
    """The values that a copy of these weights keeps.

    values: fp32, fp64 or 16-bit [n], blocks of `last.block` one after the other. tensor: the largest |value| of the
    whole tensor that each of so many equal runs of values belongs to, and tile: of the tile, one a block; of any
    shape, for formats whose scales depend on them. Rounding is to nearest, ties to even. The result is NaN or
    infinite if a value with the same scale is not finite. No synchronisation.

    fp32 scales, in fp32 arithmetic: s = amax / 448, at least 2⁻¹²⁶; numbers are RN(value / s) and stand for
    themselves times s.
    Powers of two: the smallest, 2^−127 to 2^127, with which none of the numbers exceeds 448 (OCP Microscaling
    Formats 1.0, whose own choice of the scale may saturate; Transformer Engine's and DeepGEMM's is this one).
    Integers in fp32 arithmetic: s = amax / ((last code − first) / 2), and numbers are RN(value · RN(1/s)), no code
    beyond the first and the last (torch.ao's symmetric FakeQuantize with a scale of these weights, and torchao's).
    With a zero point: s = (maximum − minimum) / 15, of the group and 0, z = −RN(minimum / s), and numbers are
    RN(value · RN(1/s)) + z and stand for themselves less z times s. All s are at least 2⁻¹²⁶.
    NVFP4 in fp32 arithmetic: s = 6·448 / amax of the tensor, and b = RN(amax / 6 · s) in e4m3 is the scale of a
    block or tile. Numbers are RN(value · 1 / (b · 1/s)) in e2m1 and stand for themselves times b · 1/s, with 1/s in
    fp32 (NVIDIA, arXiv 2509.25149).
    """
    for kind in route.before:
        values = _coded(values, kind, None, None).numbers
        tensor, tile = (
            None if largest is None else _coded(largest.reshape(-1), kind, None, None).numbers.to(torch.float64)
            for largest in (tensor, tile)
        )
    return _coded(values, route.last, tensor, tile)


def _coded(values: Tensor, kind: CastFormat, tensor: Tensor | None, tile: Tensor | None) -> CastCodes:
    if kind.dtype is not None:
        # Rounding to the format's grid first equals `round_to` in a third of its passes over memory.
        on_grid = round_to_grid(values, kind.bits, kind.smallest)[0] if values.dtype == torch.float64 else values
        return CastCodes(on_grid.to(kind.dtype))
    if kind.scale == "none":
        return CastCodes(_saturated(values.to(torch.float64), kind))
    if kind.integers and kind.integers[0] == 0:
        return _coded_with_zero_points(values.to(torch.float32).view(-1, kind.block), kind.integers)
    given = tile if kind.tile else tensor if kind.block == 1 else values.view(-1, kind.block).abs().amax(1)
    assert given is not None
    largest = given.reshape(-1, 1)
    if kind.scale == "e4m3":
        assert tensor is not None
        return _coded_with_two_scales(values, kind, largest, tensor.reshape(-1))
    runs = values.view(len(largest), -1)
    if kind.scale == "fp32":
        single = largest.to(torch.float32)
        # Two tensors, because torch may divide by a number, or a number, by multiplying with a reciprocal.
        widest = kind.largest if kind.integers is None else (kind.integers[1] - kind.integers[0]) / 2
        scale = single.div(torch.full_like(single, widest)).clamp_(min=_FP32.tiny)
        scale = torch.where(single.isfinite(), scale, torch.nan)
        if kind.integers is not None:
            return CastCodes(_whole_numbers(runs.to(torch.float32), scale, kind.integers).view(-1), scale.double())
        return CastCodes(_saturated(runs.to(torch.float32).div(scale).double(), kind).view(-1), scale.double())
    scale = _power_of_two_scale(largest.to(torch.float64), kind)
    return CastCodes(_saturated(runs.to(torch.float64) / scale, kind).view(-1), scale)


def round_to_grid(values: Tensor, bits: int, smallest: float) -> tuple[Tensor, Tensor]:
    """Values fp64 [n] rounded to nearest, ties to even, into a format, and the gap between its numbers there.

    The format has `bits` significant bits and normal numbers from `smallest` on, a power of two; it has no largest.
    Adding 1.5·2⁵² gaps and taking them off again rounds to whole gaps. NaN where a value is not finite. No
    synchronisation.
    """
    gap = values.view(torch.int64).bitwise_and(_EXPONENT).view(torch.float64)
    gap.clamp_(min=smallest).mul_(2.0 ** (1 - bits))
    return values.add(gap, alpha=_ROUNDS_TO_WHOLE).sub_(gap, alpha=_ROUNDS_TO_WHOLE), gap


def _saturated(values: Tensor, kind: CastFormat) -> Tensor:
    bounded = values.clamp(-kind.largest, kind.largest)
    return round_to_grid(torch.where(values.isfinite(), bounded, torch.nan), kind.bits, kind.smallest)[0]


def _whole_numbers(
    runs: Tensor, scale: Tensor, within: tuple[int, int], zero_point: float | Tensor = 0.0
) -> Tensor:
    """The codes, fp64 [runs, n], of values fp32 [runs, n], ties to even; NaN where the scale or the value is."""
    return runs.mul(scale.reciprocal()).round_().add_(zero_point).clamp_(*within).to(torch.float64)


def _coded_with_zero_points(runs: Tensor, within: tuple[int, int]) -> CastCodes:
    low, high = runs.amin(1, keepdim=True).clamp_(max=0.0), runs.amax(1, keepdim=True).clamp_(min=0.0)
    width = high - low
    scale = width.div(torch.full_like(width, within[1] - within[0])).clamp_(min=_FP32.tiny)
    scale = torch.where(width.isfinite(), scale, torch.nan)
    zero_point = low.div(scale).round_().neg_().clamp_(*within)
    numbers = _whole_numbers(runs, scale, within, zero_point).view(-1)
    return CastCodes(numbers, scale.double(), zero_points=zero_point.double())


def _power_of_two_scale(largest: Tensor, kind: CastFormat) -> Tensor:
    """The smallest power of two that brings `largest` fp64 within the format; NaN where it is not finite."""
    mantissa, exponent = torch.frexp(largest)
    own_mantissa, own_exponent = math.frexp(kind.largest)
    exponent = (exponent - own_exponent + mantissa.gt(own_mantissa)).clamp(-127, 127)
    return torch.where(largest.isfinite(), power_of_two(exponent.to(torch.int64)), torch.nan)


def _coded_with_two_scales(values: Tensor, kind: CastFormat, largest: Tensor, of_tensor: Tensor) -> CastCodes:
    blocks = values.to(torch.float32).view(len(largest), -1)
    whole = of_tensor.to(torch.float32).repeat_interleave(len(largest) // len(of_tensor)).unsqueeze(1)
    encode = torch.full_like(whole, kind.largest * _SCALES.largest).div_(whole).clamp_(max=_FP32.max)
    decode = encode.reciprocal()
    wanted = largest.to(torch.float32).div(torch.full_like(whole, kind.largest)).mul(encode)
    scale = _saturated(wanted.to(torch.float64), _SCALES)
    inverse = scale.to(torch.float32).mul(decode).reciprocal().clamp(max=_FP32.max)
    numbers = _saturated(blocks.mul(inverse).to(torch.float64), kind)
    return CastCodes(numbers.view(-1), scale, decode.to(torch.float64))
