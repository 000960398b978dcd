"""A tensor with a sparse gradient, measured where the step touches it: nothing moves elsewhere.

`bucket_planner.py` makes a `TouchedBucket` of such a tensor. It overrides what depends on the rows in `Bucket`:
`gather_before`, `measure`, `look_at_whole` and the memory of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.intent_choice import Intent
from collage_agent.sample.sampling import TensorSample, block_elements
from collage_agent.stats.intervals import population_factor
from collage_agent.stats.step_view import StepView
from collage_agent.step.bucket import Bucket
from collage_agent.step.gather import BlockLayout, Source
from collage_agent.step.observed_step import Scratch, Tile
from collage_agent.step.totals import SampleSizes
from collage_monitor.totals_table import Axis, Table

__all__ = ["TouchedBucket", "TouchedRows"]

_WHOLE: Final = ("parameter_squared_sum", "nonfinite_parameters")
"""What is said of all weights, which touched rows do not speak for."""
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
            # Nothing was touched: use one row of zeros; `number`, the count of touched rows, stays 0.
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
        """For each block: its row's rank among the chosen ones, its turn in that row, and each row's turns."""
        rows = number.clamp(1, chosen)
        slot = torch.arange(count, device=number.device)
        turns = (count // rows).clamp(max=-(-width // block))
        return slot % rows, slot // rows, turns

    def take(self, tensor: Tensor) -> Tensor:
        """The chosen elements, [count · block], 0 where nothing is held."""
        return torch.where(self.held, tensor.reshape(-1)[self.index], tensor.new_zeros(())).view(-1)


class _TouchedLayout(BlockLayout):
    """A layout whose sample is drawn again before each step. Slots without an element hold zeros."""

    def __init__(self, samples: Sequence[TensorSample], parameters: Sequence[Tensor]) -> None:
        super().__init__(samples, parameters)
        self.touched: TouchedRows | None = None

    def gather_all(self, sources: Sequence[Source]) -> None:
        """Copy the touched rows' blocks of one tensor, or its sparse gradient's, into each staging."""
        rows, found = self.touched, []
        assert rows is not None
        for (tensor,), staging, _ in sources:
            found.append(Source([rows.gradient if tensor.is_sparse else rows.take(tensor)], staging, False))
        super().gather_all(found)


class _TouchedSizes(SampleSizes):
    """Sizes that the step decides: those of the touched rows."""

    def __init__(self, layout: BlockLayout, elements: int, sample: TensorSample) -> None:
        super().__init__([sample], layout)
        self.elements.fill_(elements)

    def follow(self, rows: TouchedRows) -> None:
        """Take over how many elements were touched, and how many of them are measured."""
        self.sampled = rows.held.sum().to(torch.float64).view(1)
        self.blocks = rows.held.any(1).sum().to(torch.float64).view(1)
        self.factor = population_factor(self.blocks, rows.population.view(1))
        self.scale = torch.nan_to_num(rows.touched / self.sampled, 0.0, 0.0, 0.0)
        self.fixed = torch.stack((torch.ones_like(self.elements), self.elements, self.sampled))
        self._rows = {}


class TouchedBucket(Bucket):
    """A tensor whose gradient is sparse: totals of the rows that the step touches; all other elements are idle."""

    layout: _TouchedLayout
    sizes: _TouchedSizes

    def __init__(
        self,
        member: int,
        parameter: Tensor,
        intent: Intent,
        group: int,
        layers: Axis,
        *,
        cap: int,
        seed: int,
        scratch: Scratch,
    ) -> None:
        """cap: the most elements that are looked at."""
        self._count, self._seed = _blocks_within(cap, parameter.element_size()), seed
        block = block_elements(parameter.element_size())
        samples = [TensorSample(self._count * block, block, np.arange(self._count), False)]
        layout = _TouchedLayout(samples, [parameter])
        super().__init__([member], [parameter], samples, intent, group, layers, scratch=scratch, layout=layout)
        self.sizes = _TouchedSizes(layout, parameter.numel(), samples[0])

    @property
    def rows(self) -> TouchedRows:
        """The rows that the last gathered step touches."""
        assert self.layout.touched is not None
        return self.layout.touched

    def gather_before(self, optimizer: Optimizer, *, weights_gathered: bool = False) -> None:
        (gradient,) = self._gradients()
        self.layout.touched = TouchedRows(gradient, self._count, self.layout.block, self._seed)
        super().gather_before(optimizer)

    def _remember(self, view: StepView, tile: Tile) -> None:
        """Nothing: the next step looks at other elements."""

    def look_at_whole(self, optimizer: Optimizer) -> None:
        """Does nothing: a sparse gradient is known completely, and so are the touched rows."""

    def measure(
        self, optimizer: Optimizer, scale: Tensor | None, *, counterfactuals: bool = False
    ) -> list[Table[Tensor]]:
        """Estimated totals of the step just taken. Runs inside `isolated`; synchronises nothing."""
        self.sizes.follow(self.rows)
        (table,) = super().measure(optimizer, scale, counterfactuals=counterfactuals)
        rows = dict(table)
        still = rows["elements"] - rows["nonfinite"]
        # Empty slots did not move either; only the sample tells how many elements moved.
        slots = self.sizes.scale * self.layout.slots
        moved = slots - rows["nonfinite"] - rows["unchanged"]
        rows["unchanged"] = still - moved
        rows["idle"] = still - (rows["lost"] + rows["distorted"] + rows["faithful"])
        nothing = torch.full_like(self.sizes.elements, torch.nan)
        rows |= {key: nothing for key in _WHOLE if key in rows}
        return [Table(table.statistics, self.layers, torch.stack(list(rows.values())))]


def _blocks_within(cap: int, itemsize: int) -> int:
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
