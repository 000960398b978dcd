"""Whether a moving average still decays: observed over intended shrinking of |s|."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from collage_agent.stats.segments import block_sums

__all__ = ["state_decrement_block_sums"]


def state_decrement_block_sums(states: Tensor, left_out: Tensor | None, block: int) -> Tensor:
    """Σ (|s after| − |s before|) observed, and intended, over the elements of each block whose |s| should shrink.

    states [3, k, slots] fp64: |s| before, s after the step in exact arithmetic, and s as stored after it, of k
    states, low components included; used as scratch. `left_out` uint8 [slots]: elements that enter no sum; None:
    none, on a host. Returns fp64 [2, k, blocks] in the states' units, intended first. No synchronisation.
    """
    changes = states[1:].abs_().sub_(states[:1])
    if left_out is None:
        # The sign bit tells shrinking from growing, but for what is not a number, and that shows in the sums.
        changes.view(torch.int64).bitwise_and_(changes[0].view(torch.int64).bitwise_right_shift(63))
        sums = block_sums(changes, block)
        if np.isfinite(sums.numpy()).all():
            return sums
        return block_sums(torch.where(changes[0].isfinite(), changes, 0.0), block)
    shrinks = changes[0].lt(0).view(torch.uint8).bitwise_and_(left_out.bitwise_xor(1))
    changes.view(torch.int64).bitwise_and_(shrinks.to(torch.int64).neg_())
    return block_sums(changes, block)
