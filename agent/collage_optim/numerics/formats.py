"""Floating-point formats: rounding to nearest and at random, the unit in the last place, the gap to a neighbour.

Everything here works element by element, keeps the shape, stays on the tensor's device and never synchronises
it. A format is named by its torch dtype. Subnormals are kept; nothing is flushed to zero.

Results are exact and tested over all pairs of 16-bit numbers (`tests/numerics/test_formats.py`): nothing here may
round differently.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = [
    "Format",
    "format_of",
    "gap_outwards",
    "gap_towards",
    "neighbour",
    "power_of_two",
    "round_at",
    "round_to",
    "stochastic_round",
    "ulp",
]


@dataclass(frozen=True)
class Format:
    """The layout of a binary floating-point dtype: sign, exponent and mantissa fields in one machine integer.

    `mantissa_bits` counts the stored bits only (the significand has one more), `bias` is the exponent bias,
    `integer` a signed dtype of the same width, `largest` the bit pattern of the largest finite value.
    """

    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    integer: torch.dtype
    largest: int


_FRACTION_BITS_32: Final = 23
_MAGNITUDE_32: Final = 2**31 - 1
_BIAS_32: Final = 127

_FORMATS = {
    entry.dtype: entry
    for entry in (
        Format(torch.float32, 8, 23, 127, torch.int32, 0x7F7FFFFF),
        Format(torch.bfloat16, 8, 7, 127, torch.int16, 0x7F7F),
        Format(torch.float16, 5, 10, 15, torch.int16, 0x7BFF),
        Format(torch.float8_e4m3fn, 4, 3, 7, torch.int8, 0x7E),
        Format(torch.float8_e5m2, 5, 2, 15, torch.int8, 0x7B),
    )
}


def format_of(dtype: torch.dtype) -> Format:
    """Return the layout of `dtype`.

    Raises TypeError for a dtype that is not one of float32, bfloat16, float16, float8_e4m3fn, float8_e5m2.
    """
    found = _FORMATS.get(dtype)
    if found is None:
        known = ", ".join(str(dtype) for dtype in _FORMATS)
        raise TypeError(f"{dtype} is not a format known here; convert the tensor to one of {known}")
    return found


def _round_to_odd(x: Tensor) -> Tensor:
    """Round fp64 to fp32 so that a second rounding, to at most 22 significant bits, is as good as one.

    An inexact result gets an odd last bit, which remembers the discarded part (Boldo and Melquiond, "When
    double rounding is odd", 2005). Non-finite values pass unchanged. No synchronisation.
    """
    nearest = x.to(torch.float32)
    bits = nearest.view(torch.int32)
    back = nearest.to(torch.float64)
    move = torch.isfinite(x) & (back != x) & (bits & 1 == 0)
    step = torch.where(x.abs() > back.abs(), 1, -1).to(torch.int32)
    return torch.where(move, bits + step, bits).view(torch.float32)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest, ties to even, into `dtype`: one rounding, also from fp64.

    x: any shape, fp64, fp32 or a 16-bit dtype. Returns the same shape in `dtype`. torch's own cast from fp64
    to a 16-bit dtype rounds twice, through fp32; here the step to fp32 rounds to odd, so the second is the
    only one that counts. Overflow is torch's: infinity, except that float8_e4m3fn has none. No
    synchronisation.
    """
    if x.dtype == torch.float64 and dtype not in (torch.float64, torch.float32):
        format_of(dtype)
        return _round_to_odd(x).to(dtype)
    return x.to(dtype)


def _magnitude_bits(x: Tensor, layout: Format) -> Tensor:
    """The bit pattern of |x| as int64, so that no shift can touch the sign."""
    mask = (1 << (layout.exponent_bits + layout.mantissa_bits)) - 1
    return x.view(layout.integer).to(torch.int64) & mask


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as fp64, exact for exponents from -1022 to 1023 (int64 in)."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _spacing(magnitude: Tensor, layout: Format) -> Tensor:
    """The distance (fp64) from a magnitude's bit pattern to the next larger one; NaN if it is not finite."""
    field = torch.clamp(magnitude >> layout.mantissa_bits, min=1)
    gap = power_of_two(field - layout.bias - layout.mantissa_bits)
    return torch.where(magnitude <= layout.largest, gap, torch.nan)


def ulp(x: Tensor) -> Tensor:
    """The unit in the last place of each element: the gap to the next larger magnitude of x's own format.

    x: any shape, in a format of `format_of`. Returns the same shape and dtype: always exact, since every gap
    is a power of two no smaller than the smallest subnormal (which is also the value at 0). NaN where x is
    not finite. 2**(e - p + 1) with e the exponent and p the significand's bits, after Goldberg 1991. No
    synchronisation.
    """
    layout = format_of(x.dtype)
    return _spacing(_magnitude_bits(x, layout), layout).to(x.dtype)


def gap_towards(x: Tensor, direction: Tensor) -> Tensor:
    """The gap from each element to its neighbour in the direction of a sign.

    x: any shape, in a format of `format_of`; direction: the same shape (or one that broadcasts), any real
    dtype; only its sign counts. Returns fp64, positive. Away from zero this is the ulp. Towards zero it is
    half as wide from a power of two, and the same everywhere else; a subnormal's gap is the smallest
    subnormal. Direction 0 or NaN counts as away from zero. NaN where x is not finite. No synchronisation.
    """
    bits = x.to(torch.float32).view(torch.int32)
    return gap_outwards(x, torch.where(bits < 0, direction > 0, direction < 0).to(torch.int32).neg_())


def gap_outwards(x: Tensor, inwards: Tensor) -> Tensor:
    """The gap from each element to its neighbour away from zero, or towards it where `inwards` is −1, not 0.

    x: any shape, in a format of `format_of`; inwards: int32, the same shape or one that broadcasts. Otherwise as
    `gap_towards`.
    """
    information, value = torch.finfo(format_of(x.dtype).dtype), x.to(torch.float32)
    # An infinitesimal move towards zero lowers a power of two into the binade below; −1 in the bits does the same.
    field = value.view(torch.int32).bitwise_and(_MAGNITUDE_32).add(inwards).bitwise_right_shift_(_FRACTION_BITS_32)
    field.clamp_(min=math.frexp(information.smallest_normal)[1] - 1 + _BIAS_32)
    exponent = field.to(torch.int64).add_(math.frexp(information.eps)[1] - 1 - _BIAS_32)
    # x − x is 0, or NaN where x is not finite.
    return power_of_two(exponent).add_(value.sub(value))


def neighbour(x: Tensor, direction: Tensor) -> Tensor:
    """The next number of x's own format in the direction of a sign.

    x: any shape, in a format of `format_of`; direction: the same shape (or one that broadcasts), any real
    dtype. Where the direction is 0 or NaN, or x is not finite, x itself. Beyond the largest number lies
    infinity (in float8_e4m3fn, which has none, NaN). Zero's neighbours are the smallest subnormals. No
    synchronisation.
    """
    layout = format_of(x.dtype)
    magnitude = _magnitude_bits(x, layout)
    negative = (x.view(layout.integer) < 0) & (magnitude != 0)
    up, down = direction > 0, direction < 0
    moved = torch.where(torch.where(negative, up, down), magnitude - 1, magnitude + 1)
    # From zero every step leads outwards, to the side of the direction.
    moved = torch.where(magnitude == 0, torch.ones_like(moved), moved)
    negative = torch.where(magnitude == 0, down, negative)
    sign = 1 << (layout.exponent_bits + layout.mantissa_bits)
    # As a signed integer the sign bit counts negatively; the narrowing cast then keeps the pattern.
    pattern = torch.where(negative, moved - sign, moved).to(layout.integer)
    still = (magnitude > layout.largest) | ~(up | down)
    return torch.where(still, x.view(layout.integer), pattern).view(x.dtype)


def stochastic_round(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round each element to one of its two neighbours in `dtype`, the nearer the likelier: E[result] = x.

    x: any shape, fp32 or fp64, on the generator's device; the numbers drawn come from `generator` alone.
    Representable numbers stay. From fp32 to bfloat16 sixteen random bits are added below the last kept one, which
    is exactly unbiased; elsewhere a uniform fp64 number is compared with the discarded share. Beyond the largest
    number the upper neighbour is infinity, except in float8_e4m3fn, which saturates. NaN and infinity pass
    unchanged. No synchronisation. References: Forsythe 1950; Connolly, Higham and Mary 2021.
    """
    if x.dtype == torch.float32 and dtype == torch.bfloat16:
        return _random_low_bits(x, generator)
    return round_at(x, dtype, torch.rand(x.shape, dtype=torch.float64, device=x.device, generator=generator))


def round_at(x: Tensor, dtype: torch.dtype, drawn: Tensor) -> Tensor:
    """Round each element away from zero if the share of the gap that it reaches exceeds `drawn`.

    drawn: x's shape, fp32 or fp64, from 0 up to 1: uniform random numbers make it `stochastic_round`. No
    synchronisation.
    """
    toward_zero = round_to(x, dtype)
    exceeds = toward_zero.to(torch.float64).abs() > x.to(torch.float64).abs()
    toward_zero = torch.where(exceeds, neighbour(toward_zero, -x).view(dtype), toward_zero)
    rest = x.to(torch.float64) - toward_zero.to(torch.float64)
    share = rest.abs() / gap_towards(toward_zero, x)
    beyond = neighbour(toward_zero, x)
    if dtype == torch.float8_e4m3fn:
        # This format has no infinity and saturates: past its largest number there is only NaN.
        drawn = torch.where(torch.isnan(beyond.to(torch.float32)), torch.inf, drawn)
    return torch.where(drawn < share, beyond, toward_zero)


def _random_low_bits(x: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to bfloat16: a carry out of the sixteen discarded bits happens with the probability they stand for."""
    drawn = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
    drawn.random_(-(2**63), None, generator=generator)
    bits = drawn.view(torch.int16)[: x.numel()].view(x.shape).to(torch.int32).bitwise_and_(0xFFFF)
    bits.add_(x.contiguous().view(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(torch.isfinite(x), bits.view(torch.float32), x).to(torch.bfloat16)
