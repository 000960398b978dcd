"""An oracle: the shadow, which keeps running since attach with its own fp64 weights and states on the same
gradients.

It follows its own, smaller sample and needs that sample's gradient at every step. Its view of a bucket has the
values of a measured step to compare with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from collage_optim.from_host import from_host
from torch import Tensor

from collage_agent.intent.betas import ShadowByBetas
from collage_agent.intent.intent_choice import Intent
from collage_agent.sample.sampling import TensorSample
from collage_agent.stats.intervals import fourth_moments, interval_keys, product_rows, ratio_variances
from collage_agent.stats.several_steps import ORACLE_SUMS, oracle_block_sums
from collage_agent.stats.step_view import StepView
from collage_agent.step.gather import BlockLayout, Staging
from collage_agent.step.observed_step import tile_slots
from collage_agent.step.totals import SampleSizes
from collage_monitor.metrics import METRICS
from collage_monitor.totals_table import Axis, Table

__all__ = ["Oracle", "OracleView"]

_METRIC: Final = METRICS["edq_oracle_ratio"]
assert _METRIC.interval is not None
_INTERVAL: Final = interval_keys({_METRIC.name: _METRIC.interval})
_FIXED: Final = ("oracle_steps", "oracle_sampled", "oracle_elements")
_STATISTICS: Final = Axis((*_FIXED, "oracle_active_blocks", *ORACLE_SUMS, *_INTERVAL))


class Oracle:
    """fp64 weights and states of sampled elements of tensors that are stepped in lock-step.

    `members` are indices of watched parameters, one sample each. `parameter`, `displacement` (of the last step)
    and `attached` (the weights at attach) are fp64 [slots] in the order of `layout`. Synchronises nothing.
    """

    def __init__(
        self,
        members: Sequence[int],
        samples: Sequence[TensorSample],
        layout: BlockLayout,
        parameter: Tensor,
        state: dict[str, Any],
    ) -> None:
        self.members = tuple(members)
        self.samples = tuple(samples)
        self.layout = layout
        self.parameter = parameter
        self.attached = parameter.clone()
        self.displacement = torch.zeros_like(parameter)
        self.steps = 0
        self._state = state
        self._gradient: Staging | None = None

    def gather(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sample of whole gradients, one a member: [slots], valid until the next call."""
        if self._gradient is None or self._gradient.values.dtype != gradients[0].dtype:
            self._gradient = Staging(self.layout, gradients[0].dtype)
        self.layout.gather(gradients, self._gradient, lasting=False)
        return self._gradient.values

    def step(
        self,
        intent: Intent,
        group: dict[str, Any],
        gradient: Tensor,
        scale: Tensor | None,
        skipped: Tensor | None,
    ) -> None:
        """Take the step that the live optimizer is about to take. Runs inside `isolated`.

        gradient: [slots], in its own dtype; `scale`: its divisor; `skipped`: one element, 1 if the loss scaler
        skips this step, in which case nothing moves.
        """
        gradient = gradient.to(torch.float64)
        if scale is not None:
            gradient.div_(scale)
        before = None if skipped is None else _copied(self._state)
        # An oracle says what fp64 makes of the steps as they are taken, by whatever β.
        step = intent.as_taken if isinstance(intent, ShadowByBetas) else intent.displacement
        step(group, self._state, self.parameter, gradient, self.displacement)
        if skipped is not None and before is not None:
            self._take_back(before, skipped)
        self.parameter.add_(self.displacement)
        self.steps += 1

    def split(self, members: Sequence[int], parameters: Mapping[int, Tensor]) -> Oracle:
        """A separate oracle that follows only `members` from now on."""
        chosen = [self.members.index(member) for member in members]
        samples = [self.samples[index] for index in chosen]
        layout = BlockLayout(samples, [parameters[member] for member in members])
        blocks = from_host(self.layout.positions_of(layout, chosen), self.layout.device)

        def part(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape == self.parameter.shape:
                return value.view(-1, self.layout.block).index_select(0, blocks).view(-1)
            return value.clone() if isinstance(value, Tensor) else value

        other = Oracle(members, samples, layout, part(self.parameter), {k: part(v) for k, v in self._state.items()})
        other.attached = part(self.attached)
        other.displacement = part(self.displacement)
        other.steps = self.steps
        return other

    def _take_back(self, before: dict[str, Any], skipped: Tensor) -> None:
        skip = skipped.reshape(()).ne(0)
        self.displacement = torch.where(skip, torch.zeros_like(self.displacement), self.displacement)
        for key, new in self._state.items():
            if isinstance(new, Tensor):
                old = before.get(key, torch.zeros_like(new))
                self._state[key] = torch.where(skip.to(new.device), old, new)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


class OracleView:
    """A bucket's u, e and θ before the step, at the elements of one oracle's sample."""

    def __init__(self, oracle: Oracle, layers: Axis, members: Sequence[int], layout: BlockLayout) -> None:
        """members: those of the bucket, as watched parameters; layout: of its sample."""
        self.oracle = oracle
        self.layers = layers
        self.sizes = SampleSizes(oracle.samples, oracle.layout)
        self.factors = self.sizes.factors(ORACLE_SUMS)
        tensors = [members.index(member) for member in oracle.members]
        positions = torch.from_numpy(layout.positions_of(oracle.layout, tensors))
        self.positions = from_host(positions, oracle.layout.device)
        blocks = tile_slots(layout.device) // layout.block
        self._where = []
        for start in range(0, layout.blocks, blocks):
            target = torch.nonzero((positions >= start) & (positions < start + blocks)).view(-1)
            source = positions[target] - start
            self._where.append((from_host(source, oracle.layout.device), from_host(target, oracle.layout.device)))
        self.padding = from_host(torch.tensor(oracle.layout.padding, dtype=torch.int64), oracle.layout.device)
        self.rows = torch.zeros(3, oracle.layout.slots, dtype=torch.float64, device=oracle.layout.device)
        self.excluded = torch.zeros(oracle.layout.slots, dtype=torch.uint8, device=oracle.layout.device)
        self._finite = True

    def copy_tile(self, tile: int, view: StepView) -> None:
        """Copy the oracle's elements in tile number `tile` of the bucket: u, e and θ before the step."""
        source, target = self._where[tile]
        block = self.oracle.layout.block
        self._finite = view.finite and (self._finite or not tile)

        def copy_blocks(values: Tensor, to: Tensor) -> None:
            blocks, copies = values.view(-1, block), to.view(-1, block)
            if len(self._where) == 1:
                torch.index_select(blocks, 0, source, out=copies)
            else:
                copies.index_copy_(0, target, blocks.index_select(0, source))

        for row, values in zip(self.rows, (view.intended, view.effective, view.parameter), strict=True):
            copy_blocks(values, row)
        if not view.finite or len(self._where) > 1:
            copy_blocks(view.excluded, self.excluded)

    def totals(self) -> Table[Tensor]:
        """Estimated totals of the oracle's step and ours, [statistic][layer]. No synchronisation."""
        intended, effective, before = self.rows
        rows = torch.empty(6, len(before), dtype=torch.float64, device=before.device)
        rows[0], rows[1], rows[4] = self.oracle.displacement, intended, effective
        ours = torch.sub(self.oracle.parameter, self.oracle.attached, out=rows[2])
        theirs = torch.add(before, effective, out=rows[5]).sub_(self.oracle.attached)
        torch.sub(theirs, ours, out=rows[3])
        excluded = None if self._finite else self.excluded
        by_block = oracle_block_sums(rows, excluded, self.padding, self.oracle.layout.block)
        a, b = by_block["oracle_effective_sum"].unsqueeze(0), by_block["oracle_squared_sum"].unsqueeze(0)
        sizes, pairs = self.sizes, product_rows(a, b)
        parts = (pairs, (b > 0).double(), by_block.array)
        products, active, sums = torch.split(sizes.segments.sums(torch.cat(parts)), [len(part) for part in parts])
        by_layer = Table(by_block.statistics, self.layers, sums)
        total_a, total_b = (
            by_layer["oracle_effective_sum"].unsqueeze(0),
            by_layer["oracle_squared_sum"].unsqueeze(0),
        )
        variances = ratio_variances(products, total_a, total_b, sizes.blocks, sizes.factor)
        values = torch.nan_to_num(total_a / total_b, 0.0, 0.0, 0.0)
        fourth = fourth_moments(a, b, values, sizes.segments, sizes.factor)
        steps = torch.full_like(sizes.elements, float(self.oracle.steps))
        fixed = torch.stack((steps, sizes.sampled, sizes.elements))
        return Table(_STATISTICS, self.layers, torch.cat((fixed, active, sums * self.factors, variances, fourth)))
