"""The oracles of one optimizer: fp64 optimizers kept running beside it on a sample of their own.

One `oracle.Oracle` each bucket. The measurer steps them at every step and compares them at measured ones
(`tests/agent/step/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.optimizer_clone import clone_value
from collage_agent.sample import stored_parts
from collage_agent.sample.quantised_states import reading
from collage_agent.sample.state_mappings import state_of
from collage_agent.stats.block_sums import on_host
from collage_agent.step.bucket import Bucket
from collage_agent.step.bucket_planner import Planner, step_counter_of
from collage_agent.step.gather import BlockLayout, Staging
from collage_agent.step.oracle import Oracle
from collage_agent.training.dtensors import placed_alike
from collage_agent.training.skipped_steps import loss_scaling
from collage_agent.training.watched_parameters import WatchedParameter

__all__ = ["Oracles"]

ORACLE_SAMPLE: Final = 1024
_MOST_APART: Final = 64
"""Oracles beyond which no other attaches to a tensor that takes its first step later: each is stepped by itself."""


class Oracles:
    """Attaches oracles before the first step of each tensor and steps them; attaches new ones when something else
    wrote to the weights.

    `attached`: one for each kind of tensor, None before they attach. `restarts` counts how often new ones had to
    attach because weights were written between two steps or a step raised; after a loaded state it does not count.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.attached: list[Oracle] | None = None
        self.restarts = 0
        self._last_buckets: list[Bucket] = []
        self._compared: list[Bucket] = []

    def restart(self) -> None:
        """Attach again before the next step: the live weights and states were replaced."""
        self.attached = None

    def step_raised(self) -> None:
        """The live step raised: the step that the oracles took did not complete."""
        if self.attached is not None:
            self.restart()
            self.restarts += 1

    def keep_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Keep the buckets of the step just measured: they hold its weights, to notice later writes."""
        self._last_buckets = list(buckets)

    def prepare(self, optimizer: Optimizer, sample: int | Literal["all"], *, written: bool) -> None:
        """Before `step`: attach if there are none, or if a weight was `written` to since the last step."""
        if written or self._weights_moved(optimizer):
            self.restart()
            self.restarts += 1
        if self.attached is None:
            self.attached = self._attach(optimizer, sample)
        elif len(self.attached) < _MOST_APART:
            self.attached += self._attach(optimizer, sample, beside=self.attached)
        self._put_in_lock_step(self.attached)

    def weights_gathered(self, bucket: Bucket) -> bool:
        """Whether `prepare` has gathered the weights of this bucket as they are before the step."""
        return any(bucket is compared for compared in self._compared)

    def step(self, optimizer: Optimizer, buckets: Sequence[Bucket] = ()) -> None:
        """Take the step that the optimizer is about to take.

        buckets: those that have gathered their gradients; an oracle takes its own from these.
        """
        scale, skipped = loss_scaling(optimizer)
        known = {
            id(view.oracle): bucket.gradient_at(view.positions) for bucket in buckets for view in bucket.oracles
        }
        for oracle in self.attached or ():
            watched = self._planner.watched[oracle.members[0]]
            intent = self._planner.intents[watched.group]
            if intent.composition.gradient_of(watched.parameter) is None:
                continue
            intent.refresh(optimizer)
            gradient = known.get(id(oracle))
            if gradient is None:
                found = [intent.composition.gradient_of(self._planner.watched[m].parameter) for m in oracle.members]
                gradient = oracle.gather([entry for entry in found if entry is not None])
            oracle.step(intent, optimizer.param_groups[watched.group], gradient, scale, skipped)

    def split_by_state(self, optimizer: Optimizer) -> None:
        """Split oracles whose tensors got states of different form after they attached."""
        if self.attached is None:
            return
        parts: list[Oracle] = []
        parameters = self._parameters()
        for oracle in self.attached:
            kinds: dict[object, list[int]] = {}
            for member in oracle.members:
                state = state_of(optimizer, parameters[member])
                kind = len(state), stored_parts.elementwise_dtypes(parameters[member], state)
                kinds.setdefault(kind, []).append(member)
            alone = len(kinds) == 1
            parts += [oracle] if alone else [oracle.split(members, parameters) for members in kinds.values()]
        self.attached = parts

    def _weights_moved(self, optimizer: Optimizer) -> bool:
        """Whether the sampled weights differ from those after the last step, if it was measured.

        This notices a write through `.data`, which torch does not count. On the host only: comparing on a device
        would synchronise it.
        """
        buckets, self._last_buckets, self._compared = self._last_buckets, [], []
        current = {id(oracle) for oracle in self.attached or ()}
        for bucket in buckets:
            followed = any(id(view.oracle) in current for view in bucket.oracles)
            if followed and on_host(bucket.parameter_after):
                self._compared.append(bucket)
                if bucket.weights_moved(optimizer):
                    return True
        return False

    def _attach(
        self, optimizer: Optimizer, sample: int | Literal["all"], *, beside: Sequence[Oracle] = ()
    ) -> list[Oracle]:
        """Oracles of all tensors that can have one now, and are not followed by those beside."""
        if sum(len(oracle.members) for oracle in beside) == len(self._planner.watched):
            return []
        followed = {member for oracle in beside for member in oracle.members}
        cap = ORACLE_SAMPLE if sample == "all" else min(sample, ORACLE_SAMPLE)
        oracles = []
        kinds: dict[object, list[int]] = {}
        for index, watched in enumerate(self._planner.watched):
            if not watched.stepped or index in followed:
                continue
            intent = self._planner.intents[watched.group]
            if intent.kind == "before-after" or not _can_have_oracle(watched, intent.composition):
                continue
            own = state_of(optimizer, watched.parameter)
            key = (
                watched.group,
                step_counter_of(own),
                len(own),
                local_part(watched.parameter).device,
                watched.parameter.dtype,
                stored_parts.elementwise_dtypes(watched.parameter, own),
            )
            kinds.setdefault(key, []).append(index)
        for members in kinds.values():
            parameters = [self._planner.watched[member].parameter for member in members]
            samples = [self._planner.draw_sample(member, cap) for member in members]
            layout = BlockLayout(samples, parameters)
            state = self._state_of(optimizer, members, layout)
            oracles.append(Oracle(members, samples, layout, state.pop(stored_parts.PARAMETER), state))
        return oracles

    def _state_of(self, optimizer: Optimizer, members: Sequence[int], layout: BlockLayout) -> dict[str, Any]:
        """Stored weight, and averages, of the members' samples in fp64, scalars beside them."""
        composition = self._composition(members[0])
        parameters = [self._planner.watched[member].parameter for member in members]
        states = [state_of(optimizer, parameter) for parameter in parameters]
        keys = tuple(stored_parts.elementwise_state(parameters[0], states[0]))
        present = (stored_parts.PARAMETER, *keys)

        def values_of(name: str) -> Tensor:
            tensors = parameters if name == stored_parts.PARAMETER else [reading(state, name) for state in states]
            staging = Staging(layout, tensors[0].dtype)
            layout.gather(tensors, staging)
            return staging.values

        def gathered(names: list[str]) -> Tensor:
            leading, *others = [values_of(name) for name in names]
            if not leading.is_floating_point():
                return leading
            total = leading.to(torch.float64, copy=True)
            for name, values in zip(names[1:], others, strict=True):
                total.add_(composition.residual_of(leading, values) if name == composition.residual else values)
            return total

        state: dict[str, Any] = clone_value(stored_parts.scalar_state(parameters[0], states[0]))
        for name in stored_parts.average_names(keys, composition):
            state[name] = gathered(stored_parts.components(name, keys, composition))
        state[stored_parts.PARAMETER] = gathered(stored_parts.stored_parameter(present, composition))
        return state

    def _put_in_lock_step(self, oracles: Sequence[Oracle]) -> None:
        """Split oracles whose tensors are in different groups now, or of which only some have a gradient.

        A tensor leaves if its gradient is sparse, if it is no longer stepped, or if its group has no u.
        """
        everyone: list[Oracle] = []
        for oracle in oracles:
            kinds: dict[object, list[int]] = {}
            for member in oracle.members:
                watched = self._planner.watched[member]
                if not watched.stepped:
                    continue
                intent = self._planner.intents[watched.group]
                gradient = intent.composition.gradient_of(watched.parameter)
                if intent.kind != "before-after" and (gradient is None or not gradient.is_sparse):
                    kinds.setdefault((watched.group, gradient is None), []).append(member)
            unchanged = [tuple(members) for members in kinds.values()] == [oracle.members]
            everyone += [oracle] if unchanged else [oracle.split(own, self._parameters()) for own in kinds.values()]
        self.attached = everyone

    def _composition(self, member: int) -> stored_parts.Composition:
        return self._planner.intents[self._planner.watched[member].group].composition

    def _parameters(self) -> dict[int, Tensor]:
        return {index: watched.parameter for index, watched in enumerate(self._planner.watched)}


def _can_have_oracle(watched: WatchedParameter, composition: stored_parts.Composition) -> bool:
    gradient = composition.gradient_of(watched.parameter)
    dense = gradient is not None and not gradient.is_sparse
    return dense and watched.shard.elements > 0 and placed_alike(watched.parameter, gradient)
