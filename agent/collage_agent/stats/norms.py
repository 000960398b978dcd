"""Sums of squares: the norms of weight, gradient, intended and effective update."""

from __future__ import annotations

from torch import Tensor

from collage_agent.stats.segments import block_sums

__all__ = ["squared_block_sums"]


def squared_block_sums(rows: Tensor, block: int) -> Tensor:
    """Σ x² over each block: rows [k, slots] fp64 → [k, blocks] fp64, in the rows' units squared.

    No synchronisation.
    """
    return block_sums(rows * rows, block)
