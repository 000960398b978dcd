"""Which elements of a sparse gradient's tensor are looked at: blocks of the rows that the step touches."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from collage_agent.sample.sampling import block_elements

__all__ = ["TouchedRows", "blocks_within"]

_MIXING: Final = (-7046029254386353131, -4658895280553007687)
"""Odd multipliers whose products spread neighbouring rows over all of int64 (Steele, Lea and Flood, 2014)."""


class TouchedRows:
    """`count` blocks of the rows that a sparse gradient [rows, …] touches, chosen at random, alike at each step.

    One block of each of so many rows; several of each where fewer rows are touched, each row as many. `index` int64
    [count, block]: places in the flattened tensor; `held` bool [count, block]: which of them hold something, none
    where the gradient has no rows.
    `touched` and `population`, fp64 [()]: elements and blocks of all touched rows. Nothing here synchronises a
    device; on the host the gradient is coalesced as the optimizer does it.
    """

    def __init__(self, gradient: Tensor, count: int, block: int, seed: int) -> None:
        gradient = gradient.coalesce() if gradient.is_cpu else gradient
        rows, values = gradient._indices()[0], gradient._values()
        width = values[0].numel() if len(values) else gradient.shape[1:].numel()
        is_touched = len(rows) > 0
        if not is_touched:
            # A row of zeros stands for what is not there: `number`, of the touched rows, stays 0.
            rows, values = rows.new_zeros(1), values.new_zeros(1, width)
        values = values.reshape(len(rows), width)
        ordered = rows.sort().values
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]
        keys = torch.where(first, _mixed(ordered, seed) >> 1, torch.iinfo(torch.int64).max)
        chosen = keys.topk(min(count, len(rows)), largest=False).indices
        number = first.sum() * is_touched
        rank, turn, turns = self._places(number, len(chosen), count, width, block)
        row = ordered[chosen][rank]
        column = (_mixed(row, seed + 1) % -(-width // block) + turn) % -(-width // block)
        lanes = column.unsqueeze(1) * block + torch.arange(block, device=rows.device)
        self.held = (lanes < width) & (turn < turns).unsqueeze(1) & is_touched
        lanes = lanes.clamp(max=width - 1)
        self.index = row.unsqueeze(1) * width + lanes
        sums = values.new_zeros(len(chosen) + 1, width)
        sums.index_add_(0, _slot_of(rows, ordered[chosen], first[chosen]), values)
        self.gradient = torch.where(self.held, sums[rank.unsqueeze(1), lanes], 0.0).view(-1)
        self.touched = number.to(torch.float64) * width
        self.population = number.to(torch.float64) * -(-width // block)

    @staticmethod
    def _places(number: Tensor, chosen: int, count: int, width: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each of the blocks: its row's rank among the chosen ones, its turn in it, and each row's turns."""
        rows = number.clamp(1, chosen)
        slot = torch.arange(count, device=number.device)
        turns = (count // rows).clamp(max=-(-width // block))
        return slot % rows, slot // rows, turns

    def take(self, tensor: Tensor) -> Tensor:
        """The chosen elements, [count · block], 0 where nothing is held."""
        return torch.where(self.held, tensor.reshape(-1)[self.index], tensor.new_zeros(())).view(-1)


def blocks_within(cap: int, itemsize: int) -> int:
    """How many blocks a sample of `cap` elements is."""
    return max(cap // block_elements(itemsize), 1)


def _mixed(values: Tensor, seed: int) -> Tensor:
    """A number that looks random, int64 ≥ 0, for each value."""
    mixed = (values + (seed % 2**31 + 1) * 2**31) * _MIXING[0]
    mixed = (mixed ^ (mixed >> 29)) * _MIXING[1]
    return (mixed ^ (mixed >> 32)) & torch.iinfo(torch.int64).max


def _slot_of(rows: Tensor, chosen: Tensor, valid: Tensor) -> Tensor:
    """The place of each row among the chosen ones, len(chosen) where it is not among them."""
    key = torch.where(valid, chosen, torch.iinfo(torch.int64).max)
    ordered, places = key.sort()
    found = torch.searchsorted(ordered, rows).clamp(max=len(chosen) - 1)
    return torch.where(ordered[found] == rows, places[found], len(chosen))
