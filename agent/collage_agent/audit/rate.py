"""What a learning rate would lose: Adam-sized updates beside the gaps of the weights' own format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from collage_agent.audit.kept import KeptParameter
from collage_agent.numerics.formats import format_of, gap_towards

__all__ = ["SAFE_LOST_RATIO", "RateLoss", "add_losses", "rate_loss"]

SAFE_LOST_RATIO: Final = 0.1
"""A learning rate is called safe here if no larger share of the weights stands too coarse for it."""
_CHUNK: Final = 2**22
_BOTTOM: Final = -400


@dataclass(frozen=True)
class RateLoss:
    """How many weights an update of the learning rate's size cannot move, by rounding to nearest.

    lost: elements with |u| = learning rate below half the gap from the stored weight. estimated: the same with
    |u| from the checkpoint's own averages, out of `estimated_of` elements with u != 0; 0 where there are none.
    half_gaps: number of elements by exponent k of half a gap, 2**k.
    """

    elements: int
    lost: int
    estimated: int
    estimated_of: int
    half_gaps: Counter[int]

    @property
    def lost_ratio(self) -> float | None:
        """Share that an update as large as the learning rate leaves where it is."""
        return self.lost / self.elements if self.elements else None

    @property
    def estimated_lost_ratio(self) -> float | None:
        """The same share with the update sizes that the checkpoint's averages imply."""
        return self.estimated / self.estimated_of if self.estimated_of else None

    @property
    def smallest_safe_learning_rate(self) -> float | None:
        """The smallest update size that leaves at most SAFE_LOST_RATIO of the weights where they are; 0: any."""
        allowed = SAFE_LOST_RATIO * self.elements
        for exponent, count in sorted(self.half_gaps.items(), reverse=True):
            allowed -= count
            if allowed < 0:
                return math.ldexp(1.0, exponent) if exponent > _BOTTOM else 0.0
        return None


def rate_loss(kept: KeptParameter, learning_rate: float) -> RateLoss | None:
    """What steps of this size lose of one parameter; None where its format is not known or there is no weight.

    The grid is that of the fp32 master weight, else of the low component where it is not 0 (an update much
    smaller than the weight lands there), else of the weight. The gap is taken in the update's direction, which
    the first moment gives, else away from zero. Weight decay is left out. Synchronises nothing but the host.
    """
    weight = kept.weight if kept.master is None else kept.master
    if weight is None or not _is_known(weight) or (kept.low is not None and not _is_known(kept.low)):
        return None
    total = RateLoss(0, 0, 0, 0, Counter())
    for part in _parts(kept, weight):
        total = add_losses(total, _loss_of(*part, kept, learning_rate))
    return total


def add_losses(one: RateLoss, other: RateLoss) -> RateLoss:
    """Both together: counts add."""
    return RateLoss(
        one.elements + other.elements,
        one.lost + other.lost,
        one.estimated + other.estimated,
        one.estimated_of + other.estimated_of,
        one.half_gaps + other.half_gaps,
    )


def _parts(
    kept: KeptParameter, weight: Tensor
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]]:
    """Weight, low component, first and second moment, flat and in chunks that bound the memory."""
    second = kept.averages.get("exp_avg_sq")
    first = kept.averages.get("exp_avg") if second is not None else None
    low = kept.low if kept.master is None else None
    second_low = kept.average_lows.get("exp_avg_sq")
    flat = [None if tensor is None else tensor.reshape(-1) for tensor in (weight, low, first, second, second_low)]
    for start in range(0, weight.numel(), _CHUNK):
        w, r, m, v, v_low = (None if tensor is None else tensor[start : start + _CHUNK] for tensor in flat)
        assert w is not None
        if v is not None:
            v = v.double() if v_low is None else v.double() + v_low.double()
        yield w, r, None if m is None else m.double(), v


def _loss_of(
    weight: Tensor,
    low: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    kept: KeptParameter,
    learning_rate: float,
) -> RateLoss:
    direction = torch.zeros(()) if first is None else -first
    half_gap = 0.5 * gap_towards(weight, direction)
    if low is not None:
        # A pair with nothing in its low component takes an update of any size there.
        fine = 0.5 * gap_towards(low, direction)
        half_gap = torch.where(low == 0, torch.full_like(fine, math.ldexp(1.0, _BOTTOM)), fine)
    finite = torch.isfinite(half_gap)
    half_gap = half_gap[finite]
    exponents = (torch.frexp(half_gap).exponent - 1 - _BOTTOM).long()
    counts = torch.bincount(exponents) if exponents.numel() else torch.zeros(0)
    half_gaps = Counter({index + _BOTTOM: int(count) for index, count in enumerate(counts.tolist()) if count})
    estimated = estimated_of = 0
    if first is not None and second is not None:
        sizes = (learning_rate * _unit_steps(first, second, kept))[finite]
        estimated_of = int((sizes > 0).sum())
        estimated = int(((sizes > 0) & (sizes < half_gap)).sum())
    return RateLoss(half_gap.numel(), int((half_gap > learning_rate).sum()), estimated, estimated_of, half_gaps)


def _unit_steps(first: Tensor, second: Tensor, kept: KeptParameter) -> Tensor:
    """|u| / learning rate of Adam's next step, if the averages stayed as they are, fp64."""
    beta1, beta2 = (float(beta) for beta in kept.group.get("betas", (0.9, 0.999)))
    step = kept.step or 10**6
    first, second = first / (1 - beta1**step), second / (1 - beta2**step)
    return first.abs() / (second.clamp(min=0).sqrt() + float(kept.group.get("eps", 1e-8)))


def _is_known(tensor: Tensor) -> bool:
    try:
        format_of(tensor.dtype)
    except TypeError:
        return False
    return True
