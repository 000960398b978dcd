"""Moving averages that are zero where the gradient is not: second moments that underflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collage_agent.stats.segments import block_sums, on_host

__all__ = ["zero_block_counts"]

Bits = NDArray[np.uint8]

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def zero_block_counts(
    live: Sequence[Tensor], gradient: Tensor, states: Sequence[Tensor], left_out: Tensor, block: int
) -> Tensor:
    """By block: elements with g = 0, then for each state those with s = 0 and g ≠ 0: fp64 [1 + k, blocks].

    gradient fp64 [slots], k states fp64 [slots] as stored after the step, low components included; `live`: both as
    they are kept, leading components only. `left_out` uint8 [slots]: elements that are not counted. The host looks
    for zeros among the bits of what is kept, a tenth of what comparing floats costs there. No synchronisation.
    """
    if on_host(gradient):
        return _counts_on_host(live, states, left_out.numpy(), block)
    taken = left_out.bitwise_xor(1)
    still = gradient.logical_not().view(torch.uint8).bitwise_and_(taken)
    taken.bitwise_xor_(still)
    counted = [still, *(state.logical_not().view(torch.uint8).bitwise_and_(taken) for state in states)]
    return block_sums(torch.stack(counted).to(torch.float64), block)


def _counts_on_host(live: Sequence[Tensor], states: Sequence[Tensor], left_out: Bits, block: int) -> Tensor:
    counts = torch.zeros(len(live), len(left_out) // block, dtype=torch.float64)
    gradient = _magnitudes(live[0])
    for row, leading in enumerate(live):
        places = np.flatnonzero(_magnitudes(leading) == 0)
        places = places[left_out[places] == 0]
        if row:
            places = places[gradient[places] != 0]
            places = places[states[row - 1].numpy()[places] == 0]
        if len(places):
            counts[row] = torch.from_numpy(np.bincount(places // block, minlength=counts.shape[1]))
    return counts


def _magnitudes(values: Tensor) -> NDArray[np.signedinteger[Any]]:
    """The bits of floats without their signs, [slots]: 0 for 0 and −0 alone."""
    bits: NDArray[np.signedinteger[Any]] = values.view(_INTEGERS[values.element_size()]).numpy() << 1
    return bits
