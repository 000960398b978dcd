"""Elements one by one: finding non-finite elements, leaving them out without a branch, and a tensor's largest
element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

__all__ = ["max_norms", "nonfinite", "on_host", "sum_is_finite", "zero_excluded"]

_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def on_host(values: Tensor) -> bool:
    """Whether NumPy may look at the values: reading them waits for no device."""
    return values.is_cpu


def sum_is_finite(values: Tensor) -> bool:
    """Whether values on the host add up to a number: of squares, whether each is one. NumPy looks at it."""
    return math.isfinite(values.sum().numpy())


def nonfinite(values: Tensor) -> Tensor:
    """uint8 [n], 1 where a 16-, 32- or 64-bit float [n] is NaN or infinite, else 0. No synchronisation.

    x − x is 0 or NaN; the quiet bit of the NaN is the answer. Comparisons are several times slower on the host.
    """
    difference = values.sub(values).view(_INTEGERS[values.element_size()])
    quiet_bit = -math.frexp(torch.finfo(values.dtype).eps)[1]
    return difference.bitwise_right_shift_(quiet_bit).bitwise_and_(1).to(torch.uint8)


def zero_excluded(rows: Tensor, excluded: Tensor) -> None:
    """Set elements to zero in all rows [k, n] fp64, in place, where `excluded` uint8 [n] is 1.

    A product with a mask would keep NaN: the mask is applied to the bits. No synchronisation.
    """
    rows.view(torch.int64).bitwise_and_(excluded.view(torch.int8).sub(1).to(torch.int64))


def max_norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The largest |x| of each tensor, [()] in its own dtype, NaN if one is. No synchronisation."""
    if not tensors[0].is_cpu:
        return torch._foreach_norm(tensors, math.inf)
    # On the host that norm takes twenty times as long.
    return [torch.stack(torch.aminmax(tensor)).abs_().amax() for tensor in tensors]
