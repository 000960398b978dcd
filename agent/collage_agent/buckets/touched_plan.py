"""A tensor with a sparse gradient, measured where the step touches it: nothing moves elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.buckets.bucket import Bucket
from collage_agent.buckets.plan import BucketPlan
from collage_agent.buckets.totals import SampleSizes, estimated_totals
from collage_agent.intent.choose import Intent
from collage_agent.sample import stored
from collage_agent.sample.gather import BlockLayout, Staging
from collage_agent.sample.sampling import TensorSample, block_elements
from collage_agent.sample.touched import TouchedRows, blocks_within
from collage_agent.stats.intervals import population_factor
from collage_agent.stats.view import StepView
from collage_monitor.table import Axis, Table

__all__ = ["TouchedPlan"]

_WHOLE: Final = ("parameter_squared_sum", "nonfinite_parameters")
"""What is said of all weights, which touched rows do not speak for."""


class _TouchedBucket(Bucket):
    """A bucket of one tensor whose sample is drawn anew before each step. Slots without an element hold zeros."""

    def __init__(self, member: int, parameter: Tensor, intent: Intent, cap: int, seed: int) -> None:
        self._count, self._seed = blocks_within(cap, parameter.element_size()), seed
        block = block_elements(parameter.element_size())
        sample = TensorSample(self._count * block, block, np.arange(self._count), False)
        super().__init__([member], [parameter], [sample], intent)
        self.rows: TouchedRows | None = None

    def gather_before(
        self,
        group: Mapping[str, Any],
        states: Sequence[Mapping[str, Any]],
        decay: float | Tensor | None = None,
        *,
        weights_gathered: bool = False,
    ) -> None:
        gradient = self.intent.composition.gradient_of(self.parameters[0])
        assert gradient is not None
        self.rows = TouchedRows(gradient, self._count, self.layout.block, self._seed)
        super().gather_before(group, states, decay)

    def _remember(self, view: StepView, slots: slice) -> None:
        """Nothing: the next step looks at other elements."""

    def _gather(
        self, into: dict[str, Staging], key: str, tensors: Sequence[Any], *, lasting: bool = True
    ) -> Staging:
        assert self.rows is not None
        chosen = self.rows.gradient if key == stored.GRADIENT else self.rows.take(tensors[0])
        return super()._gather(into, key, [chosen], lasting=False)


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


class TouchedPlan(BucketPlan):
    """A tensor whose gradient is sparse: totals of the rows that the step touches; all other elements are idle."""

    bucket: _TouchedBucket

    def __init__(
        self, member: int, parameter: Tensor, intent: Intent, cap: int, seed: int, group: int, layers: Axis
    ) -> None:
        super().__init__(_TouchedBucket(member, parameter, intent, cap, seed), group, layers)
        self.sizes: _TouchedSizes = _TouchedSizes(self.bucket.layout, parameter.numel(), self.bucket.samples[0])

    def look_at_whole(self, optimizer: Optimizer) -> None:
        """Nothing: a sparse gradient is known whole, and so is what is touched."""

    def measure(
        self, optimizer: Optimizer, scale: Tensor | None, *, counterfactuals: bool = False
    ) -> list[Table[Tensor]]:
        """Estimated totals of the step just taken. Runs inside `isolated`; synchronises nothing."""
        assert self.bucket.rows is not None
        self.sizes.follow(self.bucket.rows)
        blocks = self.bucket.measure(self.states(optimizer), scale, (), counterfactuals=counterfactuals)
        none = torch.zeros_like(self.sizes.elements)
        table = estimated_totals(blocks, self.sizes, self.layers, self.bucket.missing, none)
        rows = dict(table)
        still = rows["elements"] - rows["nonfinite"]
        # Slots that hold nothing did not move either; how many moved is what the sample tells.
        slots = self.sizes.scale * self.bucket.layout.slots
        moved = slots - rows["nonfinite"] - rows["unchanged"]
        rows["unchanged"] = still - moved
        rows["idle"] = still - (rows["lost"] + rows["distorted"] + rows["faithful"])
        rows |= {key: torch.full_like(none, torch.nan) for key in _WHOLE if key in rows}
        return [Table(table.statistics, self.layers, torch.stack(list(rows.values())))]
