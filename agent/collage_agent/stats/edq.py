"""Effective descent quality: the products of the intended with the effective update. Collage, arXiv 2405.03637."""

from __future__ import annotations

from torch import Tensor

from collage_agent.stats.segments import block_sums

__all__ = ["edq_block_sums"]


def edq_block_sums(intended: Tensor, updates: Tensor, block: int) -> Tensor:
    """Σ u·e over each block, for each row e of updates [k, slots] fp64 and u = intended [slots] fp64.

    Returns [k, blocks] fp64 in weight². No synchronisation.
    """
    return block_sums(updates * intended, block)
