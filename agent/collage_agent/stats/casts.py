"""Casts: how much of an update reaches a low-precision copy of weights that are kept wider, and by which route.

Sums only: `collage_monitor/statistics/casts.py` defines their names, how they merge and the metrics made of them,
and both change together (`tests/agent/stats/test_casts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from collage_optim.numerics.cast_formats import CastCodes, CastRoute, coded, route_of
from torch import Tensor

from collage_agent.stats.block_sums import block_sums, flag_counts, nonfinite, on_host, sum_is_finite, zero_excluded
from collage_agent.stats.edq import squared_block_sums
from collage_agent.stats.step_view import Copies, StepView, StoredWeights, Sums, named
from collage_monitor.statistics.casts import route_pairs
from collage_monitor.totals_table import Table

__all__ = [
    "cast_block_sums",
    "is_wider",
    "measure",
]

_SUMS: Final[tuple[str, ...]] = ("elements", "changed", "squared_sum", "effective_sum")
_SIGNIFICANT_BITS: Final = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def measure(step: StepView) -> Sums:
    """The updates that reached the copies; nothing if weights are kept no wider than their copies."""
    if step.copies is None:
        return Sums()
    squares = step.squares["intended"]
    moved = cast_block_sums(step.copies, step.intended, squares, step.excluded, step.block, "cast")
    routes = _route_block_sums(step.copies, step.excluded, step.block)
    return Sums(moved if routes is None else {**moved, **routes})


def cast_block_sums(
    copies: Copies, intended: Tensor, squares: Tensor, excluded: Tensor, block: int, name: str
) -> Table[Tensor]:
    """Counts of elements and of changed copies, Σ u² and Σ u·c by block, for each format: fp64 [rows, blocks].

    For a format with scales, also the elements whose code changed, and whose block's or tile's scale changed.
    u = intended: fp64 [slots], 0 where excluded, and squares its Σ u², fp64 [blocks]; `excluded` uint8 [slots]:
    elements that no sum includes, like those without a finite copy. Keys are `name`_…/FORMAT. NaN in the blocks
    of a tensor whose copy is not known. No synchronisation.
    """
    keys, found = [], []
    for key, nan_where_unknown in copies.nan_where_unknown.items():
        route = route_of(key)
        now, then = _codes(copies.after, route), _codes(copies.before, route)
        moved = [now.values().to(torch.float64).sub_(then.values().to(torch.float64))]
        parts = _SUMS
        if now.scales is not None and then.scales is not None:
            moved.append(now.numbers.sub(then.numbers))
            parts = (*parts, "recoded")
            if route.last.block > 1:
                moved.append(now.scales.sub(then.scales).expand(-1, len(intended) // len(now.scales)).reshape(-1))
                parts = (*parts, "rescaled")
        sums, counts = _sums_and_counts(intended, squares, moved, excluded, block)
        found.append(torch.cat((counts[:2], sums, counts[2:])).mul_(nan_where_unknown))
        keys += [f"{name}_{part}/{key}" for part in parts]
    return named(keys, torch.cat(found))


def _route_block_sums(copies: Copies, excluded: Tensor, block: int) -> Table[Tensor] | None:
    """Counts of elements, and of those with different codes by two routes to one format, after the step: fp64
    [rows, blocks].

    None: no two of the copies are such routes. The rest is as for `cast_block_sums`.
    """
    keys, found = [], []
    for label in route_pairs(tuple(copies.nan_where_unknown)):
        pair = label.split("/")
        one, other = (_codes(copies.after, route_of(key)) for key in pair)
        missing = excluded
        for codes in (one, other):
            missing = nonfinite(codes.values()).bitwise_or_(missing)
        flags = torch.empty(2, len(excluded), dtype=torch.bool, device=excluded.device)
        torch.logical_not(missing, out=flags[0])
        torch.ne(one.numbers, other.numbers, out=flags[1]).logical_and_(flags[0])
        known = [copies.nan_where_unknown[key] for key in pair]
        found.append(flag_counts(flags, block).mul_(known[0]).mul_(known[1]))
        keys += [f"cast_route_{part}/{label}" for part in ("elements", "differing")]
    return named(keys, torch.cat(found)) if found else None


def _sums_and_counts(
    intended: Tensor, squares: Tensor, moved: Sequence[Tensor], excluded: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """Σ u² and Σ u·c by block, fp64 [2, blocks]; elements, then those where each of `moved` is not 0: [·, blocks].

    The first of `moved` is c. An element where it is not finite counts as excluded.
    """
    change, missing = moved[0], excluded
    sums = torch.stack((squares, block_sums(intended * change, block)))
    if not (on_host(sums) and sum_is_finite(sums)):
        missing = nonfinite(change).bitwise_or_(excluded)
        rows = torch.stack((intended, change))
        zero_excluded(rows, missing)
        sums = torch.stack((squared_block_sums(rows[:1], block)[0], block_sums(rows[0] * rows[1], block)))
    flags = torch.empty(1 + len(moved), len(intended), dtype=torch.bool, device=intended.device)
    torch.logical_not(missing, out=flags[0])
    for values, flag in zip(moved, flags[1:], strict=True):
        torch.logical_not(values, out=flag).logical_not_().logical_and_(flags[0])
    return sums, flag_counts(flags, block)


def is_wider(dtypes: Sequence[torch.dtype], route: CastRoute) -> bool:
    """Whether a weight that is a sum of numbers of these dtypes has more bits than a copy made by this route."""
    return len(dtypes) > 1 or _SIGNIFICANT_BITS.get(dtypes[0], 0) > route.bits


def _codes(weights: StoredWeights, route: CastRoute) -> CastCodes:
    largest, tile, values = weights.largest, route.last.tile, weights.values
    first = (*route.before, route.last)[0].dtype
    if first is not None and first == weights.rounds_once_to:
        values = values.to(first)
    if largest is None:
        return coded(values, route)
    return coded(values, route, tensor=largest.tensor, tile=largest.tiles[tile] if tile else None)
