"""Casts: what of an update reaches a low-precision copy of weights that are kept wider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from collage_optim.numerics.cast_formats import CAST_FORMATS, CastFormat, coded, scaled
from torch import Tensor

from collage_agent.stats.blocks import block_sums, flag_counts
from collage_agent.stats.elements import max_norms, nonfinite, on_host, sum_is_finite, zero_excluded
from collage_agent.stats.step_view import Copies, StepView, StoredWeights, Sums, named
from collage_monitor.table import Table

__all__ = ["cast_block_sums", "is_wider", "largest_magnitude", "measure"]

_SUMS: Final = ("elements", "changed", "squared_sum", "effective_sum")
_SIGNIFICANT_BITS: Final = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_ADDED_AT_ONCE: Final = 2**22


def measure(step: StepView) -> Sums:
    """What reached the copies; nothing where weights are kept no wider than their copies would be."""
    if step.copies is None:
        return Sums()
    return Sums(cast_block_sums(step.copies, step.intended, step.excluded, step.block, "cast"))


def cast_block_sums(copies: Copies, intended: Tensor, excluded: Tensor, block: int, name: str) -> Table[Tensor]:
    """Elements, those whose copy changed, Σ u² and Σ u·c by block, for each format: fp64 [rows, blocks].

    Of a format with scales also the elements whose number changed before it is scaled.
    u = intended: fp64 [slots]; `excluded` uint8 [slots]: elements that enter no sum, nor does one whose copy is not
    finite. Keys are `name`_…/FORMAT. NaN in the blocks of a tensor whose copy is not known. No synchronisation.
    """
    keys, found = [], []
    for key, nan_where_unknown in copies.nan_where_unknown.items():
        kind = CAST_FORMATS[key]
        number, value = _copy(copies.after, kind, block)
        number_before, value_before = _copy(copies.before, kind, block)
        change = value.to(torch.float64).sub_(value_before)
        moved = [change] if kind.block == 1 else [change, number.to(torch.float64).sub_(number_before)]
        sums, counts = _sums_and_counts(intended, moved, excluded, block)
        found.append(torch.cat((counts[:2], sums, counts[2:])).mul_(nan_where_unknown))
        parts = _SUMS if kind.block == 1 else (*_SUMS, "recoded")
        keys += [f"{name}_{part}/{key}" for part in parts]
    return named(keys, torch.cat(found))


def _sums_and_counts(
    intended: Tensor, moved: Sequence[Tensor], excluded: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """Σ u² and Σ u·c by block, fp64 [2, blocks]; elements, then those where each of `moved` is not 0: [·, blocks].

    The first of `moved` is c. An element where it is not finite counts as excluded.
    """
    change, missing = moved[0], excluded
    rows = torch.stack((intended * intended, intended * change))
    sums = block_sums(rows, block)
    if not (on_host(sums) and sum_is_finite(sums)):
        missing = nonfinite(change).bitwise_or_(excluded)
        zero_excluded(rows, missing)
        sums = block_sums(rows, block)
    flags = torch.empty(1 + len(moved), len(intended), dtype=torch.bool, device=intended.device)
    torch.logical_not(missing, out=flags[0])
    for values, flag in zip(moved, flags[1:], strict=True):
        torch.logical_not(values, out=flag).logical_not_().logical_and_(flags[0])
    return sums, flag_counts(flags, block)


def is_wider(dtypes: Sequence[torch.dtype], kind: CastFormat) -> bool:
    """Whether a weight that is a sum of numbers of these dtypes has more bits than a copy of this kind."""
    return len(dtypes) > 1 or _SIGNIFICANT_BITS.get(dtypes[0], 0) > kind.bits


def largest_magnitude(components: Sequence[Tensor]) -> Tensor:
    """The largest |θ| of a whole tensor, fp32 [()], NaN if one is; θ is the sum of its components.

    A pass over the tensor, of sums in pieces so that they take little memory. No synchronisation.
    """
    if len(components) == 1:
        return max_norms([components[0]])[0].to(torch.float32)
    found = []
    for pieces in zip(*(torch.split(part.reshape(-1), _ADDED_AT_ONCE) for part in components), strict=True):
        total = pieces[0].to(torch.float64)
        for piece in pieces[1:]:
            total = total + piece
        found.append(total.abs().amax())
    return torch.stack(found).amax().to(torch.float32)


def _copy(weights: StoredWeights, kind: CastFormat, block: int) -> tuple[Tensor, Tensor]:
    """The numbers that the copy keeps, and those that it stands for."""
    largest = None
    if kind.of_tensor:
        assert weights.largest is not None
        largest = weights.largest.repeat_interleave(block // kind.block)
    numbers, scales = coded(weights.values, kind, largest)
    return numbers, scaled(numbers, scales, kind)
