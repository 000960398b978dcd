"""Elements that are not finite, and how they are left out of every sum without a branch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["leave_out", "nonfinite"]


def nonfinite(values: Tensor) -> Tensor:
    """bool [n]: where a floating tensor [n] of any dtype is NaN or infinite. No synchronisation."""
    return values.sub(values).ne(0)


def leave_out(rows: Tensor, padding: Tensor | None = None, also: Tensor | None = None) -> Tensor:
    """Set an element to zero in all rows [k, n] fp64, in place, where it is not finite in any of them.

    `padding` [m] int64 and `also` bool [n] name elements that are left out in any case. Returns where, bool [n].
    A product with a mask would keep NaN: the mask is applied to the bits. A finite sum of fp64 rows that hold
    values of narrower formats cannot overflow. No synchronisation.
    """
    total = rows.sum(0)
    total.sub_(total)
    if padding is not None:
        total.index_fill_(0, padding, torch.nan)
    left_out = total.ne(0) if also is None else total.ne(0).logical_or_(also)
    keep = left_out.to(torch.int64).sub_(1)
    rows.view(torch.int64).bitwise_and_(keep)
    return left_out
