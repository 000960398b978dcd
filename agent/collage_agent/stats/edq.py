"""Effective descent quality: the products of the intended with the effective update. Collage, arXiv 2405.03637."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from collage_agent.stats.blocks import block_sums
from collage_agent.stats.view import StepView, Sums, named

__all__ = ["KEYS", "edq_block_sums", "edq_products", "measure"]

KEYS: Final = ("intended_effective_sum", "intended_visible_sum")


def measure(step: StepView) -> Sums:
    """Σ u·e and Σ u·eᵛ."""
    return Sums(named(KEYS, edq_block_sums(step.products, step.block).expand(len(KEYS), -1)))


def edq_products(intended: Tensor, updates: Tensor) -> Tensor:
    """u·e of each element, for each row e of updates [k, slots] fp64 and u = intended [slots] fp64, in weight²."""
    return updates * intended


def edq_block_sums(products: Tensor, block: int) -> Tensor:
    """Σ u·e over each block: [k, slots] → [k, blocks] fp64. No synchronisation."""
    return block_sums(products, block)
