"""Error-free transformations: a sum or a product together with its exact rounding error.

Operands and results are tensors of one format (bfloat16, float16, float8, float32; `two_sum` and `fast_two_sum`
also float64), of shapes that broadcast. Rounding is to nearest even. Nothing synchronises the device. They are made
of single operations in the format, each correctly rounded; this module has those, too. The stated domains were
checked over all pairs of finite bfloat16 and float16 numbers.
"""

import torch
from torch import Tensor

__all__ = [
    "add",
    "fast_two_sum",
    "multiply",
    "negate",
    "same_format",
    "subtract",
    "two_product",
    "two_sum",
    "wider",
]

_WIDER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}
_WITHOUT_ARITHMETIC = (torch.float8_e4m3fn, torch.float8_e5m2)


def same_format(*operands: Tensor) -> torch.dtype:
    """Return the operands' common dtype; raise TypeError when they differ: promotion would hide a rounding."""
    dtypes = {operand.dtype for operand in operands}
    if len(dtypes) != 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise TypeError(f"operands of one dtype are needed, not {names}; convert them with round_to first")
    return operands[0].dtype


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which a product of two numbers of `dtype` is exact, but for its exponent range.

    Raises TypeError for float64, which has no wider format here.
    """
    found = _WIDER.get(dtype)
    if found is None:
        raise TypeError(f"no format holds a product of two {dtype} numbers; use float32 or a narrower dtype")
    return found


def add(a: Tensor, b: Tensor) -> Tensor:
    """RN(a + b) in the operands' format.

    torch adds float8 numbers not at all: the detour through fp32 rounds twice, harmlessly, as 24 >= 2 * 4 + 2
    bits (Figueroa, "When is double rounding innocuous?", 1995). The same holds for 16 bits, where torch takes
    it.
    """
    if a.dtype in _WITHOUT_ARITHMETIC:
        return (a.to(torch.float32) + b.to(torch.float32)).to(a.dtype)
    return a + b


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """RN(a - b) in the operands' format; see `add`."""
    if a.dtype in _WITHOUT_ARITHMETIC:
        return (a.to(torch.float32) - b.to(torch.float32)).to(a.dtype)
    return a - b


def negate(a: Tensor) -> Tensor:
    """-a, exactly."""
    if a.dtype in _WITHOUT_ARITHMETIC:
        return (-a.to(torch.float32)).to(a.dtype)
    return -a


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """RN(a * b) in the operands' format; see `add`."""
    if a.dtype in _WITHOUT_ARITHMETIC:
        return (a.to(torch.float32) * b.to(torch.float32)).to(a.dtype)
    return a * b


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
