"""The class of each element: the five classes and their subsets, counted by block.

A few conditions are counted, and the classes are sums and differences of these counts.

`collage_monitor/statistics/classes.py` defines the names and shares; that five classes cover each element once is
tested in `tests/agent/stats/test_classes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from collage_agent.stats.block_sums import flag_counts
from collage_agent.stats.step_view import StepView, Sums, named
from collage_monitor.totals_table import Table

__all__ = ["CLASS_COUNTS", "Flags", "KEYS", "active_elements", "class_counts", "measure"]

CLASS_COUNTS: Final = (
    "lost",
    "lost_visible",
    "distorted",
    "faithful",
    "nonfinite",
    "stray",
    "reversed",
    "unchanged",
    "nonfinite_gradients",
    "nonfinite_parameters",
)
"""Rows of `class_counts`. Idle elements are those in none of nonfinite, lost, distorted and faithful."""

KEYS: Final = (*CLASS_COUNTS, "idle", "active_blocks")


def measure(step: StepView) -> Sums:
    """Elements of each class, and whether a block has some u ≠ 0."""
    active = active_elements(step.classes)
    idle = step.block_elements - step.classes["nonfinite"] - active
    more = torch.stack((idle, active.clamp(max=1.0)))
    return Sums(named(KEYS, torch.cat((step.classes.array, more))))


def active_elements(counts: Mapping[str, Tensor]) -> Tensor:
    """Elements with u ≠ 0, from the counts of the classes."""
    return (counts["lost"] + counts["distorted"]).add_(counts["faithful"])


@dataclass(frozen=True)
class Flags:
    """The non-finite elements: uint8 [slots], 1 where not finite. `excluded`: the element enters no sum."""

    excluded: Tensor
    gradient: Tensor
    parameter: Tensor


def class_counts(
    updates: Tensor, product: Tensor, flags: Flags | None, block: int, block_elements: Tensor | float
) -> Table[Tensor]:
    """Elements of each class by block, fp64 [len(CLASS_COUNTS), blocks]. No synchronisation.

    updates: e, eᵛ (missing where it is e) and u, fp64 [2 or 3, slots], product u·e [slots]: zero where excluded.
    flags: None where all is finite. block_elements fp64 [blocks]: slots that hold one; the others are excluded too.

    "Far" is |e − u| > ½|u|, which covers lost and distorted elements. A negative product is always far.
    """
    effective, intended = updates[0], updates[-1]
    size = len(updates)
    conditions = torch.empty(2 * size + 1, updates.shape[1], dtype=torch.bool, device=updates.device)
    torch.logical_not(updates, out=conditions[:size])
    idle = conditions[size - 1]
    torch.logical_and(conditions[: size - 1], idle, out=conditions[size : 2 * size - 1])
    half = intended.abs().mul_(0.5)
    torch.gt(torch.sub(effective, intended).abs_(), half, out=conditions[2 * size - 1])
    torch.lt(product, 0.0, out=conditions[2 * size])
    counts = flag_counts(conditions, block)
    still, still_visible, no_intent = counts[0], counts[size - 2], counts[size - 1]
    both, both_visible, far, reversed_ = counts[size], counts[2 * size - 2], counts[2 * size - 1], counts[2 * size]
    excluded = block - block_elements
    found = torch.zeros(len(CLASS_COUNTS), counts.shape[1], dtype=torch.float64, device=updates.device)
    by_name = named(CLASS_COUNTS, found)
    if flags is not None:
        bad = flag_counts(torch.stack((flags.excluded, flags.gradient, flags.parameter)), block)
        torch.sub(bad[0], excluded, out=by_name["nonfinite"])
        found[-2:] = bad[1:]
        excluded = bad[0]
    lost = torch.sub(still, both, out=by_name["lost"])
    stray = torch.sub(no_intent, both, out=by_name["stray"])
    distorted = torch.sub(far, lost, out=by_name["distorted"]).sub_(stray)
    torch.sub(block - no_intent, lost, out=by_name["faithful"]).sub_(distorted)
    torch.sub(still_visible, both_visible, out=by_name["lost_visible"])
    torch.sub(still_visible, excluded, out=by_name["unchanged"])
    by_name["reversed"].copy_(reversed_)
    return by_name
