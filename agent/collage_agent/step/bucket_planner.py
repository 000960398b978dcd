"""Groups watched tensors that are stepped alike into the buckets that measure them.

The plan is made again when groups or states change. How tensors are grouped is free: totals do not depend on it
(`tests/agent/step/test_measurer.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple
from zlib import crc32

import torch
from collage_optim.from_host import from_host
from collage_optim.numerics.cast_formats import CastFormat, route_of
from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from collage_agent.intent.before_after import BeforeAfter
from collage_agent.intent.intent_choice import Intent
from collage_agent.intent.whole_optimizer import WholeOptimizer
from collage_agent.sample import stored_parts
from collage_agent.sample.sampling import TensorSample, draw
from collage_agent.sample.state_mappings import keeps_by_name, state_of, states_of, step_of
from collage_agent.step.bucket import Bucket
from collage_agent.step.gather import BlockLayout
from collage_agent.step.observed_step import Scratch
from collage_agent.step.oracle import Oracle, OracleView
from collage_agent.step.touched_rows import TouchedBucket
from collage_agent.step.whole_steps import CopiedBucket
from collage_agent.training.dtensors import placed_alike, rows_of_a_shard
from collage_agent.training.watched_parameters import WatchedParameter
from collage_monitor.totals_table import Axis

__all__ = ["Kind", "Planner", "Signature", "step_counter_of"]

Kind = tuple[int, int, float, torch.dtype | None, bool]
"""Parameter group, number of states, steps ahead of the first tensor, the gradient's dtype, is it sparse?"""
_MOST_TOUCHED: Final = 2**20
"""Most elements of a tensor with a sparse gradient under sample="all"; each index takes 8 bytes."""
_CLOSURE: Final = BeforeAfter("the step evaluates a closure repeatedly, so no one gradient leads to it")


class Signature(NamedTuple):
    """The key of a plan: places of the watched tensors of each kind. Tensors of one kind are stepped alike."""

    closure: bool
    oracles: tuple[Oracle, ...]
    kinds: dict[Kind, list[int]]


