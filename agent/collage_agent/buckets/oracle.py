"""What an oracle needs of a bucket at each measured step, and the oracle's estimated totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from collage_agent.buckets.totals import SampleSizes
from collage_agent.intent.oracle import Oracle
from collage_agent.sample.gather import BlockLayout
from collage_agent.stats.intervals import product_rows, ratio_variances, variance_keys
from collage_agent.stats.several_steps import ORACLE_SUMS, oracle_block_sums
from collage_monitor.metrics import METRICS
from collage_monitor.table import Axis, Table

__all__ = ["SLOTS_AT_ONCE", "OracleView"]

SLOTS_AT_ONCE: Final = 196_608
"""Slots of a bucket worked on together: the fp64 rows then stay in the cache."""
_SAME: Final = 1e-6
_METRIC: Final = METRICS["edq_oracle_ratio"]
_FIXED: Final = ("oracle_steps", "oracle_sampled", "oracle_elements")
_STATISTICS: Final = Axis((*_FIXED, "oracle_active_blocks", *ORACLE_SUMS, *variance_keys((_METRIC.name,))))


class OracleView:
    """A bucket's u, e and θ after the step, at the elements of one oracle's sample."""

    def __init__(self, oracle: Oracle, layers: Axis, members: Sequence[int], layout: BlockLayout) -> None:
        """members: those of the bucket, as watched parameters; layout: of its sample."""
        self.oracle = oracle
        self.layers = layers
        self.sizes = SampleSizes(oracle.samples, oracle.layout)
        tensors = [members.index(member) for member in oracle.members]
        positions = torch.from_numpy(layout.positions_of(oracle.layout, tensors))
        blocks = SLOTS_AT_ONCE // layout.block
        self._where = []
        for start in range(0, layout.blocks, blocks):
            target = torch.nonzero((positions >= start) & (positions < start + blocks)).view(-1)
            source = positions[target] - start
            self._where.append((source.to(oracle.layout.device), target.to(oracle.layout.device)))
        self.padding = torch.tensor(oracle.layout.padding, dtype=torch.int64).to(oracle.layout.device)
        self.rows = torch.zeros(3, oracle.layout.slots, dtype=torch.float64, device=oracle.layout.device)
        self.left_out = torch.zeros(oracle.layout.slots, dtype=torch.uint8, device=oracle.layout.device)

    def copy_run(self, run: int, rows: Sequence[Tensor], left_out: Tensor) -> None:
        """Copy the oracle's elements of run number `run` of the bucket's slots: u, e and θ after the step."""
        source, target = self._where[run]
        block = self.oracle.layout.block
        complete = len(target) == self.oracle.layout.blocks
        for row, values in zip((*self.rows, self.left_out), (*rows, left_out), strict=True):
            chosen, into = values.view(-1, block), row.view(-1, block)
            if complete:
                torch.index_select(chosen, 0, source, out=into)
            else:
                into.index_copy_(0, target, chosen.index_select(0, source))

    def weights_differ(self, weights: Tensor) -> bool:
        """Whether these stored weights, fp64 [slots] on the host, differ from those after the last measured step.

        Rounding errors of fp64 are allowed for; values that were not finite are not compared.
        """
        expected, now = self.rows[2].numpy(), weights.numpy()
        compared = self.left_out.numpy() == 0
        if len(self.padding):
            compared[self.padding.numpy()] = False
        error = np.abs(now - expected)[compared]
        size = np.abs(expected)[compared]
        return bool((error > _SAME * (size + size.max(initial=0.0) * _SAME)).any())

    def totals(self) -> Table[Tensor]:
        """Estimated totals of the oracle's step and ours, [statistic][layer]. No synchronisation."""
        intended, effective, after = self.rows
        ours = self.oracle.parameter - self.oracle.attached
        theirs = after - self.oracle.attached
        rows = torch.stack((self.oracle.displacement, intended, ours, theirs - ours, effective, theirs))
        by_block = oracle_block_sums(rows, self.left_out, self.padding, self.oracle.layout.block)
        a, b = by_block["oracle_effective_sum"].unsqueeze(0), by_block["oracle_squared_sum"].unsqueeze(0)
        sizes, pairs = self.sizes, product_rows(a, b)
        parts = (pairs, (b > 0).double(), by_block.array)
        products, active, sums = torch.split(sizes.columns.sums(torch.cat(parts)), [len(part) for part in parts])
        by_layer = Table(by_block.statistics, self.layers, sums)
        a, b = by_layer["oracle_effective_sum"].unsqueeze(0), by_layer["oracle_squared_sum"].unsqueeze(0)
        variances = ratio_variances(products, a, b, sizes.blocks, sizes.factor)
        steps = torch.full_like(sizes.elements, float(self.oracle.steps))
        fixed = torch.stack((steps, sizes.sampled, sizes.elements))
        return Table(_STATISTICS, self.layers, torch.cat((fixed, active, sums * sizes.scale, variances)))
