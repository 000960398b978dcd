"""Whole-tensor totals from inside a step: what was intended, what was kept, and what became of each element.

The names are those of the metric catalogue. Everything stays on the device; nothing is read back here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

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
    sums = _update_sums(observed)
    if observed.intended.device.type != "cpu" or not _all_finite(sums, observed.gradient):
        bad, observed = _without_nonfinite(observed)
        sums = _update_sums(observed)
    elements = torch.full_like(bad, observed.intended.numel())
    return _class_matrix(bad.device) @ torch.stack([elements, bad, *_sign_sums(observed), *sums]).to(torch.float64)


def _update_sums(observed: Observation) -> list[Tensor]:
    """Σu², Σu·e, Σe², Σu·eᵛ, Σeᵛ²."""
    u, e, visible = observed.intended, observed.effective, observed.visible
    sums = [torch.dot(u, u), torch.dot(u, e), torch.dot(e, e)]
    return [*sums, *(sums[1:] if visible is None else [torch.dot(u, visible), torch.dot(visible, visible)])]


_RAW = ("elements", "bad", "wanted", "moved", "far", "both", "agreeing", "visible_moved", "visible_both")
_CLASSES: dict[str, dict[str, float]] = {
    "elements": {"elements": 1},
    "nonfinite": {"bad": 1},
    "idle": {"elements": 1, "bad": -1, "wanted": -1},
    "stray": {"moved": 1, "both": -1},
    "lost": {"wanted": 1, "both": -1},
    "distorted": {"far": 1, "wanted": -1, "moved": -1, "both": 2},
    "reversed": {"both": 0.5, "agreeing": -0.5},
    "faithful": {"wanted": 1, "moved": 1, "both": -1, "far": -1},
    "lost_visible": {"wanted": 1, "visible_both": -1},
    "unchanged": {"elements": 1, "bad": -1, "visible_moved": -1},
}


@lru_cache(maxsize=8)
def _class_matrix(device: torch.device) -> Tensor:
    """fp64 [totals, raw sums]: every class is a combination of the raw counts, and the sums pass through.

    What is left out is zero in u and e alike: it counts as neither wanted nor moved. An element is far from its
    intention also when only one of the two is zero.
    """
    raw = (*_RAW, *STEP_TOTALS[len(_CLASSES) :])
    rows = [[_CLASSES.get(name, {name: 1.0}).get(column, 0.0) for column in raw] for name in STEP_TOTALS]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def _all_finite(sums: list[Tensor], gradient: Tensor) -> bool:
    """Whether Σu², Σe² and Σg are finite: an infinity or NaN anywhere makes its sum so too."""
    return math.isfinite(float(sums[0]) + float(sums[2]) + float(gradient.sum()))


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


def _sign_sums(observed: Observation) -> list[Tensor]:
    """The raw counts of `_RAW` from "wanted" on, as sums of products of signs.

    A sign does not underflow, and sums of whole numbers are exact in fp32 up to 2**24, more than a chunk has.
    With s·t the product of the two signs, Σ (s·t)² counts where both move, and Σ s·t those that agree less those
    that don't.
    """
    u, e, visible, take = observed.intended, observed.effective, observed.visible, observed.take
    sign = torch.sign(u, out=take(u))
    moved = torch.sign(e, out=take(u))
    found = [torch.dot(sign, sign), torch.dot(moved, moved)]
    half = torch.mul(u, sign, out=take(u)).mul_(0.5)
    far = torch.sub(e, u, out=take(u)).abs_().sub_(half).sign_().clamp_(min=0)
    agreement = moved.mul_(sign)
    found += [far.sum(), torch.dot(agreement, agreement), agreement.sum()]
    if visible is None:
        return [*found, found[1], found[3]]
    moved = torch.sign(visible, out=moved)
    found.append(torch.dot(moved, moved))
    agreement = moved.mul_(sign)
    return [*found, torch.dot(agreement, agreement)]
