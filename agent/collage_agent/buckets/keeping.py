"""Block sums about what is kept besides the weights themselves: moving averages, residuals, and decay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from collage_agent.buckets.intended import Before, Intended, Values, add_up
from collage_agent.sample import stored
from collage_agent.stats import (
    RESIDUAL_SUMS,
    block_sums,
    decay_block_sums,
    decay_is_lost,
    leave_out,
    nonfinite,
    on_host,
    residual_block_sums,
    squared_block_sums,
    state_decrement_block_sums,
    zero_block_counts,
)

__all__ = ["Sums", "average_sums", "decay_sums", "residual_of", "residual_sums"]

Sums = tuple[tuple[str, ...], Tensor]
"""Statistic keys, and a row of blocks for each: fp64 [keys, blocks]."""


def average_sums(
    seen: Before, intended: Intended, after: Values, gradient: Tensor, left_out: Tensor, padding: int, block: int
) -> list[Sums]:
    """How moving averages shrank, as intended and as observed, and where they are zero. Synchronises nothing.

    `left_out` uint8 [slots], of which `padding` slots hold nothing; g = gradient: fp64 [slots]. No decrement was
    possible where an average is new.
    """
    if not intended.known:
        return []
    kept = seen.intent.kept
    judged = [
        name
        for name in stored.average_names(after, kept)
        if stored.decaying(name, after[name].dtype) and (name in intended.averages or name not in seen.before)
    ]
    present = [name for name in intended.averages if name in after]
    for name in present:
        add_up(after, stored.components(name, after, kept), intended.states[2, intended.averages.index(name)])
    found = []
    zeros = _zero_counts(seen, present, intended, after, gradient, left_out, block)
    # Slots that hold nothing have states that stay 0: only what else is left out must be taken out of the sums.
    taken_out = None if on_host(left_out) and np.count_nonzero(left_out.numpy()) == padding else left_out
    sums = state_decrement_block_sums(intended.states, taken_out, block) if intended.averages else None
    new = gradient.new_zeros(2, left_out.numel() // block)
    for name in judged:
        keys = (f"state_decrement_intended_sum/{name}", f"state_decrement_observed_sum/{name}")
        known = sums is not None and name in intended.averages
        found.append((keys, sums[:, intended.averages.index(name)] if sums is not None and known else new))
    return [*found, zeros]


def _zero_counts(
    seen: Before,
    names: Sequence[str],
    intended: Intended,
    after: Values,
    gradient: Tensor,
    left_out: Tensor,
    block: int,
) -> Sums:
    """Elements with g = 0, under the key of those with g ≠ 0 that they are turned into, and states that are 0."""
    keys = ("gradient_nonzero", *(f"state_zero/{name}" for name in names))
    live = [seen.before[stored.GRADIENT], *(after[name] for name in names)]
    states = [intended.states[2, intended.averages.index(name)] for name in names]
    return keys, zero_block_counts(live, gradient, states, left_out, block)


def decay_sums(
    seen: Before, visible_parameter: Tensor, visible_squares: Tensor | None, left_out: Tensor, block: int
) -> list[Sums]:
    """What decoupled decay alone would keep; nothing where there is none. Synchronises nothing.

    θᵛ = visible_parameter: fp64 [slots], set to 0 where `left_out` unless Σ θᵛ² by block, visible_squares, is
    known.
    """
    keys = ("decay_kept_sum", "decay_squared_sum")
    rate = seen.decay
    if rate is None:
        return []
    dtype = seen.before[stored.PARAMETER].dtype
    if decay_is_lost(rate, dtype):
        if visible_squares is None:
            leave_out(visible_parameter.unsqueeze(0), left_out)
            visible_squares = squared_block_sums(visible_parameter.unsqueeze(0), block)[0]
        squares = visible_squares * rate**2
        return [(keys, torch.stack((torch.zeros_like(squares), squares)))]
    return [(keys, decay_block_sums(visible_parameter, rate, dtype, left_out, block))]


def residual_of(seen: Before, after: Values) -> Tensor | None:
    """r before the step, fp64 [slots], 0 where it did not exist yet; None: the weight is not kept as a sum."""
    keys = stored.stored_parameter(after, seen.intent.kept)
    if keys[0] != stored.PARAMETER or len(keys) == 1:
        return None
    residual = torch.zeros_like(seen.before[stored.PARAMETER], dtype=torch.float64)
    for key in keys[1:]:
        if key in seen.before:
            residual.add_(seen.before[key])
    return residual


def residual_sums(seen: Before, residual: Tensor, left_out: Tensor, block: int) -> Sums:
    """How full residuals are; r = residual is set to 0 where `left_out`. Synchronises nothing."""
    parameter = seen.before[stored.PARAMETER]
    bad = block_sums(nonfinite(residual).to(torch.float64), block)
    residual.view(torch.int64).bitwise_and_(left_out.to(torch.int64).sub_(1))
    sums = residual_block_sums(residual, parameter, parameter.dtype, left_out, block)
    return (*RESIDUAL_SUMS, "residual_nonfinite"), torch.cat((sums, bad.unsqueeze(0)))
