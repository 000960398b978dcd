"""A tensor with a sparse gradient, measured where the step touches it: nothing moves elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.choose import Intent
from collage_agent.sample.sampling import TensorSample, block_elements
from collage_agent.sample.touched import TouchedRows, blocks_within
from collage_agent.stats.intervals import population_factor
from collage_agent.stats.view import StepView
from collage_agent.step.bucket import Bucket
from collage_agent.step.gather import BlockLayout, Staging
from collage_agent.step.observe import Scratch, Tile
from collage_agent.step.totals import SampleSizes
from collage_monitor.table import Axis, Table

__all__ = ["TouchedBucket"]

_WHOLE: Final = ("parameter_squared_sum", "nonfinite_parameters")
"""What is said of all weights, which touched rows do not speak for."""


class _TouchedLayout(BlockLayout):
    """A layout whose sample is drawn anew before each step. Slots without an element hold zeros."""

    def __init__(self, samples: Sequence[TensorSample], parameters: Sequence[Tensor]) -> None:
        super().__init__(samples, parameters)
        self.touched: TouchedRows | None = None

    def gather(self, tensors: Sequence[Tensor], staging: Staging, *, lasting: bool = True) -> None:
        """Copy the touched rows' blocks of one tensor, or its sparse gradient's, into `staging`."""
        (tensor,), rows = tensors, self.touched
        assert rows is not None
        super().gather([rows.gradient if tensor.is_sparse else rows.take(tensor)], staging, lasting=False)


class _TouchedSizes(SampleSizes):
    """Sizes that the step decides: those of the touched rows."""

    def __init__(self, layout: BlockLayout, elements: int, sample: TensorSample) -> None:
        super().__init__([sample], layout)
        self.elements.fill_(elements)

    def follow(self, rows: TouchedRows) -> None:
        """Take over how much was touched, and how much of that is looked at."""
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
        self._count, self._seed = blocks_within(cap, parameter.element_size()), seed
        block = block_elements(parameter.element_size())
        samples = [TensorSample(self._count * block, block, np.arange(self._count), False)]
        layout = _TouchedLayout(samples, [parameter])
        super().__init__([member], [parameter], samples, intent, group, layers, scratch=scratch, layout=layout)
        self.sizes = _TouchedSizes(layout, parameter.numel(), samples[0])

    @property
    def rows(self) -> TouchedRows:
        """The rows that the step touches which was gathered last."""
        assert self.layout.touched is not None
        return self.layout.touched

    def gather_before(self, optimizer: Optimizer, *, weights_gathered: bool = False) -> None:
        (gradient,) = self._gradients()
        self.layout.touched = TouchedRows(gradient, self._count, self.layout.block, self._seed)
        super().gather_before(optimizer)

    def _remember(self, view: StepView, tile: Tile) -> None:
        """Nothing: the next step looks at other elements."""

    def look_at_whole(self, optimizer: Optimizer) -> None:
        """Nothing: a sparse gradient is known whole, and so is what is touched."""

    def measure(
        self, optimizer: Optimizer, scale: Tensor | None, *, counterfactuals: bool = False
    ) -> list[Table[Tensor]]:
        """Estimated totals of the step just taken. Runs inside `isolated`; synchronises nothing."""
        self.sizes.follow(self.rows)
        (table,) = super().measure(optimizer, scale, counterfactuals=counterfactuals)
        rows = dict(table)
        still = rows["elements"] - rows["nonfinite"]
        # Slots that hold nothing did not move either; how many moved is what the sample tells.
        slots = self.sizes.scale * self.layout.slots
        moved = slots - rows["nonfinite"] - rows["unchanged"]
        rows["unchanged"] = still - moved
        rows["idle"] = still - (rows["lost"] + rows["distorted"] + rows["faithful"])
        nothing = torch.full_like(self.sizes.elements, torch.nan)
        rows |= {key: nothing for key in _WHOLE if key in rows}
        return [Table(table.statistics, self.layers, torch.stack(list(rows.values())))]
