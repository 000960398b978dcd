"""Effective descent quality, products of the intended with the effective update, and norms, sums of squares.

Collage, arXiv 2405.03637.

Every step runs these. The formula is fixed by `docs/metrics.md`; names and metrics by
`collage_monitor/statistics/edq.py`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from collage_agent.stats.block_sums import block_sums
from collage_agent.stats.step_view import ROWS, StepView, Sums, named

__all__ = [
    "EDQ_KEYS",
    "NORM_KEYS",
    "edq_block_sums",
    "edq_products",
    "measure_edq",
    "measure_norms",
    "squared_block_sums",
    "squared_difference",
]

EDQ_KEYS: Final = ("intended_effective_sum", "intended_visible_sum", "rounding_variance")
NORM_KEYS: Final = (*(f"{row}_squared_sum" for row in ROWS), "effective_squared_sum_without_u")


def measure_edq(step: StepView) -> Sums:
    """Σ u·e and Σ u·eᵛ, and the squared difference of Σ u·e and Σ u² in each block."""
    products = edq_block_sums(step.products, step.block).expand(2, -1)
    return Sums(named(EDQ_KEYS, torch.cat((products, squared_difference(products[:1], step.squares["intended"])))))


def edq_products(intended: Tensor, updates: Tensor) -> Tensor:
    """u·e of each element, for each row e of updates [k, slots] fp64 and u = intended [slots] fp64, in weight²."""
    return updates * intended


def edq_block_sums(products: Tensor, block: int) -> Tensor:
    """Σ u·e over each block: [k, slots] → [k, blocks] fp64. No synchronisation."""
    return block_sums(products, block)


def measure_norms(step: StepView) -> Sums:
    """Σ θ², g², e², eᵛ², u²; and Σ e² once more where no u is known."""
    effective = step.squares["effective"]
    without_u = torch.zeros_like(effective) if step.intended_known else effective
    return Sums(named(NORM_KEYS, torch.stack([*(step.squares[row] for row in ROWS), without_u])))


def squared_difference(observed: Tensor, exact: Tensor) -> Tensor:
    """(observed − exact)² of each block: its rounding error, a term of the rounding's variance."""
    return (observed - exact).square_()


def squared_block_sums(rows: Tensor, block: int) -> Tensor:
    """Σ x² over each block: rows [k, slots] fp64 → [k, blocks] fp64, in the rows' units squared.

    Within 3 ulp: the norm is one pass over the rows, where a product and its sum are three. No synchronisation.
    """
    norms: Tensor = torch.linalg.vector_norm(rows.view(len(rows), -1, block), dim=-1)
    return norms.square_()
