"""What became of each element: the five classes and their subsets, counted by block.

Every element gets a code of eight bits; a table turns the code into a word with one six-bit field a count; the
words of a block are added, and the fields read out of the sum. So ten counts cost one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

import torch
from torch import Tensor

from collage_agent.sample.sampling import MAXIMUM_BLOCK
from collage_agent.stats.view import StepView, Sums, named
from collage_monitor.table import Table

__all__ = ["CLASS_COUNTS", "KEYS", "active_elements", "class_codes", "class_counts", "count_classes", "measure"]

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
"""Rows of `count_classes`. Idle elements are those in none of nonfinite, lost, distorted and faithful."""

KEYS: Final = (*CLASS_COUNTS, "idle", "active_blocks")
_FIELD_BITS: Final = 6
_NO_INTENT, _NO_EFFECT, _NO_VISIBLE, _FAR, _REVERSED, _LEFT_OUT, _GRADIENT, _PARAMETER = (
    1 << bit for bit in range(8)
)


def measure(step: StepView) -> Sums:
    """Elements of each class, and whether a block has some u ≠ 0."""
    active = active_elements(step.classes)
    idle = step.block_elements - step.classes["nonfinite"] - active
    more = torch.stack((idle, active.clamp(max=1.0)))
    return Sums(named(KEYS, torch.cat((step.classes.array, more))))


def active_elements(counts: Mapping[str, Tensor]) -> Tensor:
    """Elements with u ≠ 0, from the counts of the classes."""
    return (counts["lost"] + counts["distorted"]).add_(counts["faithful"])


def class_counts(codes: Tensor, block: int, block_elements: Tensor) -> Table[Tensor]:
    """`count_classes` by name; `block_elements` fp64 [blocks]: the other slots hold nothing."""
    counts = named(CLASS_COUNTS, count_classes(codes, block))
    # They were left out as what is not finite. Counts are whole numbers: the difference is exact.
    counts["nonfinite"].sub_(block - block_elements)
    return counts


def class_codes(
    intended: Tensor,
    effective: Tensor,
    visible: Tensor,
    product: Tensor,
    excluded: Tensor,
    bad_gradient: Tensor,
    bad_parameter: Tensor,
) -> Tensor:
    """uint8 [n]: everything about an element that decides its classes.

    u, e, eᵛ, u·e: fp64 [n], zero where `excluded`; the others uint8 [n], 1 where it is so. e and eᵛ may be the same
    tensor. "Far" is |e − u| > ½|u|. No synchronisation.
    """
    distance = (effective - intended).abs_()
    no_effect = effective.logical_not()
    bits = (
        intended.logical_not(),
        no_effect,
        no_effect if visible is effective else visible.logical_not(),
        distance.gt(intended.abs().mul_(0.5)),
        product.lt(0),
        excluded,
        bad_gradient,
        bad_parameter,
    )
    codes = bits[0].to(torch.uint8)
    for position, bit in enumerate(bits[1:], start=1):
        codes.add_(bit.view(torch.uint8), alpha=1 << position)
    return codes


def count_classes(codes: Tensor, block: int) -> Tensor:
    """Counts by block, fp64 [len(CLASS_COUNTS), blocks], of codes uint8 [slots]. No synchronisation."""
    if block > MAXIMUM_BLOCK:
        raise ValueError(f"block={block}; a count must fit {_FIELD_BITS} bits: pass at most {MAXIMUM_BLOCK}")
    words = _table(codes.device).index_select(0, codes.to(torch.int32))
    sums = words.view(-1, block).sum(1)
    return sums.bitwise_right_shift(_shifts(codes.device)).bitwise_and_((1 << _FIELD_BITS) - 1).to(torch.float64)


@cache
def _table(device: torch.device) -> Tensor:
    words = [sum(1 << (_FIELD_BITS * CLASS_COUNTS.index(name)) for name in _classes(code)) for code in range(256)]
    return torch.tensor(words, dtype=torch.int64).to(device)


@cache
def _shifts(device: torch.device) -> Tensor:
    return torch.arange(len(CLASS_COUNTS), device=device).mul_(_FIELD_BITS).unsqueeze(1)


def _classes(code: int) -> set[str]:
    """The counts that an element with this code enters."""
    names = {"nonfinite_gradients"} if code & _GRADIENT else set()
    names |= {"nonfinite_parameters"} if code & _PARAMETER else set()
    if code & _LEFT_OUT:
        return names | {"nonfinite"}
    if code & _NO_VISIBLE:
        names.add("unchanged")
    if code & _NO_INTENT:
        return names if code & _NO_EFFECT else names | {"stray"}
    if code & _NO_VISIBLE:
        names.add("lost_visible")
    if code & _NO_EFFECT:
        return names | {"lost"}
    if not code & _FAR:
        return names | {"faithful"}
    return names | ({"distorted", "reversed"} if code & _REVERSED else {"distorted"})
