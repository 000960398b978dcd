"""Numbers kept as an unevaluated sum of two: the high part is the rounded value, the low part what it lacks.

An expansion (hi, lo) is *normal* when hi = RN(hi + lo). Operands and results are tensors of one format and of
shapes that broadcast; nothing synchronises the device. A normal expansion of bfloat16 holds 17 significant
bits above 2**-117, of float16 about 22 near 1 and 11 at 2**-14, where the low part meets the smallest
subnormal.
"""

import torch
from torch import Tensor

from collage_agent.numerics.formats import round_to
from collage_agent.numerics.operations import add, multiply, same_format
from collage_agent.numerics.transformations import fast_two_sum, two_product, two_sum

__all__ = ["add_expansions", "grow", "join", "multiply_expansions", "split", "split_scalar"]


def grow(x: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Add one number to the expansion (x, y) and return the normal expansion of the sum.

    (u, v) = two_sum(x, a), then fast_two_sum(u, RN(v + y)). The first step is not the fast one: an update may
    exceed a weight near zero, and three more operations are free where memory decides. Rounds once, in v + y,
    by at most half an ulp of the low part (Shewchuk 1997, Grow-Expansion, cut to two parts). Domain: that of
    `two_sum`.
    """
    u, v = two_sum(x, a)
    return fast_two_sum(u, add(v, y))


def add_expansions(a_hi: Tensor, a_lo: Tensor, b_hi: Tensor, b_lo: Tensor) -> tuple[Tensor, Tensor]:
    """Add two normal expansions; the relative error is below 3 * 2**(-2p), also under cancellation.

    p is the significand's bits (8 in bfloat16). The accurate form, with two renormalisations (Joldes, Muller
    and Popescu 2017, algorithm 6); the shorter one may lose everything when the high parts cancel. Domain:
    that of `two_sum`.
    """
    s, s_error = two_sum(a_hi, b_hi)
    t, t_error = two_sum(a_lo, b_lo)
    s, s_error = fast_two_sum(s, add(s_error, t))
    return fast_two_sum(s, add(s_error, t_error))


def multiply_expansions(a_hi: Tensor, a_lo: Tensor, b_hi: Tensor, b_lo: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply two normal expansions; relative error below 2**(-2p + 3) in the domain of `two_product`.

    (p, e) = two_product(a_hi, b_hi); e += RN(a_hi * b_lo) + RN(a_lo * b_hi); then fast_two_sum(p, e) (Dekker
    1971). The operands are left as they are. Raises TypeError for operands of different dtypes, and for
    float64.
    """
    same_format(a_hi, a_lo, b_hi, b_lo)
    p, error = two_product(a_hi, b_hi)
    cross = add(multiply(a_hi, b_lo), multiply(a_lo, b_hi))
    return fast_two_sum(p, add(error, cross))


def split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split fp32 or fp64 into the normal expansion (RN(x), RN(x - RN(x))) of `dtype`.

    From fp32 to bfloat16 the difference is exact before its own rounding. Where RN(x) overflows, the low part
    is the opposite infinity and the sum NaN. A compiler that folds the round trip through `dtype` makes the
    low part zero: see the compiled step's self-test.
    """
    hi = round_to(x, dtype)
    return hi, round_to(x - hi.to(x.dtype), dtype)


def join(hi: Tensor, lo: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The value hi + lo in `dtype`: exact in fp64, and in fp32 for an expansion that `split` made.

    A pair grown in bfloat16 may hold 1 + 2**-40, which fp32 does not: the relative loss is at most 2**-24.
    """
    same_format(hi, lo)
    return hi.to(dtype) + lo.to(dtype)


def split_scalar(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """Split a number into two of `dtype`, as floats: the residual is taken against the *rounded* value."""
    hi, lo = split(torch.tensor(value, dtype=torch.float64), dtype)
    return float(hi), float(lo)
