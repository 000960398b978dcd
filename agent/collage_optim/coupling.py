"""Coupled rounding: what rounding takes from the first moment is given to the weight, and the other way round.

If no gradient follows, a first moment m still moves its weight by −c m: under Adam with a second moment that
changes slowly c = lr / (√v̂ + ε) Σ_k β₁^k / (1 − β₁^(t + k)), under SGD c = lr μ / (1 − μ)
(`UpdateRule.coupled_displacement`). So x = w − c m, the point that the weight is going to, stays where it was if w
and m are rounded by Δw and Δm with Δw = c Δm. The coarser one of an element's weight and moment is rounded to
nearest, and the other one takes what that left, rounded at random. Then the bits of m only say how far the weight
wobbles around its path, not where it ends. ECO (arXiv 2601.22101) gives the weight's rounding to the momentum; the
other direction is ours. `docs/numerics.md` derives it.

Where a step is less than the weight's gap, m holds what the weight could not take. Two bounds keep that harmless.
The weight is kept within REACH_KEPT of what a gradient moves it by (`reach`) around x, or it would lag by up to
1 / (2 (1 − β₁)) gaps. And a weight whose gap is more than GAPS_EXCHANGED reaches is rounded at random alone: when
the rate rises at once, c does, and what m holds is delivered at the new rate.

`advance.py` calls it in place of storing the weight and the first moment (`tests/optim/test_coupling.py`). Nothing
waits for a device.
"""

from typing import Final

import torch
from torch import Tensor

from collage_optim import integer_codes
from collage_optim.arithmetic import State, WideArithmetic
from collage_optim.blocks import BLOCK_ELEMENTS, levels_of, padded, store_sizes
from collage_optim.integer_codes import CHANCE_BITS
from collage_optim.random_numbers import RandomBits
from collage_optim.strategies import PARAMETER_LOW, SCALE_SUFFIX, StateStorage
from collage_optim.update_rules import CoupledDisplacement

__all__ = ["GAPS_EXCHANGED", "REACH_KEPT", "store_coupled"]

REACH_KEPT: Final = 0.2
GAPS_EXCHANGED: Final = 4.0
_GAPS_FOLLOWED: Final = 1 / 8
_SMALLEST_AHEAD: Final = 1e-35  # To divide by: an infinite second moment makes c zero.


