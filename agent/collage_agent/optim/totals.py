"""Whole-tensor totals from inside a step: what was intended, what was kept, and what became of each element.

The names are those of the metric catalogue. Everything stays on the device; nothing is read back here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy
import torch
from torch import Tensor

__all__ = ["COUNTS", "STEP_TOTALS", "Observation", "classified", "plain_raw_sums", "segmented_totals", "totals_of"]

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

COUNTS = 10
"""So many of them are counts."""


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


def totals_of(observed: Observation) -> Tensor:
    """The totals of a chunk: fp64 [len(STEP_TOTALS)] on the chunk's device.

    Counts are exact for u and e as given; sums are dot products in their dtype (fp32: within 1e-5 of fp64), added
    in fp64 by the caller. Elements where u, e or g is not finite are counted and left out of all else. On a CPU
    that costs a probe, elsewhere a masking pass, so that no device is waited for.
    """
    if observed.intended.device.type == "cpu":
        sums = _update_sums(observed)
        if _all_finite(sums, observed.gradient):
            counts = torch.tensor([observed.intended.numel(), 0, *_counts(observed)], dtype=torch.float64)
            return classified(torch.cat([counts, torch.stack(sums).to(torch.float64)]))
    return classified(plain_raw_sums(observed))


def classified(raw: Tensor) -> Tensor:
    """Raw sums, in the order of `_RAW` with those over updates behind, as totals: fp64 [len(STEP_TOTALS)]."""
    return _class_matrix(raw.device) @ raw.to(torch.float64)


def _update_sums(observed: Observation) -> list[Tensor]:
    """Σu², Σu·e, Σe², Σu·eᵛ, Σeᵛ²."""
    u, e, visible = observed.intended, observed.effective, observed.visible
    sums = [torch.dot(u, u), torch.dot(u, e), torch.dot(e, e)]
    return [*sums, *(sums[1:] if visible is None else [torch.dot(u, visible), torch.dot(visible, visible)])]


_RAW = ("elements", "bad", "wanted", "moved", "far", "both", "opposed", "visible_moved", "visible_both")
_CLASSES: dict[str, dict[str, float]] = {
    "elements": {"elements": 1},
    "nonfinite": {"bad": 1},
    "idle": {"elements": 1, "bad": -1, "wanted": -1},
    "stray": {"moved": 1, "both": -1},
    "lost": {"wanted": 1, "both": -1},
    "distorted": {"far": 1, "wanted": -1, "moved": -1, "both": 2},
    "reversed": {"opposed": 1},
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
    raw = (*_RAW, *STEP_TOTALS[COUNTS:])
    rows = [[_CLASSES.get(name, {name: 1.0}).get(column, 0.0) for column in raw] for name in STEP_TOTALS]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def plain_raw_sums(observed: Observation) -> Tensor:
    """The raw sums of a chunk, for `classified`, in its own dtype, by plain reductions that a compiler fuses.

    Counts are exact up to 2**24 elements in fp32.
    """
    sums = [column.sum() for column in _columns(observed)]
    return torch.stack([torch.full_like(sums[0], observed.intended.numel()), *sums])


def segmented_totals(observed: Observation, sizes: list[int]) -> Tensor:
    """The totals of several tensors that were stepped as one: fp64 [tensors, len(STEP_TOTALS)], added in fp64."""
    elements = torch.ones_like(observed.intended)
    columns = torch.stack([elements, *_columns(observed)]).to(torch.float64)
    sums = torch.stack([part.sum(1) for part in torch.split(columns, sizes, 1)])
    return sums @ _class_matrix(sums.device).T


def _columns(observed: Observation) -> list[Tensor]:
    """What each element adds to each raw sum but "elements", in the chunk's dtype."""
    u, e = observed.intended, observed.effective
    finite = torch.isfinite(u) & torch.isfinite(e) & torch.isfinite(observed.gradient)
    u, e = torch.where(finite, u, 0), torch.where(finite, e, 0)
    visible = e if observed.visible is None else torch.where(finite, observed.visible, 0)
    wanted, moved, visible_moved = u != 0, e != 0, visible != 0
    both = wanted & moved
    opposed = both & ((u < 0) != (e < 0))
    # Where |e| is just below half of |u| their difference rounds to that half: only e itself can tell.
    far = ((e - u).abs() * 2 > u.abs()) | (e.abs() * 2 < u.abs())
    counts = (~finite, wanted, moved, far, both, opposed, visible_moved, wanted & visible_moved)
    products = ((u, u), (u, e), (e, e), (u, visible), (visible, visible))
    return [*(count.to(u.dtype) for count in counts), *(a * b for a, b in products)]


def _all_finite(sums: list[Tensor], gradient: Tensor) -> bool:
    """Whether Σu², Σe² and Σg are finite: an infinity or NaN anywhere makes its sum so too."""
    return math.isfinite(float(sums[0]) + float(sums[2]) + float(gradient.sum()))


def _counts(observed: Observation) -> list[int]:
    """The raw counts of `_RAW` from "wanted" on, where all is finite: numpy's masks cost a fifth of torch's."""
    u, e = observed.intended.numpy(), observed.effective.numpy()
    size, other = (observed.take(observed.intended).numpy() for _ in range(2))
    wanted, moved = numpy.not_equal(u, 0), numpy.not_equal(e, 0)
    both = wanted & moved
    opposed = (numpy.signbit(u) ^ numpy.signbit(e)) & both
    numpy.abs(u, out=size)
    far = numpy.less(numpy.multiply(numpy.abs(e, out=other), 2, out=other), size)
    numpy.abs(numpy.subtract(e, u, out=other), out=other)
    far |= numpy.greater(numpy.multiply(other, 2, out=other), size)
    visible_moved = moved if observed.visible is None else numpy.not_equal(observed.visible.numpy(), 0)
    masks = (wanted, moved, far, both, opposed, visible_moved, wanted & visible_moved)
    return [int(numpy.count_nonzero(mask)) for mask in masks]
