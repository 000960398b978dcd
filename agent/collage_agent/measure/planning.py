"""Which watched tensors are stepped alike, and the buckets that they are measured in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.buckets.bucket import Bucket
from collage_agent.buckets.oracle import OracleView
from collage_agent.buckets.plan import BucketPlan
from collage_agent.intent.before_after import BeforeAfter
from collage_agent.intent.choose import Intent
from collage_agent.intent.oracle import Oracle
from collage_agent.sample import stored
from collage_agent.sample.gather import local
from collage_agent.sample.sampling import TensorSample, draw
from collage_agent.training.parameters import WatchedParameter
from collage_agent.training.shards import placed_alike
from collage_monitor.table import Axis

__all__ = ["Planner", "Signature", "steps_taken"]

_Entry = tuple[int, int, int, float, torch.dtype | None]
Signature = tuple[bool, tuple[Oracle, ...], tuple[_Entry, ...]]
_NO_STATE: Final[dict[str, Any]] = {}
_CLOSURE: Final = BeforeAfter("the step evaluates a closure repeatedly, so no one gradient leads to it")


class Planner:
    """Gathers watched tensors that are stepped alike into buckets, and draws their samples.

    `watched` and `intents`, one for each parameter group, are appended to as parameters come.
    """

    def __init__(
        self, watched: Sequence[WatchedParameter], intents: Sequence[Intent], *, seed: int, shard: int
    ) -> None:
        self.watched = list(watched)
        self.intents = list(intents)
        self._seed, self._shard = seed, shard

    def signature_of(self, optimizer: Optimizer, closure: bool, oracles: Sequence[Oracle] = ()) -> Signature:
        """What decides which tensors are stepped alike; steps are counted from the first tensor's."""
        entries: list[_Entry] = []
        first: float | None = None
        state_of = optimizer.state.get
        for index, watched in enumerate(self.watched):
            parameter = watched.parameter
            gradient = parameter.grad
            if (gradient is None and not closure) or not watched.shard.elements:
                continue
            own = state_of(parameter, _NO_STATE)
            step = steps_taken(own)
            if first is None:
                first = step
            dtype = None if gradient is None else gradient.dtype
            entries.append((index, watched.group, len(own), step - first, dtype))
        return closure, tuple(oracles), tuple(entries)

    def plans(
        self, optimizer: Optimizer, signature: Signature, cap: int | Literal["all"], oracles: Sequence[Oracle]
    ) -> list[BucketPlan]:
        """A bucket for each kind of tensor in the signature; `oracles` are those that may look on."""
        kinds: dict[object, list[int]] = {}
        closure, _, entries = signature
        for index, *rest in entries:
            parameter = self.watched[index].parameter
            gradient = parameter.grad
            if gradient is not None and (gradient.is_sparse or not placed_alike(parameter, gradient)):
                continue
            shapes = stored.elementwise_dtypes(parameter, optimizer.state.get(parameter, {}))
            kinds.setdefault((*rest, local(parameter).device, parameter.dtype, shapes), []).append(index)
        return [self._plan_bucket(members, closure, cap, oracles) for members in kinds.values()]

    def _plan_bucket(
        self, members: list[int], closure: bool, cap: int | Literal["all"], oracles: Sequence[Oracle]
    ) -> BucketPlan:
        watched = self.watched[members[0]]
        parameters = [self.watched[member].parameter for member in members]
        samples = [self.draw_sample(member, cap) for member in members]
        intent = _CLOSURE if closure else self.intents[watched.group]
        bucket = Bucket(members, parameters, samples, intent, knows_gradient=not closure)
        views = [
            OracleView(oracle, self.names_of(oracle.members), members, bucket.layout)
            for oracle in (() if intent.kind == "before-after" else oracles)
            if set(oracle.members) <= set(members)
        ]
        replicated = [self.watched[member].shard.replicated for member in members]
        on_device = torch.tensor(replicated).to(bucket.layout.device) if any(replicated) else None
        return BucketPlan(bucket, watched.group, self.names_of(members), views, on_device)

    def names_of(self, members: Sequence[int]) -> Axis:
        """The layers that these watched parameters are."""
        return Axis(self.watched[member].name for member in members)

    def draw_sample(self, index: int, cap: int | Literal["all"]) -> TensorSample:
        """The sample of a watched parameter, at most `cap` elements of it."""
        watched, shard = self.watched[index], self.watched[index].shard
        return draw(
            watched.name,
            shard.elements,
            watched.parameter.element_size(),
            cap,
            seed=self._seed,
            shard=self._shard + shard.number,
            start=shard.start,
        )


def steps_taken(state: dict[str, Any]) -> float:
    """The step counter of one tensor's state, 0 where it is on a device: reading it would wait."""
    step = state.get("step", 0.0)
    if isinstance(step, Tensor):
        return step.item() if step.is_cpu else 0.0
    return float(step)
