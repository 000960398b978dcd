"""Whole tensors in rotation: as many at each measured step as a bound on elements allows, all of them in the end.

Totals are held until every tensor has had its turn and are handed over together, at the step that ends the round:
the model's numbers are never those of a part of its tensors. Each tensor's own are of one step within the round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.buckets.bucket import Bucket, Followed
from collage_agent.buckets.chunk import BlockTotals
from collage_agent.buckets.planned import Planned
from collage_agent.buckets.totals import SampleSizes, bucket_totals
from collage_agent.intent.choose import Intent
from collage_agent.intent.whole_tensor import Turn, WholeTensor
from collage_agent.sample.gather import local
from collage_agent.sample.sampling import TensorSample
from collage_agent.training.parameters import WatchedParameter

__all__ = ["ELEMENTS_A_STEP", "Rotation", "too_large"]

ELEMENTS_A_STEP: Final = 2**20
"""Elements stepped whole at one measured step, at most: 8 bytes each for θ, g, u and every state."""

_Columns = tuple[tuple[str, ...], Tensor, Tensor]


class Rotation:
    """Whose turn it is at a measured step, and the totals held until the round is complete."""

    def __init__(self, bound: int | None = ELEMENTS_A_STEP) -> None:
        """bound: elements a step; None: no bound, every tensor at every measured step."""
        self._bound = bound
        self._planned: list[Planned] = []
        self._held: dict[int, _Columns] = {}
        self._waiting: set[int] = set()

    def before(
        self,
        optimizer: Optimizer,
        watched: Sequence[WatchedParameter],
        intents: Sequence[Intent],
        draw: Callable[[int], TensorSample],
    ) -> None:
        """Copy the tensors whose turn it is, before the live step. Runs inside `isolated`; synchronises nothing."""
        self._planned = []
        eligible = [
            index
            for index, entry in enumerate(watched)
            if isinstance(intents[entry.group], WholeTensor)
            and _is_whole(entry)
            and not too_large(entry, self._bound)
        ]
        self._waiting = {index for index in eligible if index not in self._held}
        room = self._bound
        for index in sorted(self._waiting):
            elements = watched[index].shard.elements
            if room is not None and elements > room:
                continue
            room = None if room is None else room - elements
            self._planned.append(_planned(index, watched[index], intents, draw(index)))
        for planned in self._planned:
            planned.gather_before(optimizer)

    def after(self, optimizer: Optimizer, scale: Tensor | None, skipped: Tensor | None) -> list[_Columns]:
        """Totals of all tensors if this step ends the round, else none yet. Runs inside `isolated`.

        scale: what gradients are to be divided by; skipped: not 0 where the loss scaler skipped the step,
        in which case these tensors are not reported in this round.
        """
        for planned in self._planned:
            blocks = planned.bucket.measure(planned.states(optimizer), scale, [])
            keys, totals = bucket_totals(planned.bucket, planned.sizes, blocks)
            if skipped is not None:
                totals = torch.where(skipped.to(totals.device).reshape(()).ne(0), torch.nan, totals)
            index = planned.bucket.members[0]
            self._held[index] = keys, totals, planned.columns
            self._waiting.discard(index)
        self._planned = []
        if self._waiting or not self._held:
            return []
        round_of_all, self._held = list(self._held.values()), {}
        return round_of_all


class _WholeBucket(Bucket):
    """A bucket of one tensor, measured whole: what is known of u comes from its turn."""

    def __init__(self, index: int, parameter: Tensor, sample: TensorSample, turn: Turn) -> None:
        super().__init__([index], [parameter], [sample], turn)
        self._turn = turn

    def gather_before(
        self, group: Mapping[str, Any], states: Sequence[Mapping[str, Any]], decay: float | Tensor | None = None
    ) -> None:
        super().gather_before(group, states, decay)
        self._turn.look(group, states[0])

    def measure(
        self,
        states: Sequence[Mapping[str, Any]],
        scale: Tensor | None,
        followed: Sequence[Followed],
        *,
        counterfactuals: bool = False,
    ) -> BlockTotals:
        self._turn.resolve(self.layout, scale)
        return super().measure(states, scale, followed, counterfactuals=counterfactuals)


def too_large(entry: WatchedParameter, bound: int | None = ELEMENTS_A_STEP) -> bool:
    """Whether a tensor alone exceeds what may be stepped whole at a measured step: it never has a turn."""
    return bound is not None and entry.shard.elements > bound


def _is_whole(entry: WatchedParameter) -> bool:
    """Whether all of the tensor is here, and has a gradient that is no sparse one."""
    parameter, shard = entry.parameter, entry.shard
    gradient = parameter.grad
    whole = local(parameter) is parameter and shard.start is None and parameter.numel() == shard.elements > 0
    return whole and gradient is not None and not gradient.is_sparse and tuple(parameter.shape) == shard.shape


def _planned(index: int, entry: WatchedParameter, intents: Sequence[Intent], sample: TensorSample) -> Planned:
    intent = intents[entry.group]
    assert isinstance(intent, WholeTensor)
    bucket = _WholeBucket(index, entry.parameter, sample, Turn(intent, entry.parameter))
    columns = torch.tensor([index]).to(bucket.layout.device)
    return Planned(bucket, entry.group, SampleSizes([sample], bucket.layout), columns, [])
