"""Elements that are not finite, and how they are left out of every sum without a branch."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

__all__ = ["leave_out", "nonfinite"]

_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def nonfinite(values: Tensor) -> Tensor:
    """uint8 [n], 1 where a 16-, 32- or 64-bit float [n] is NaN or infinite, else 0. No synchronisation.

    x − x is 0 or NaN; the quiet bit of the NaN is the answer. Comparisons are several times slower on the host.
    """
    difference = values.sub(values).view(_INTEGERS[values.element_size()])
    quiet_bit = -math.frexp(torch.finfo(values.dtype).eps)[1]
    return difference.bitwise_right_shift_(quiet_bit).bitwise_and_(1).to(torch.uint8)


def leave_out(rows: Tensor, left_out: Tensor) -> None:
    """Set elements to zero in all rows [k, n] fp64, in place, where `left_out` uint8 [n] is 1.

    A product with a mask would keep NaN: the mask is applied to the bits. No synchronisation.
    """
    rows.view(torch.int64).bitwise_and_(left_out.to(torch.int64).sub_(1))
