"""Several steps at once: the sum of their intended updates against what the weights have really moved by."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from collage_agent.stats.blocks import block_sums

__all__ = ["WINDOW_SUMS", "window_block_sums"]

WINDOW_SUMS: Final = (
    "window_intended_squared_sum",
    "window_intended_effective_sum",
    "window_effective_squared_sum",
    "window_intended_visible_sum",
    "window_visible_squared_sum",
    "window_active",
    "window_lost",
    "window_lost_visible",
)
"""Rows of `window_block_sums`."""


def window_block_sums(intended: Tensor, effective: Tensor, visible: Tensor, block: int) -> Tensor:
    """Σ U², U·E, E², U·Eᵛ, Eᵛ², and elements with U ≠ 0, of those E = 0, Eᵛ = 0, by block: fp64 [8, blocks].

    U = Σ u over the window, E = θ now − θ at its start and Eᵛ: fp64 [slots]. Sums in weight². No synchronisation.
    """
    active = intended.ne(0)
    rows = (
        intended * intended,
        intended * effective,
        effective * effective,
        intended * visible,
        visible * visible,
        active.to(torch.float64),
        (active & effective.eq(0)).to(torch.float64),
        (active & visible.eq(0)).to(torch.float64),
    )
    return block_sums(torch.stack(rows), block)
