"""What an oracle needs of a bucket at each measured step, and the oracle's estimated totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from collage_agent.buckets.observation import TILE_SLOTS
from collage_agent.buckets.totals import SampleSizes
from collage_agent.intent.oracle import Oracle
from collage_agent.sample.gather import BlockLayout
from collage_agent.stats.intervals import fourth_moments, interval_keys, product_rows, ratio_variances
from collage_agent.stats.several_steps import ORACLE_SUMS, oracle_block_sums
from collage_agent.stats.view import StepView
from collage_monitor.metrics import METRICS
from collage_monitor.table import Axis, Table

__all__ = ["OracleView"]

_METRIC: Final = METRICS["edq_oracle_ratio"]
assert _METRIC.interval is not None
_INTERVAL: Final = interval_keys({_METRIC.name: _METRIC.interval})
_FIXED: Final = ("oracle_steps", "oracle_sampled", "oracle_elements")
_STATISTICS: Final = Axis((*_FIXED, "oracle_active_blocks", *ORACLE_SUMS, *_INTERVAL))


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
        self.positions = positions.to(oracle.layout.device)
        blocks = TILE_SLOTS // layout.block
        self._where = []
        for start in range(0, layout.blocks, blocks):
            target = torch.nonzero((positions >= start) & (positions < start + blocks)).view(-1)
            source = positions[target] - start
            self._where.append((source.to(oracle.layout.device), target.to(oracle.layout.device)))
        self.padding = torch.tensor(oracle.layout.padding, dtype=torch.int64).to(oracle.layout.device)
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