class Planner:
    """Gathers watched tensors that are stepped alike into buckets, and draws their samples.

    `watched` and `intents`, one for each parameter group, are replaced when groups change; places stay. `stepped`:
    the place of each tensor that is stepped, itself, its group, and its gradient's attribute. All buckets share
    `scratch`.
    """

    def __init__(
        self,
        watched: Sequence[WatchedParameter],
        intents: Sequence[Intent],
        *,
        seed: int,
        casts: Sequence[str] = (),
    ) -> None:
        """casts: the formats in which copies of the weights are measured."""
        self.scratch = Scratch()
        self._seed = seed
        self._casts = tuple(casts)
        self._least_block = max((route_of(key).last.block for key in casts), default=1)
        self.sparse: set[str] = set()
        """The tensors whose gradients were seen to be sparse, by name."""
        self.keeps_by_name = False
        """Whether all states are found by name alone (`states.keeps_by_name`); known from the first plan on."""
        self.regroup(watched, intents)

    def regroup(self, watched: Sequence[WatchedParameter], intents: Sequence[Intent]) -> None:
        """Take over changed groups, with an intent for each; known parameters keep their places in `watched`."""
        self.watched, self.intents = list(watched), list(intents)
        self._known: dict[tuple[object, ...], tuple[list[TensorSample], BlockLayout]] = {}
        """The samples of the last plan's buckets."""
        self._earlier = self._known
        self.stepped = [
            (index, entry.parameter, entry.group, self.intents[entry.group].composition.gradient)
            for index, entry in enumerate(self.watched)
            if entry.stepped and entry.shard.elements
        ]

    def plans(
        self, optimizer: Optimizer, signature: Signature, cap: int | Literal["all"], oracles: Sequence[Oracle]
    ) -> list[Bucket]:
        """Make a bucket for each kind of tensor in the signature; `oracles`: those that may follow it."""
        kinds: dict[object, list[int]] = {}
        found: list[Bucket] = []
        self._earlier, self._known = self._known, {}
        for kind, indices in signature.kinds.items():
            *_, is_sparse = kind
            if is_sparse:
                self.sparse.update(self.watched[index].name for index in indices)
                found += [bucket for index in indices for bucket in self._touched(index, cap, optimizer)]
                continue
            for kept, members in self._kept_alike(indices, optimizer):
                kinds.setdefault((kind, *kept), []).extend(members)
        found += [self._bucket(sorted(members), signature.closure, cap, oracles) for members in kinds.values()]
        self._earlier = self._known
        self.keeps_by_name = keeps_by_name(optimizer)
        for bucket in found:
            bucket.keeps_by_name = self.keeps_by_name
        return found

    def _kept_alike(
        self, indices: Sequence[int], optimizer: Optimizer
    ) -> Iterator[tuple[tuple[object, ...], list[int]]]:
        """Device, dtype and the states' dtypes, with the watched parameters that have them.

        Parameters whose gradients have another memory layout are left out.
        """
        kept, alike = states_of(optimizer), dict[object, list[int]]()
        for index in indices:
            parameter = self.watched[index].parameter
            if type(parameter) not in stored_parts.PLAIN_TENSORS and not self._is_placed_as_its_gradient(index):
                continue
            key = parameter.dtype, parameter.device, stored_parts.form_of(parameter, kept(parameter, {}))
            known = alike.get(key)
            if known is None:
                known = alike[key] = []
            known.append(index)
        for members in alike.values():
            parameter = self.watched[members[0]].parameter
            dtypes = stored_parts.elementwise_dtypes(parameter, kept(parameter, {}))
            yield (local_part(parameter).device, parameter.dtype, dtypes), members

    def _is_placed_as_its_gradient(self, index: int) -> bool:
        entry = self.watched[index]
        gradient = self.intents[entry.group].composition.gradient_of(entry.parameter)
        return placed_alike(entry.parameter, gradient)

    def _touched(self, index: int, cap: int | Literal["all"], optimizer: Optimizer) -> list[Bucket]:
        """Make a bucket of a tensor with a sparse gradient, none if it cannot be measured.

        That is a tensor which is no plain one, a gradient sparse in more than rows, or a state that is sparse too.
        """
        watched = self.watched[index]
        parameter, intent = watched.parameter, self.intents[watched.group]
        gradient = intent.composition.gradient_of(parameter)
        states = state_of(optimizer, parameter).values()
        plain = type(parameter) in (Tensor, Parameter) and parameter.is_contiguous() and watched.shard.start is None
        dense = all(state.layout == torch.strided for state in states if isinstance(state, Tensor))
        in_rows = gradient is not None and gradient.sparse_dim() == 1
        if not (plain and dense and in_rows and intent.kind in ("shadow", "before-after")):
            return []
        most = min(parameter.numel(), _MOST_TOUCHED if cap == "all" else cap)
        seed = crc32(f"{self._seed}/{watched.name}".encode())
        layers = self.names_of([index])
        return [
            TouchedBucket(
                index, parameter, intent, watched.group, layers, cap=most, seed=seed, scratch=self.scratch
            )
        ]

    def _bucket(
        self, members: list[int], closure: bool, cap: int | Literal["all"], oracles: Sequence[Oracle]
    ) -> Bucket:
        watched = self.watched[members[0]]
        parameters = [self.watched[member].parameter for member in members]
        samples, layout = self._sampled(members, parameters, cap)
        intent = _CLOSURE if closure else self.intents[watched.group]
        copied = isinstance(intent, WholeOptimizer) and intent.copied.refused is None
        kind: Any = CopiedBucket if copied else Bucket
        bucket: Bucket = kind(
            members,
            parameters,
            samples,
            intent,
            watched.group,
            self.names_of(members),
            knows_gradient=not closure,
            copies=self.casts_known(members),
            scratch=self.scratch,
            layout=layout,
        )
        bucket.oracles = [
            OracleView(oracle, self.names_of(oracle.members), members, bucket.layout)
            for oracle in (() if intent.kind == "before-after" else oracles)
            if set(oracle.members) <= set(members)
        ]
        replicated = [self.watched[member].shard.replicated for member in members]
        bucket.replicated = from_host(torch.tensor(replicated), bucket.layout.device) if any(replicated) else None
        return bucket

    def _sampled(
        self, members: list[int], parameters: list[Tensor], cap: int | Literal["all"]
    ) -> tuple[list[TensorSample], BlockLayout]:
        """The samples of these parameters and their layout: those of the plan before, if they still hold.

        The first steps are planned twice, because the first of them makes the states.
        """
        key = (cap, parameters[0].dtype, *members)
        known = self._earlier.get(key)
        if known is None or not known[1].holds(parameters):
            samples = [self.draw_sample(member, cap) for member in members]
            known = samples, BlockLayout(samples, parameters)
        self._known[key] = known
        return known

    def names_of(self, members: Sequence[int]) -> Axis:
        """The layers that these watched parameters are."""
        return Axis(self.watched[member].name for member in members)

    def casts_known(self, members: Sequence[int]) -> dict[str, list[bool]]:
        """The formats of copies, and which of these parameters' copies can be computed from samples."""
        return {
            key: [_copy_is_known(self.watched[member], route_of(key).last) for member in members]
            for key in self._casts
        }

    def draw_sample(self, index: int, cap: int | Literal["all"]) -> TensorSample:
        """The sample of a watched parameter, at most `cap` elements of it."""
        watched, shard = self.watched[index], self.watched[index].shard
        return draw(
            watched.name,
            shard.elements,
            watched.parameter.element_size(),
            cap,
            seed=self._seed,
            shard=shard.number,
            start=shard.start,
            least_block=self._least_block,
        )


def _copy_is_known(watched: WatchedParameter, kind: CastFormat) -> bool:
    """Whether all elements that a copy depends on are here: blocks in rows, whole tiles, a tensor with a scale."""
    shard, part = watched.shard, local_part(watched.parameter)
    whole = shard.elements == math.prod(shard.shape)
    if kind.of_tensor and not whole:
        return False
    is_shaped = shard.start is None and part.dim() == len(shard.shape)
    if kind.by_channel:
        return is_shaped and part.dim() > 1 and part.is_contiguous() and part.shape[1:] == shard.shape[1:]
    if kind.block == 1:
        return True
    if not shard.shape or shard.shape[-1] % kind.block or not part.is_contiguous():
        return False
    if kind.tile:
        return is_shaped and len(shard.shape) > 1 and (whole or _has_whole_tiles(watched, kind.tile[0]))
    return whole or (is_shaped and part.shape[-1] == shard.shape[-1])


def _has_whole_tiles(watched: WatchedParameter, high: int) -> bool:
    """Whether tiles of `rows` rows in the last two dimensions of a sharded tensor are not split over ranks."""
    shape, part = watched.shard.shape, local_part(watched.parameter)
    if part.shape[-1] != shape[-1]:
        return False
    if part.dim() > 2 and part.shape[-2] == shape[-2]:
        return True
    rows = rows_of_a_shard(watched.parameter)
    return part.dim() == 2 and rows is not None and rows % high == 0


def step_counter_of(state: Mapping[str, Any]) -> float:
    """The step counter of one tensor's state; 0 if it is on a device, where reading it would synchronise."""
    step = step_of(state)
    if isinstance(step, Tensor):
        return step.item() if step.is_cpu else 0.0
    return float(step or 0.0)
