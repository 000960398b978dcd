"""Sums of squares: the norms of weight, gradient, intended and effective update."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from collage_agent.stats.view import ROWS, StepView, Sums, named

__all__ = ["KEYS", "measure", "squared_block_sums"]

KEYS: Final = tuple(f"{row}_squared_sum" for row in ROWS)


def measure(step: StepView) -> Sums:
    """Σ θ², g², e², eᵛ², u²."""
    return Sums(named(KEYS, torch.stack([step.squares[row] for row in ROWS])))


def squared_block_sums(rows: Tensor, block: int) -> Tensor:
    """Σ x² over each block: rows [k, slots] fp64 → [k, blocks] fp64, in the rows' units squared.

    Within 3 ulp: the norm is one pass over the rows, where a product and its sum are three. No synchronisation.
    """
    norms: Tensor = torch.linalg.vector_norm(rows.view(len(rows), -1, block), dim=-1)
    return norms.square_()
