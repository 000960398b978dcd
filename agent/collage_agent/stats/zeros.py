"""Moving averages that are zero where the gradient is not: second moments that underflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from collage_agent.stats.segments import block_sums, on_host

__all__ = ["may_be_zero", "zero_block_counts"]

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def may_be_zero(values: Tensor, padding: int) -> bool:
    """Whether some of the floats [slots] may be 0 besides `padding` slots that are; always, on a device.

    The host looks at the bits, a tenth of what comparing floats costs there. A −0 counts as well.
    """
    if not on_host(values):
        return True
    bits = values.view(_INTEGERS[values.element_size()]).numpy()
    return bool(np.count_nonzero(bits << 1) != bits.size - padding)


def zero_block_counts(gradient: Tensor, states: Sequence[Tensor], left_out: Tensor, block: int) -> Tensor:
    """By block: elements with g = 0, then for each state those with s = 0 and g ≠ 0: fp64 [1 + k, blocks].

    gradient fp64 [slots], k states fp64 [slots] as stored after the step, low components included; `left_out`
    uint8 [slots]: elements that are not counted. No synchronisation.
    """
    taken = left_out.bitwise_xor(1)
    still = gradient.logical_not().view(torch.uint8).bitwise_and_(taken)
    taken.bitwise_xor_(still)
    counted = [still, *(state.logical_not().view(torch.uint8).bitwise_and_(taken) for state in states)]
    return block_sums(torch.stack(counted).to(torch.float64), block)
