"""The states beside the weights, and how exactly they change: moving averages, weight decay, residuals.

Sums only: `collage_monitor/statistics/optimizer_state.py` defines names and metrics. Each is compared with an fp64
reference (`tests/agent/stats/test_states.py`, `test_decay.py`, `test_residuals.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from collage_optim.numerics.formats import round_to
from torch import Tensor

from collage_agent.sample.stored_parts import leaves_residual
from collage_agent.stats.block_sums import block_sums, flag_counts, nonfinite, on_host, zero_excluded
from collage_agent.stats.edq import squared_block_sums, squared_difference
from collage_agent.stats.step_view import MovingAverages, StepView, Sums, named
from collage_agent.stats.update_histogram import binade_fields, exponent_of, ulp_octave_counts
from collage_monitor.definitions import HISTOGRAM_LABELS

__all__ = [
    "RESIDUAL_SUMS",
    "decay_block_sums",
    "decay_is_lost",
    "measure_decay",
    "measure_residuals",
    "measure_states",
    "residual_block_sums",
    "residuals_left",
    "state_change_block_sums",
    "zero_block_counts",
]

_DECREMENT_KEYS: Final = (
    "state_decrement_intended_sum",
    "state_decrement_observed_sum",
    "state_rounding_variance",
)
_INCREMENT_KEYS: Final = (
    "state_increment_intended_sum",
    "state_increment_observed_sum",
    "state_rounding_variance",
)
_DECAY_KEYS: Final = ("decay_kept_sum", "decay_squared_sum")
RESIDUAL_SUMS = ("residual_elements", "residual_zero", "residual_fill_sum")
"""Rows of `residual_block_sums`."""
_RESIDUAL_KEYS = (*RESIDUAL_SUMS, "residual_nonfinite", "residual_dropped")
_FILLS = tuple(f"residual_fill_histogram/{label}" for label in HISTOGRAM_LABELS)
_FRACTION_BITS = 52
_FEWEST_IN_HALF_A_GAP: Final = 16
_LEAST_OWED: Final = 2**-5
"""Of an update: a step that is worked out in bfloat16 is itself off by up to a few parts in 2⁸."""
_BIAS = 1023
_BIAS_32 = 127


def measure_states(step: StepView) -> Sums:
    """How averages shrank and sums grew, as intended and as observed, and where they are zero; nothing without a u.

    A new state was not there to change. float16 ones are asked whether they are infinite.
    """
    averages = step.averages
    if not step.intended_known:
        return Sums()
    keys: list[str] = []
    rows: list[Tensor] = []
    excluded = None if step.finite else step.excluded
    zeros = _zeros(step, excluded)
    short = [name for name, parts in averages.components.items() if parts[0].dtype is torch.float16]
    infinite = [_infinite(step, excluded, name) for name in short]
    growing = [place for place, name in enumerate(averages.names) if name in averages.growing]
    sums = state_change_block_sums(averages.states, excluded, step.block, growing) if averages.names else None
    new = step.gradient.new_zeros(2, len(step.block_elements))
    for name in (*averages.decaying, *averages.growing):
        known = sums is not None and name in averages.names
        keys += [f"{kind}/{name}" for kind in (_INCREMENT_KEYS if name in averages.growing else _DECREMENT_KEYS)]
        own = sums[:, averages.names.index(name)] if sums is not None and known else new
        rows += [own, squared_difference(own[1:], own[0])]
    keys += ["gradient_nonzero", *(f"state_zero/{name}" for name in averages.components)]
    keys += [f"state_infinite/{name}" for name in short]
    return Sums(named(keys, torch.cat((*rows, zeros, *infinite))))


def _infinite(step: StepView, excluded: Tensor | None, name: str) -> Tensor:
    """Finite elements whose average, as stored after the step, is not finite: fp64 [1, blocks]."""
    averages = step.averages
    flags = nonfinite(averages.states[2, averages.names.index(name)])
    if excluded is not None:
        flags.bitwise_and_(excluded.bitwise_xor(1))
    return flag_counts(flags.unsqueeze(0), step.block)


def _as_stored(averages: MovingAverages, name: str) -> Tensor:
    """s as stored after the step. Computed here and not earlier, so that the next operations find it in the
    cache."""
    leading, *others = averages.components[name]
    stored = averages.states[2, averages.names.index(name)].copy_(leading)
    for component in others:
        stored.add_(component)
    return stored


def _zeros(step: StepView, excluded: Tensor | None) -> Tensor:
    """Finite elements with g ≠ 0, and those of them where each kept average is 0, by block."""
    averages = step.averages
    states = [_as_stored(averages, name) for name in averages.components]
    zeros = zero_block_counts(step.gradient, states, excluded, step.block)
    taken = step.block_elements - step.classes["nonfinite"] if excluded is not None else step.block
    torch.sub(taken, zeros[0], out=zeros[0])
    return zeros


def state_change_block_sums(
    states: Tensor, excluded: Tensor | None, block: int, growing: Sequence[int] = ()
) -> Tensor:
    """Σ (|s after| − |s before|) observed, and intended, over the elements of each block whose |s| should shrink;
    of the states at the places `growing`, over those whose |s| should grow.

    states [3, k, slots] fp64: |s| before, s after the step in exact arithmetic, and s as stored after it, of k
    states, low components included; used as scratch. `excluded` uint8 [slots]: elements that enter no sum; None:
    none, because empty slots are zero. Returns fp64 [2, k, blocks] in the states' units, intended first. No
    synchronisation.
    """
    changes = states[1:].abs_().sub_(states[:1])
    counted = changes[0].lt(0)
    for place in growing:
        torch.gt(changes[0, place], 0, out=counted[place])
    taken = counted.view(torch.int8)
    if excluded is not None:
        taken.bitwise_and_(excluded.view(torch.int8).bitwise_xor(1))
    # Negated before they are widened: −1 has all bits set in any width.
    changes.view(torch.int64).bitwise_and_(taken.neg_().to(torch.int64))
    return block_sums(changes, block)


def zero_block_counts(gradient: Tensor, states: Sequence[Tensor], excluded: Tensor | None, block: int) -> Tensor:
    """By block: elements with g = 0, then for each state those with s = 0 and g ≠ 0: fp64 [1 + k, blocks].

    gradient fp64 [slots], k states fp64 [slots] as stored after the step, low components included. `excluded` uint8
    [slots]: elements that are not counted; None: all are. No synchronisation.
    """
    counted = torch.empty(1 + len(states), len(gradient), dtype=torch.bool, device=gradient.device)
    torch.logical_not(gradient, out=counted[0])
    taken = counted[0].logical_not()
    for state, zero in zip(states, counted[1:], strict=True):
        torch.logical_not(state, out=zero)
    if excluded is not None:
        present = excluded.logical_not()
        counted[0].logical_and_(present)
        taken.logical_and_(present)
    counted[1:].logical_and_(taken)
    return flag_counts(counted, block)


def measure_decay(step: StepView) -> Sums:
    """How much of decoupled decay alone would be kept; nothing if there is none."""
    rate, dtype = step.decay, step.registered.dtype
    if rate is None:
        return Sums()
    if not decay_is_lost(rate, dtype):
        return Sums(
            named(_DECAY_KEYS, decay_block_sums(step.visible_parameter, rate, dtype, step.excluded, step.block))
        )
    if step.visible_parameter is step.parameter:
        visible_squares = step.squares["parameter"]
    else:
        finite = step.visible_parameter.unsqueeze(0)
        if not step.finite:
            finite = finite.clone()
            zero_excluded(finite, step.excluded)
        visible_squares = squared_block_sums(finite, step.block)[0]
    squares = visible_squares * rate**2
    return Sums(named(_DECAY_KEYS, torch.stack((torch.zeros_like(squares), squares))))


def decay_is_lost(rate: float | Tensor, dtype: torch.dtype) -> bool:
    """Whether decay by this rate, lr·λ, moves no number of `dtype`: it is below half the smallest gap everywhere.

    A number's smallest gap is that below a power of two, eps/2 of it. False for a tensor: it is not read. Without
    this a measured step takes 1.3 to 1.5 times as long, to find products that are all 0.
    """
    return not isinstance(rate, Tensor) and abs(rate) < torch.finfo(dtype).eps / 4


def decay_block_sums(
    visible_parameter: Tensor, rate: float | Tensor, dtype: torch.dtype, excluded: Tensor, block: int
) -> Tensor:
    """Σ d·d̂ and Σ d² over each block: fp64 [2, blocks] in weight².

    θᵛ = visible_parameter: fp64 [slots], exact in `dtype`; rate = lr·λ, a number or a tensor [()]; d = −rate·θᵛ,
    d̂ = RN(θᵛ·(1 − rate)) − θᵛ in `dtype`, rounded once. `excluded` uint8 [slots]: elements that enter no sum. No
    synchronisation.
    """
    intended = visible_parameter * -rate
    kept = round_to(_product_to_odd(visible_parameter, 1 - rate), dtype).to(torch.float64).sub_(visible_parameter)
    products = torch.stack((kept.mul_(intended), intended.mul(intended)))
    products.view(torch.int64).bitwise_and_(excluded.to(torch.int64).sub_(1))
    return block_sums(products, block)


def _product_to_odd(values: Tensor, factor: float | Tensor) -> Tensor:
    """values · factor in fp64, rounded to odd, so that rounding it again is as good as once; values have 24 bits.

    With round hyper-parameters ties are common, and a product rounded to nearest would fall onto them. The factor's
    leading 24 bits and the rest give exact products; Boldo and Melquiond, "When double rounding is odd", 2005.
    """
    whole = torch.zeros((), dtype=torch.float64, device=values.device) + factor
    leading = whole.to(torch.float32).to(torch.float64)
    large, small = values * leading, values * (whole - leading)
    total = large + small
    error = small.sub_(total - large)
    inexact = error.ne(0) & (total.view(torch.int64) & 1).eq(0)
    step = torch.where(error.signbit() == total.signbit(), 1, -1)
    total.view(torch.int64).add_(step * inexact)
    return total


def measure_residuals(step: StepView) -> Sums:
    """How full residuals are; nothing if the weight is not kept as a sum."""
    if step.residual is None:
        return Sums()
    registered, dtype, block = step.registered_in_fp32, step.registered.dtype, step.block
    residual, bad = step.residual, torch.zeros_like(step.block_elements)
    if not step.finite:
        bad = block_sums(nonfinite(residual).to(torch.float64), block)
        residual = residual.clone()
        residual.view(torch.int64).bitwise_and_(step.excluded.to(torch.int64).sub_(1))
    fields = binade_fields(residual, registered, dtype)
    rows = residual_block_sums(residual, registered, dtype, step.excluded, block, fields=fields)
    sums = named(RESIDUAL_SUMS, rows)
    fills = ulp_octave_counts(
        residual, registered, dtype, step.tensor_of_block, step.tensors, block, gaps=0.5, fields=fields
    )
    # r = 0 was counted as underflow.
    filled = sums["residual_elements"] - sums["residual_zero"]
    fills[0].index_add_(0, step.tensor_of_block, filled.sub_(block))
    dropped = torch.full_like(bad, torch.nan) if step.held is None else _dropped(step, residual, step.held)
    rows = torch.cat((sums.array, torch.stack((bad, dropped))))
    return Sums(named(_RESIDUAL_KEYS, rows), named(_FILLS, fills))


def _dropped(step: StepView, residual: Tensor, held: Tensor) -> Tensor:
    """Residuals that should be there and are 0, by block.

    If few numbers lie within half a gap, 0 is one of them and means nothing, as with small weights in fp16. Unseen
    steps may have brought residuals back to 0, as two opposite steps of Lion do. Then only the residuals for which
    0 is unusual count, less as many as still hold something.
    """
    least = _FEWEST_IN_HALF_A_GAP * 2 * torch.finfo(step.registered.dtype).smallest_normal
    gone = residual.logical_not().view(torch.uint8).bitwise_and_(held)
    if not step.finite:
        gone.bitwise_and_(step.excluded.bitwise_xor(1))
    some = _few(gone.view(torch.bool))
    if step.adjacent and isinstance(some, Tensor) and not len(some):
        return torch.zeros_like(step.block_elements)
    registered = step.registered[some]
    gone[some] &= registered.abs().ge(least)
    if step.adjacent:
        return flag_counts(gone.unsqueeze(0), step.block)[0]
    gone[some] &= leaves_residual(step.intended[some], registered)
    dropped = flag_counts(gone.unsqueeze(0), step.block)[0]
    filled = held.bitwise_and(residual.ne(0).view(torch.uint8)).bitwise_and_(step.excluded.bitwise_xor(1))
    return dropped.sub(flag_counts(filled.unsqueeze(0), step.block)[0]).clamp_(min=0)


def residuals_left(step: StepView) -> Tensor | None:
    """uint8 [slots], 1 where the step left a residual, or should have; None: the weight is not kept as a sum.

    It should have left one if the stored weight moved and its new value differs from the visible weight, by more
    than the 16-bit arithmetic of an optimizer loses in a step. No synchronisation.
    """
    if step.residual_after is None:
        return None
    nothing = torch.logical_not(step.residual_after)
    some = _few(nothing)
    left = nothing.logical_not()
    left[some] |= _owed(step, some)
    if not step.finite:
        left.logical_and_(step.excluded.logical_not())
    return left.view(torch.uint8)


def _few(flags: Tensor) -> Tensor | slice:
    """Where bools are set, if they are on the host: the few are looked at alone. A device would be waited for."""
    return torch.from_numpy(np.flatnonzero(flags.numpy())) if on_host(flags) else slice(None)


def _owed(step: StepView, some: Tensor | slice) -> Tensor:
    """Whether the step should have left a residual: bool, of these elements."""
    intended = step.intended[some]
    owed = (step.parameter[some] + intended).sub_(step.visible_parameter[some]).sub_(step.visible[some]).abs_()
    owed.sub_(intended.abs(), alpha=_LEAST_OWED)
    finest = torch.finfo(step.registered.dtype)
    return owed.ge(finest.smallest_normal * finest.eps).logical_and_(step.effective[some])


def residual_block_sums(
    residual: Tensor,
    visible_parameter: Tensor,
    dtype: torch.dtype,
    excluded: Tensor,
    block: int,
    *,
    fields: Tensor | None = None,
) -> Tensor:
    """Elements, those with r = 0, and Σ |r| / ½gap(θᵛ), over each block: fp64 [3, blocks].

    r = residual: fp64 [slots], zero where `excluded` uint8 [slots] is 1; θᵛ = visible_parameter [slots], exact in
    `dtype`, of at most 32 bits. `block` is that of `flag_counts`. The gap is that to θᵛ's neighbour in r's
    direction, so that a normalised pair is at most 1 full; a division by a power of two, and exact. `fields`: the
    `binade_fields`, if they are known. No synchronisation.
    """
    flags = torch.empty(2, len(residual), dtype=torch.bool, device=residual.device)
    torch.logical_not(excluded, out=flags[0])
    torch.logical_not(residual, out=flags[1]).logical_and_(flags[0])
    # Half a gap is 2^(field − 127) · eps / 2; its reciprocal is put together from its exponent.
    whole = _BIAS + _BIAS_32 - exponent_of(torch.finfo(dtype).eps / 2)
    field = binade_fields(residual, visible_parameter, dtype) if fields is None else fields
    reciprocal = (whole - field).to(torch.int64).bitwise_left_shift_(_FRACTION_BITS).view(torch.float64)
    fill = block_sums(reciprocal.mul_(residual).abs_(), block)
    return torch.cat((flag_counts(flags, block), fill.unsqueeze(0)))
