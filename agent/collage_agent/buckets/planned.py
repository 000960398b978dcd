"""A bucket with what is fixed until the next plan: its sample's sizes, its tensors' columns, who follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.buckets.bucket import Bucket, Followed
from collage_agent.buckets.checksum import Checksums
from collage_agent.buckets.decay import decoupled_rate
from collage_agent.buckets.totals import SampleSizes

__all__ = ["Planned", "differing", "out_of_lock_step"]


@dataclass
class Planned:
    """A bucket of parameter group number `group`; `apart` says which tensors of it are out of step this time."""

    bucket: Bucket
    group: int
    sizes: SampleSizes
    columns: Tensor
    followed: list[tuple[Followed, SampleSizes, Tensor]]
    checksums: Checksums | None = None
    apart: Tensor | None = None

    def states(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """What the optimizer keeps for each tensor of the bucket."""
        # .get: the state is a defaultdict, and an entry that it makes would be the agent's doing.
        return [optimizer.state.get(parameter, {}) for parameter in self.bucket.parameters]

    def gather_before(self, optimizer: Optimizer) -> None:
        """Copy the sample before the optimizer's step, and find out who is out of step. Synchronises nothing."""
        self.bucket.intent.refresh(optimizer)
        states = self.states(optimizer)
        self.apart = out_of_lock_step(states)
        group = optimizer.param_groups[self.group]
        self.bucket.gather_before(group, states, decoupled_rate(optimizer, group))


def out_of_lock_step(states: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """bool [tensors]: whose step counter differs from the first one's; None where counters live on the host.

    On the host counters decide about the buckets. On a device reading them would synchronise it: tensors that
    missed a step there are stepped with a wrong counter by the shadow, and so not reported.
    """
    steps = [state.get("step") for state in states]
    if not all(isinstance(step, Tensor) and not step.is_cpu for step in steps):
        return None
    return differing([step.reshape(()) for step in steps if isinstance(step, Tensor)])


def differing(counters: Sequence[Tensor]) -> Tensor:
    """bool [n]: which of n counters [()] differ from the first. No synchronisation."""
    stacked = torch.stack(list(counters))
    return stacked.ne(stacked[0])
