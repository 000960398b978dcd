"""How the totals of `sign_agreement` are measured: a pure function of a view of the step, on its device."""

from __future__ import annotations

from collections.abc import Mapping

from collage_agent.stats import StepView
from collage_agent.stats.block_sums import block_sums
from torch import Tensor

__all__ = ["measure"]


def measure(step: StepView) -> Mapping[str, Tensor]:
    """Sums by block, fp64 [blocks]. What is not finite is 0 in every row, and so not compared."""
    product = step.gradient.sign() * step.effective.sign()
    return {
        "sign_compared": block_sums(product.abs(), step.block),
        "sign_agreement": block_sums(product.lt(0).to(product.dtype), step.block),
    }
