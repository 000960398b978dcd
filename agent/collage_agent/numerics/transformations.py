"""Error-free transformations: a sum or a product together with its exact rounding error.

Operands and results are tensors of one format (bfloat16, float16, float8, float32; `two_sum` and
`fast_two_sum` also float64), of shapes that broadcast. Rounding is to nearest even. Nothing synchronises the
device. The stated domains were checked over all pairs of finite bfloat16 and float16 numbers.
"""

from torch import Tensor

from collage_agent.numerics.operations import add, same_format, subtract, wider

__all__ = ["fast_two_sum", "two_product", "two_sum"]


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (s, e) with s = RN(a + b) and s + e = a + b exactly, whatever the order of magnitudes.

    Six operations (Knuth, The Art of Computer Programming 2, 4.2.2, theorem B; Møller 1965). Domain: no
    overflow. The sum itself may fit where an intermediate does not: with b = ±largest and a of opposite sign,
    a - (s - b) can overflow and e is NaN (126 pairs of bfloat16). Pass the weight as a and the update as b.
    Raises TypeError for operands of different dtypes.
    """
    same_format(a, b)
    s = add(a, b)
    b_seen = subtract(s, a)
    a_seen = subtract(s, b_seen)
    return s, add(subtract(a, a_seen), subtract(b, b_seen))


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (s, e) with s = RN(a + b) and s + e = a + b exactly, given |a| >= |b|.

    Three operations (Dekker 1971, theorem 4.7). Domain: |a| >= |b|, or only the same or a larger exponent; a
    = 0 with b != 0 is outside, though harmless (s = b, e = 0). Unordered operands lose up to a rounding of
    the smaller one. Raises TypeError for operands of different dtypes.
    """
    same_format(a, b)
    s = add(a, b)
    return s, subtract(b, subtract(s, a))


def two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (p, e) with p = RN(a * b) and e = RN(a * b - p); p + e = a * b exactly inside the domain.

    Through the wider format, in which the product is exact: the same bits as with a fused multiply-add
    (Ogita, Rump and Oishi 2005, algorithm 3.5). Domain: no overflow, and |a * b| >= 2**-118 in bfloat16,
    2**-3 in float16 (below, the error falls under the smallest subnormal): an expansion of float16 second
    moments needs scaling. Raises TypeError for operands of different dtypes, and for float64.
    """
    dtype = same_format(a, b)
    exact = a.to(wider(dtype)) * b.to(wider(dtype))
    p = exact.to(dtype)
    return p, (exact - p.to(exact.dtype)).to(dtype)
