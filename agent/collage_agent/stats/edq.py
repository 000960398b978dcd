"""Effective descent quality: the products of the intended with the effective update. Collage, arXiv 2405.03637."""

from __future__ import annotations

from torch import Tensor

from collage_agent.stats.segments import block_sums

__all__ = ["edq_block_sums", "edq_products"]


def edq_products(intended: Tensor, updates: Tensor) -> Tensor:
    """u·e of each element, for each row e of updates [k, slots] fp64 and u = intended [slots] fp64, in weight²."""
    return updates * intended


def edq_block_sums(products: Tensor, block: int) -> Tensor:
    """Σ u·e over each block: [k, slots] → [k, blocks] fp64. No synchronisation."""
    return block_sums(products, block)
