"""Whether a moving average still decays: observed over intended shrinking of |s|."""

from __future__ import annotations

import torch
from torch import Tensor

from collage_agent.stats.segments import block_sums

__all__ = ["state_decrement_block_sums"]


def state_decrement_block_sums(
    before: Tensor, intended: Tensor, observed: Tensor, left_out: Tensor, block: int
) -> Tensor:
    """Σ (|s after| − |s before|) observed, and intended, over the elements of each block whose |s| should shrink.

    before, intended, observed: the stored state before, after the step in exact arithmetic, and as stored after
    it, low component included: fp64 [slots]. `left_out` bool [slots]: elements that enter no sum.
    Returns fp64 [2, blocks] in the state's unit, observed first. No synchronisation.
    """
    size = before.abs()
    changes = torch.stack((observed, intended)).abs_().sub_(size)
    shrinks = changes[1].lt(0).logical_and_(left_out.logical_not())
    changes.view(torch.int64).bitwise_and_(shrinks.to(torch.int64).neg_())
    return block_sums(changes, block)