def store_coupled(
    arithmetic: WideArithmetic,
    chunk: State,
    name: str,
    storage: StateStorage,
    value: Tensor,
    moved: CoupledDisplacement,
    first: Tensor,
    draws: RandomBits,
) -> None:
    """Store the moved weight `value`, fp32 [n], and the first moment `first`, so that x is kept.

    name: the moment's state key, of blocks. storage: the weight's. All tensors are used up. A block with a NaN or
    infinity becomes NaN; its weights move as without coupling.
    """
    elements = value.numel()
    if elements % BLOCK_ELEMENTS:
        whole = {key: padded(chunk[key]) for key in ("parameter", PARAMETER_LOW, name)}
        whole[name + SCALE_SUFFIX] = chunk[name + SCALE_SUFFIX]
        value, first = padded(value), padded(first)
        longer = CoupledDisplacement(*map(padded, (moved.displacement, moved.ahead, moved.reach)))
        store_coupled(WideArithmetic(), whole, name, storage, value, longer, first, draws.longer(value))
        for key in ("parameter", PARAMETER_LOW, name):
            chunk[key].copy_(whole[key][:elements])
        return
    displacement, ahead = moved.displacement, moved.ahead
    gap = integer_codes.gap_of(arithmetic, value, storage)
    chance = integer_codes.chances(arithmetic, draws)
    scale, levels = chunk[name + SCALE_SUFFIX], levels_of(chunk[name], signed=True)
    threshold = None
    sizes = torch.abs(first, out=arithmetic.take(first))
    torch.amax(sizes.view(-1, BLOCK_ELEMENTS), 1, out=scale)
    # By its block's scale s a moment's step is s / levels, up to twice as wide for large ones, narrower for small.
    finer = _ahead_of_steps(arithmetic, ahead, scale * (1 / levels), gap).sub_(gap)
    if not finer.is_cpu or not float(finer.amin()) >= 0:
        coarse = torch.lt(finer, 0, out=arithmetic.take(gap))
        coarse.mul_(torch.le(gap, moved.reach * GAPS_EXCHANGED, out=finer))
        nearest = _moved_to_nearest(arithmetic, gap, first, moved)
        rest = torch.sub(nearest, displacement, out=sizes).mul_(coarse)
        first.addcdiv_(rest, ahead.clamp_min_(_SMALLEST_AHEAD) if ahead.dim() else ahead)
        displacement.lerp_(nearest, coarse)  # Exact: it is 0 or 1.
        # The weight does not need its random bits there.
        torch.sub(1.0, coarse, out=finer)
        threshold = torch.addcmul(finer, coarse, chance, value=2.0 ** (1 - CHANCE_BITS), out=nearest)
        arithmetic.give_back(coarse)
        torch.abs(first, out=sizes)
        torch.amax(sizes.view(-1, BLOCK_ELEMENTS), 1, out=scale)
    codes = store_sizes(arithmetic, sizes, chunk[name], scale, threshold, first)
    taken = _rounding_error(arithmetic, codes, scale * (1 / levels**2), first)
    if threshold is not None:
        taken.mul_(finer)
        arithmetic.give_back(threshold)
    if not scale.is_cpu or not bool(scale.isfinite().all()):
        taken.nan_to_num_(0.0, 0.0, 0.0)
    # Rounded twice: torch.addcmul rounds once where the processor has fused products, and bits would be its own.
    displacement.add_(taken.mul_(ahead))
    for vector in (taken, finer, first, *((ahead,) if ahead.dim() else ())):
        arithmetic.give_back(vector)
    value = integer_codes.move_by_gaps(arithmetic, value, displacement, gap, chance)
    integer_codes.store(arithmetic, value, chunk, "parameter", storage)


def _ahead_of_steps(arithmetic: WideArithmetic, ahead: Tensor, steps: Tensor, like: Tensor) -> Tensor:
    """c times its block's step of the moment, as long as `like`, fresh."""
    found = arithmetic.take(like)
    blocks = ahead.view(-1, BLOCK_ELEMENTS) if ahead.dim() else ahead
    torch.mul(blocks, steps.unsqueeze(1).expand(-1, BLOCK_ELEMENTS), out=found.view(-1, BLOCK_ELEMENTS))
    return found


def _moved_to_nearest(arithmetic: WideArithmetic, gap: Tensor, first: Tensor, moved: CoupledDisplacement) -> Tensor:
    """The displacement that takes a weight to its nearest number, fresh: a whole number of gaps."""
    lag = arithmetic.fresh(torch.mul, first, moved.ahead)
    kept = moved.reach * REACH_KEPT
    within = torch.clamp(lag, -kept, kept, out=arithmetic.take(lag)).sub_(lag)
    follows = torch.gt(gap, moved.reach * _GAPS_FOLLOWED, out=lag)
    target = torch.addcmul(moved.displacement, within, follows, out=within)
    arithmetic.give_back(lag)
    return arithmetic.over_power(target, gap).round_().mul_(gap)


def _rounding_error(arithmetic: WideArithmetic, codes: Tensor, unit: Tensor, first: Tensor) -> Tensor:
    """What the codes, signed fp32 numbers that are used up, hold beyond the moment: a result. unit: a code 1's."""
    sizes = torch.abs(codes, out=arithmetic.take(codes))
    squares = arithmetic.on(torch.mul, sizes, codes)
    arithmetic.give_back(codes)
    squares.view(-1, BLOCK_ELEMENTS).mul_(unit.unsqueeze(1))
    return squares.sub_(first)
