"""Moving averages: whether they still decay, and whether they are zero where the gradient is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collage_agent.stats.blocks import block_sums, on_host
from collage_agent.stats.view import StepView, Sums, named

__all__ = ["measure", "state_decrement_block_sums", "zero_block_counts"]

Bits = NDArray[np.uint8]

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def measure(step: StepView) -> Sums:
    """How moving averages shrank, as intended and as observed, and where they are zero; nothing without a u.

    No decrement was possible where an average is new.
    """
    averages = step.averages
    if not step.known:
        return Sums()
    keys: list[str] = []
    rows: list[Tensor] = []
    zeros = _zeros(step)
    # Slots that hold nothing have states that stay 0: only what else is left out must be taken out of the sums.
    left_out = step.left_out
    taken_out = None if on_host(left_out) and np.count_nonzero(left_out.numpy()) == step.padded else left_out
    sums = state_decrement_block_sums(averages.states, taken_out, step.block) if averages.names else None
    new = step.gradient.new_zeros(2, len(step.held))
    for name in averages.judged:
        known = sums is not None and name in averages.names
        keys += [f"state_decrement_intended_sum/{name}", f"state_decrement_observed_sum/{name}"]
        rows.append(sums[:, averages.names.index(name)] if sums is not None and known else new)
    keys += ["gradient_nonzero", *(f"state_zero/{name}" for name in averages.kept)]
    return Sums(named(keys, torch.cat((*rows, zeros))))


def _zeros(step: StepView) -> Tensor:
    """Finite elements with g ≠ 0, and those of them where each kept average is 0, by block."""
    averages = step.averages
    live = [averages.live_gradient, *averages.kept.values()]
    states = [averages.states[2, averages.names.index(name)] for name in averages.kept]
    zeros = zero_block_counts(live, step.gradient, states, step.left_out, step.block)
    torch.sub(step.held - step.classes["nonfinite"], zeros[0], out=zeros[0])
    return zeros


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
