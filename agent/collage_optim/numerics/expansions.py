"""Numbers kept as an unevaluated sum: the first component is the rounded value, the next ones are the remainders.

An expansion (hi, lo) is *normal* when hi = RN(hi + lo). Operands and results are tensors of one format and of
shapes that broadcast; nothing synchronises the device. A normal expansion of bfloat16 holds 17 significant
bits above 2**-117, of float16 about 22 near 1 and 11 at 2**-14, where the low component meets the smallest
subnormal.
"""

import torch
from torch import Tensor

from collage_optim.numerics.formats import round_to
from collage_optim.numerics.transformations import (
    add,
    fast_two_sum,
    multiply,
    negate,
    same_format,
    two_product,
    two_sum,
)

__all__ = [
    "add_expansions",
    "compare_expansions",
    "grow",
    "join",
    "multiply_expansions",
    "renormalise",
    "scale_expansion",
    "split",
    "split_scalar",
]


def grow(x: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Add one number to the expansion (x, y) and return the normal expansion of the sum.

    (u, v) = two_sum(x, a), then fast_two_sum(u, RN(v + y)). The first step is not the fast one: an update may
    exceed a weight near zero, and three more operations are free where memory decides. Rounds once, in v + y,
    by at most half an ulp of the low component (Shewchuk 1997, Grow-Expansion, cut to two components). Domain:
    that of `two_sum`.
    """
    u, v = two_sum(x, a)
    return fast_two_sum(u, add(v, y))


def add_expansions(a_hi: Tensor, a_lo: Tensor, b_hi: Tensor, b_lo: Tensor) -> tuple[Tensor, Tensor]:
    """Add two normal expansions; the relative error is below 3 * 2**(-2p), also under cancellation.

    p is the significand's bits (8 in bfloat16). The accurate form, with two renormalisations (Joldes, Muller
    and Popescu 2017, algorithm 6); the shorter one may lose everything when the high components cancel. Domain:
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


def split(x: Tensor, dtype: torch.dtype, length: int = 2) -> tuple[Tensor, ...]:
    """Split fp32 or fp64 into the normal expansion (RN(x), RN(x - RN(x)), …) of `length` components in `dtype`.

    From fp32 to bfloat16 the difference is exact before its own rounding. Where RN(x) overflows, the low component
    is the opposite infinity and the sum NaN. A compiler that folds the round trip through `dtype` makes the low
    component zero: see the compiled step's self-test.
    """
    components = [round_to(x, dtype)]
    rest = x
    for _ in range(length - 1):
        rest = rest - components[-1].to(x.dtype)
        components.append(round_to(rest, dtype))
    return tuple(components)


def join(*components: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The sum of the components in `dtype`, smallest first.

    Exact in fp64 for a pair, in fp32 for a pair that `split` made from fp32. A pair grown in bfloat16 may hold
    1 + 2**-40, which fp32 does not: the relative loss is at most 2**-24.
    """
    same_format(*components)
    total = components[-1].to(dtype)
    for component in reversed(components[:-1]):
        total = component.to(dtype) + total
    return total


def renormalise(*components: Tensor, length: int | None = None) -> tuple[Tensor, ...]:
    """The same sum as components that don't overlap, largest first, zeros last; cut to `length` when that is less.

    Sweeps of `two_sum` from the last component to the first, as many as there are components: each is error free
    (VecSum of Ogita, Rump and Oishi 2005; Priest 1991), so only the cut rounds, by at most half an ulp of the last
    component left. The components may come in any order. Domain: that of `two_sum`.
    """
    found = list(components)
    for _ in range(len(found)):
        for index in range(len(found) - 1, 0, -1):
            found[index - 1], found[index] = two_sum(found[index - 1], found[index])
    return tuple(found[:length])


def scale_expansion(components: tuple[Tensor, ...], factor: Tensor) -> tuple[Tensor, ...]:
    """An expansion of any length times one number, renormalised to the same length.

    Each component's product is error free, then all are distilled (Shewchuk 1997, Scale-Expansion). Domain: that of
    `two_product` for every component that matters.
    """
    products = [half for component in components for half in two_product(component, factor)]
    return renormalise(*products, length=len(components))


def compare_expansions(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
    """-1, 0 or 1 (int8) as the value of a is below, equal to or above that of b, exactly.

    Two expansions of one value may differ in bits: pairs are compared by value. Domain: that of `two_sum`.
    """
    difference = renormalise(*a, *(negate(component) for component in b))
    sign = torch.zeros_like(difference[0], dtype=torch.int8)
    for component in difference:
        own = torch.sign(component.to(torch.float32)).to(torch.int8)
        sign = torch.where(sign == 0, own, sign)
    return sign


def split_scalar(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """Split a number into two of `dtype`, as floats: the residual is taken against the *rounded* value."""
    hi, lo = split(torch.tensor(value, dtype=torch.float64), dtype)
    return float(hi), float(lo)
