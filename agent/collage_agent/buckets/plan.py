"""A bucket with what stays fixed until the next plan: the sizes of its sample, its layers, its oracles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from collage_optim import CollageAdam, CollageAdamW, CollageLion
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.buckets.bucket import Bucket
from collage_agent.buckets.oracle_view import OracleView
from collage_agent.buckets.totals import SIZE_ROWS, BlockTotals, SampleSizes, estimated_totals
from collage_agent.stats import replicas
from collage_agent.stats.blocks import on_host
from collage_agent.stats.intervals import missed_share
from collage_monitor.table import Axis, Table

__all__ = ["BucketPlan", "decoupled_rate", "differing_counters", "out_of_lock_step"]

_ALWAYS_DECOUPLED: Final = (torch.optim.AdamW, CollageAdamW, CollageLion)
_CHECKSUMS: Final = Axis(replicas.KEYS)
_INTENDED: Final = "intended_squared_sum"
LOOK_EVERY: Final = 10
"""Measured steps from one look at whole gradients and momenta to the next."""


@dataclass
class BucketPlan:
    """A bucket of parameter group number `group`, whose tensors are the layers `layers`.

    `replicated` bool [tensors]: which of them other ranks hold too; None: none. `out_of_step` bool [tensors]: which
    have another step counter than the first at this step; None: none can have.
    """

    bucket: Bucket
    group: int
    layers: Axis
    oracles: Sequence[OracleView] = ()
    replicated: Tensor | None = None
    out_of_step: Tensor | None = None
    sizes: SampleSizes = field(init=False)
    _measured: int = field(default=0, init=False)
    _whole: list[tuple[Tensor, Tensor]] | None = field(default=None, init=False)
    _missed: Tensor = field(init=False)
    _unseen: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.sizes = SampleSizes(self.bucket.samples, self.bucket.layout)
        self._missed = torch.zeros_like(self.sizes.elements)

    def states(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """What the optimizer keeps for each tensor of the bucket."""
        # .get: the state is a defaultdict, and an entry that it makes would be the agent's doing.
        return [optimizer.state.get(parameter, {}) for parameter in self.bucket.parameters]

    def gather_before(self, optimizer: Optimizer, *, weights_gathered: bool = False) -> None:
        """Copy the sample before the step, and compare the tensors' step counters. Synchronises nothing.

        weights_gathered: see `Bucket.gather_before`.
        """
        self.bucket.intent.refresh(optimizer)
        states = self.states(optimizer)
        self.out_of_step = out_of_lock_step(states)
        group = optimizer.param_groups[self.group]
        rate = decoupled_rate(optimizer, group)
        self.bucket.gather_before(group, states, rate, weights_gathered=weights_gathered)

    def look_at_whole(self, optimizer: Optimizer) -> None:
        """After `gather_before` of a measured step, read whole tensors where the sample is not enough.

        The largest weight, if a copy's scale needs it; every LOOK_EVERY measured steps the gradients, to know what
        the sample misses. A pass over each. Synchronises nothing.
        """
        self.bucket.largest_before = self.bucket.largest_weights(self.states(optimizer))
        due = not self.bucket.whole and self._measured % LOOK_EVERY == 0
        self._whole = self.bucket.gradient_squares() if due else None
        self._measured += 1

    def measure(
        self, optimizer: Optimizer, scale: Tensor | None, *, counterfactuals: bool = False
    ) -> list[Table[Tensor]]:
        """Estimated totals of the step just taken: the bucket's, its replicas' checksums, its oracles'.

        See `Bucket.measure`. Runs inside `isolated`; synchronises nothing.
        """
        states = self.states(optimizer)
        blocks = self.bucket.measure(states, scale, self.oracles, counterfactuals=counterfactuals)
        if self._whole is not None:
            shares = self._missed_shares(blocks, [*self._whole, *self.bucket.momentum_squares(states)])
            # The first is the gradient's, a momentum's where none is known. Where the sample saw none of it, its
            # zeros say nothing of the tensor.
            self._missed, unseen = shares.amax(0), shares[0].isinf()
            self._unseen = None if on_host(unseen) and not unseen.any() else unseen
        table = estimated_totals(blocks, self.sizes, self.layers, self.bucket.missing, self._missed)
        if self.out_of_step is not None:
            table = Table(table.statistics, self.layers, torch.where(self.out_of_step, torch.nan, table.array))
        if self._unseen is not None:
            rest = torch.where(self._unseen, torch.nan, table.array[SIZE_ROWS:])
            table = Table(table.statistics, self.layers, torch.cat((table.array[:SIZE_ROWS], rest)))
        found = [table]
        if self.replicated is not None:
            values, sizes = self.bucket.parameter_after, self.sizes
            sums = replicas.replica_sums(
                values, self.bucket.layout.block, sizes.segments, sizes.sampled, self.replicated
            )
            found.append(Table(_CHECKSUMS, self.layers, sums))
        return found + [oracle.totals() for oracle in self.oracles]

    def _missed_shares(self, blocks: BlockTotals, looked_at: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """`missed_share` of each tensor by each that was looked at whole, 0 by nothing: fp64 [k, tensors]."""
        sizes, intended = self.sizes, next(part for part in blocks.by_block if _INTENDED in part)[_INTENDED]
        found = [
            missed_share(intended, sampled, whole, sizes.segments, sizes.scale, sizes.blocks, sizes.factor)
            for sampled, whole in looked_at
        ]
        return torch.stack(found or [torch.zeros_like(sizes.elements)])


def out_of_lock_step(states: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """bool [tensors]: which step counters differ from the first; None where counters are on the host.

    Counters on the host separate tensors into buckets. Reading counters on a device would synchronise it: there the
    shadow steps a tensor that missed a step with a wrong counter, so that tensor is not reported.
    """
    steps = [state.get("step") for state in states]
    if not all(isinstance(step, Tensor) and not step.is_cpu for step in steps):
        return None
    return differing_counters([step.reshape(()) for step in steps if isinstance(step, Tensor)])


def differing_counters(counters: Sequence[Tensor]) -> Tensor:
    """bool [n]: which of n counters [()] differ from the first. No synchronisation."""
    stacked = torch.stack(list(counters))
    return stacked.ne(stacked[0])


def decoupled_rate(optimizer: Optimizer, group: dict[str, Any]) -> float | Tensor | None:
    """lr·λ of a parameter group, a tensor where the learning rate is one on a device; None: coupled, or not known.

    Torch says so in the group (`decoupled_weight_decay`); of other classes only ours are known. Synchronises
    nothing: tensors on the host are read, others not.
    """
    always = isinstance(optimizer, _ALWAYS_DECOUPLED) and not isinstance(optimizer, CollageAdam)
    if not group.get("decoupled_weight_decay", always):
        return None
    rate, decay = _number(group.get("lr")), _number(group.get("weight_decay"))
    return None if rate is None or decay is None else rate * decay


def _number(value: Any) -> float | Tensor | None:
    if isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:
        return float(value)
    return value if isinstance(value, Tensor | float | int) else None
