"""Whole-tensor totals from inside a step: what was intended, what was kept, and what became of each element.

The names are those of the metric catalogue. Everything stays on the device; nothing is read back here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["STEP_TOTALS", "Observation", "totals_of"]

STEP_TOTALS = (
    "elements",
    "nonfinite",
    "idle",
    "stray",
    "lost",
    "distorted",
    "reversed",
    "faithful",
    "lost_visible",
    "unchanged",
    "intended_squared_sum",
    "intended_effective_sum",
    "effective_squared_sum",
    "intended_visible_sum",
    "visible_squared_sum",
)
"""Rows of a tensor's totals: counts of elements, then sums in weight²."""


@dataclass(frozen=True)
class Observation:
    """One chunk of a step: flat, of one length and dtype (fp32 or fp64), free to be overwritten.

    intended: u; effective: e, the change of what is kept; visible: the change of the registered parameter, None
    where that is all that is kept; gradient: g, only asked whether it is finite. take: gives scratch as long as a
    tensor.
    """

    intended: Tensor
    effective: Tensor
    visible: Tensor | None
    gradient: Tensor
    take: Callable[[Tensor], Tensor] = torch.empty_like


def totals_of(observation: Observation) -> Tensor:
    """The totals of a chunk: fp64 [len(STEP_TOTALS)] on the chunk's device.

    Counts are exact for u and e as given; sums are dot products in their dtype (fp32: within 1e-5 of fp64), added
    in fp64 by the caller. Elements where u, e or g is not finite are counted and left out of all else. On a CPU
    that costs a probe, elsewhere a masking pass, so that no device is waited for.
    """
    observed = observation
    bad = torch.zeros((), dtype=observed.intended.dtype, device=observed.intended.device)
    if observed.intended.device.type != "cpu" or not _all_finite(observed):
        bad, observed = _without_nonfinite(observed)
    u, e = observed.intended, observed.effective
    visible = e if observed.visible is None else observed.visible
    elements = u.numel()
    counts = _class_counts(u, e, visible, observed.take)
    finite = elements - bad
    # What is left out is zero in u and e alike: it counts as neither wanted nor moved.
    idle = finite - counts["wanted"]
    lost = counts["wanted"] - counts["both"]
    stray = counts["moved"] - counts["both"]
    distorted = counts["far"] - lost - stray
    rows = [
        torch.full_like(bad, elements),
        bad,
        idle,
        stray,
        lost,
        distorted,
        counts["reversed"],
        finite - idle - lost - distorted,
        counts["wanted"] - counts["visible_both"],
        finite - counts["visible_moved"],
        torch.dot(u, u),
        torch.dot(u, e),
        torch.dot(e, e),
    ]
    rows += rows[-2:] if visible is e else [torch.dot(u, visible), torch.dot(visible, visible)]
    return torch.stack([row.to(torch.float64) for row in rows])


def _all_finite(observed: Observation) -> bool:
    """Whether sums of all inputs are finite; an infinity or NaN anywhere makes its sum so too."""
    probes = (observed.intended.sum(), observed.effective.sum(), observed.gradient.sum())
    return all(bool(torch.isfinite(probe)) for probe in probes)


def _without_nonfinite(observed: Observation) -> tuple[Tensor, Observation]:
    """How many elements have a u, e or g that is not finite, and the rest with zeros in their place."""
    finite = (
        torch.isfinite(observed.intended) & torch.isfinite(observed.effective) & torch.isfinite(observed.gradient)
    )
    zero = torch.zeros((), dtype=observed.intended.dtype, device=observed.intended.device)
    intended, effective = (torch.where(finite, x, zero) for x in (observed.intended, observed.effective))
    visible = None if observed.visible is None else torch.where(finite, observed.visible, zero)
    bad = (~finite).to(intended.dtype)
    return torch.dot(bad, bad), Observation(intended, effective, visible, observed.gradient, observed.take)


def _class_counts(u: Tensor, e: Tensor, visible: Tensor, take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Counts from which the classes follow by subtraction, as sums of products of signs.

    A sign does not underflow. With s·t the product of the two signs, Σ (s·t)² counts where both move, and Σ s·t
    those that agree less those that don't.
    """
    sign = torch.sign(u, out=take(u))
    moved = torch.sign(e, out=take(u))
    counts = {"wanted": torch.dot(sign, sign), "moved": torch.dot(moved, moved)}
    excess = torch.sub(e, u, out=take(u)).abs_()
    half = torch.mul(u, sign, out=take(u)).mul_(0.5)
    far = excess.sub_(half).sign_().clamp_(min=0)
    counts["far"] = torch.dot(far, far)
    agreement = moved.mul_(sign)
    counts["both"] = torch.dot(agreement, agreement)
    counts["reversed"] = (counts["both"] - agreement.sum()) * 0.5
    if visible is e:
        return {**counts, "visible_both": counts["both"], "visible_moved": counts["moved"]}
    moved = torch.sign(visible, out=moved)
    counts["visible_moved"] = torch.dot(moved, moved)
    agreement = moved.mul_(sign)
    return {**counts, "visible_both": torch.dot(agreement, agreement)}
