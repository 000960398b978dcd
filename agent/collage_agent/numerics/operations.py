"""Single operations in a low-precision format, each correctly rounded: what the transformations are made of."""

import torch
from torch import Tensor

__all__ = ["add", "multiply", "negate", "same_format", "subtract", "wider"]

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
