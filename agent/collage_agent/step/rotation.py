"""Whole tensors in rotation: as many at each measured step as a bound on elements allows, until each has had its
turn.

Totals are held until every tensor has had its turn, and are handed over together at the step that ends the round,
so the model's numbers always cover all its tensors. Each tensor's own are of one step within the round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as distributed
from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.before_after import BeforeAfter, WholeTensor
from collage_agent.intent.intent_choice import Intent
from collage_agent.intent.optimizer_clone import clone_settings, clone_value
from collage_agent.intent.whole_optimizer import ELEMENTS_COPIED, OptimizerCopy, WholeOptimizer
from collage_agent.intent.widening import widened
from collage_agent.sample import stored_parts
from collage_agent.sample.quantised_states import reading
from collage_agent.step.bucket import Bucket
from collage_agent.step.bucket_planner import Planner
from collage_agent.step.gather import BlockLayout
from collage_agent.step.observed_step import Follows
from collage_agent.step.whole_steps import LaidOutStep
from collage_agent.training.watched_parameters import WatchedParameter
from collage_monitor.totals_table import Table

__all__ = [
    "ELEMENTS_A_STEP",
    "IN_PARTS",
    "Rotation",
    "intents_on_this_rank",
    "is_whole",
    "nan_where_skipped",
    "too_large",
]

IN_PARTS: Final = (
    "in parts on several ranks, and no rank can step its part alone: only what changed is known of them"
)

ELEMENTS_A_STEP: Final = 2**20
"""Elements stepped whole at one measured step, at most: 8 bytes each for θ, g, u and every state."""


class Rotation:
    """Which whole tensors are stepped at a measured step, and the totals held until each has had its turn.

    If one turn is a whole round, the next one has the same tensors, so their buffers are `kept` between steps.
    Other buffers are freed, and so are those without a bound, which would be as large as the model.
    """

    def __init__(self, bound: int | None = ELEMENTS_A_STEP) -> None:
        """bound: elements a step; None: no bound, every tensor at every measured step."""
        self._bound = bound
        self.kept: tuple[_WholeBucket, ...] = ()
        self._turn: tuple[_WholeBucket, ...] = ()
        self._made_for: list[tuple[int, WholeTensor]] = []
        self._held: dict[int, Table[Tensor]] = {}
        self._waiting: set[int] = set()

    def forget(self) -> None:
        """The live weights and states were replaced: discard the kept values."""
        self.kept = ()

    def before(self, optimizer: Optimizer, planner: Planner, follows: Follows = "other steps") -> None:
        """Copy the tensors whose turn it is, before the live step. Runs inside `isolated`; synchronises nothing."""
        eligible = {
            index: intent
            for index, entry in enumerate(planner.watched)
            if entry.stepped
            and isinstance(intent := planner.intents[entry.group], WholeTensor)
            and is_whole(entry)
            and _is_dense(intent.composition.gradient_of(entry.parameter))
            and not too_large(entry, self._bound)
        }
        self._waiting = eligible.keys() - self._held.keys()
        chosen = [(index, eligible[index]) for index in self._next(planner.watched)]
        if not self.kept or chosen != self._made_for:
            # Free the kept tensors before their successors are made.
            self.kept = self._turn = ()
            self._made_for = chosen
            self._turn = tuple(_planned(index, planner, intent) for index, intent in chosen)
        else:
            self._turn = self.kept
        for bucket in self._turn:
            bucket.follows = follows
            bucket.gather_before(optimizer)
            bucket.look_at_whole(optimizer)

    def after(self, optimizer: Optimizer, scale: Tensor | None, skipped: Tensor | None) -> list[Table[Tensor]]:
        """Totals of all tensors if this step ends the round, else none yet. Runs inside `isolated`.

        scale: what gradients are to be divided by; skipped: not 0 where the loss scaler skipped the step,
        in which case these tensors are not reported in this round.
        """
        turn, self._turn = self._turn, ()
        for bucket in turn:
            (table,) = bucket.measure(optimizer, scale)
            (index,) = bucket.members
            self._held[index] = nan_where_skipped(skipped, table)
            self._waiting.discard(index)
        if self._bound is not None and not self._waiting and len(turn) == len(self._held):
            self.kept = turn
        if self._waiting or not self._held:
            return []
        round_of_all, self._held = list(self._held.values()), {}
        return round_of_all

    def _next(self, watched: Sequence[WatchedParameter]) -> Iterator[int]:
        """Those waiting that are stepped now: in order, as far as there is room."""
        room = self._bound
        for index in sorted(self._waiting):
            elements = watched[index].shard.elements
            if room is None:
                yield index
            elif elements <= room:
                room -= elements
                yield index


class _WholeTensorStep(LaidOutStep):
    """u of a tensor at one step: `clone_inputs` before it, `step_clones` and `displacement` after it."""

    def __init__(self, whole: WholeTensor, parameter: Tensor) -> None:
        super().__init__(whole, "whole-tensor")
        self._shadow = whole.shadow
        self._parameter = parameter
        self._group: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._weight = self._gradient = parameter

    def refresh(self, optimizer: Optimizer) -> None:
        """Copy the run state of the live instance, before its step."""
        self._shadow.refresh(optimizer)

    def clone_inputs(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Clone weight, gradient, state and the group's numbers before the live step. Synchronises nothing."""
        parameter, composition = self._parameter, self.composition
        gradient = composition.gradient_of(parameter)
        assert gradient is not None
        elementwise = stored_parts.elementwise_state(parameter, state)
        self._group = clone_settings(group)
        self._state = {
            key: reading(state, key).clone() if key in elementwise else clone_value(value)
            for key, value in state.items()
        }
        self._gradient = gradient.detach().clone()
        self._weight = parameter.detach().to(torch.float64, copy=True)
        if composition.master in elementwise:
            self._weight = self._state[str(composition.master)].double()
        elif composition.residual in elementwise:
            self._weight.add_(composition.residual_of(parameter.detach(), self._state[str(composition.residual)]))

    def step_clones(self, layout: BlockLayout, scale: Tensor | None) -> None:
        """Step the clones in fp64 and lay u and the stepped states out as `layout` does. Runs inside `isolated`.

        `scale`: what the gradient is to be divided by. Synchronises only if the optimizer's own step does.
        """
        state, moved = widened(self._state), self._weight.clone()
        gradient = self._gradient.double()
        if scale is not None:
            gradient.div_(scale)
        self._shadow.step(self._group, state, moved, gradient, self._gradient.dtype)
        self.lay_out([moved.sub_(self._weight)], [state], layout)

    def release_clones(self) -> None:
        """Release the clones; the next `clone_inputs` makes new ones."""
        self._weight = self._gradient = self._parameter
        self._state = {}
        self.release()


class _WholeBucket(Bucket):
    """A bucket of one tensor, measured whole: u is known only from its turn."""

    intent: _WholeTensorStep

    def gather_before(self, optimizer: Optimizer, *, weights_gathered: bool = False) -> None:
        super().gather_before(optimizer, weights_gathered=weights_gathered)
        self.intent.clone_inputs(optimizer.param_groups[self.group], self.states(optimizer)[0])

    def measure(
        self, optimizer: Optimizer, scale: Tensor | None, *, counterfactuals: bool = False
    ) -> list[Table[Tensor]]:
        self.intent.step_clones(self.layout, scale)
        found = super().measure(optimizer, scale, counterfactuals=counterfactuals)
        self.intent.release_clones()
        return found


def too_large(entry: WatchedParameter, bound: int | None = ELEMENTS_A_STEP) -> bool:
    """Whether a tensor alone exceeds the bound on elements stepped whole at a measured step: then it never has a
    turn."""
    return bound is not None and entry.shard.elements > bound


def is_whole(entry: WatchedParameter) -> bool:
    """Whether all of the tensor is here."""
    parameter, shard = entry.parameter, entry.shard
    whole = local_part(parameter) is parameter and shard.start is None and parameter.numel() == shard.elements > 0
    return whole and tuple(parameter.shape) == shard.shape


def intents_on_this_rank(
    optimizer: Optimizer, intents: Sequence[Intent], watched: Sequence[WatchedParameter]
) -> list[Intent]:
    """The groups' intents as far as this rank can follow them; tensors that it holds in part have no u.

    Putting the parts together would make ranks wait for each other, which the agent never does. A copy of a whole
    optimizer is this optimizer's own, and might wait for others if there are several ranks.
    """
    held = {entry.group for entry in watched if entry.shard.elements}
    held -= {entry.group for entry in watched if is_whole(entry)}
    verbose = any(isinstance(intent, WholeOptimizer) and intent.shadow.is_verbose for intent in intents)
    copied, found = OptimizerCopy(is_verbose=verbose), list[Intent]()
    elements = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    for group, intent in enumerate(intents):
        if not isinstance(intent, WholeTensor | WholeOptimizer):
            found.append(intent)
            continue
        why, is_copied = None, isinstance(intent, WholeOptimizer)
        if group in held:
            why = f"its tensors are {IN_PARTS}"
        elif is_copied and ranks > 1:
            why = f"{ranks} ranks train, and a copy of it might wait for the others"
        elif is_copied and elements > ELEMENTS_COPIED:
            why = f"{elements} elements are more than the {ELEMENTS_COPIED} of which a copy is made"
        if why is not None:
            reason = f"{intent.reason}; {why}"
            found.append(BeforeAfter(reason, intent.composition, intent.stochastic, intent.unexplained))
        else:
            found.append(WholeOptimizer(intent.shadow, intent.reason, copied) if is_copied else intent)
    return found


def nan_where_skipped(skipped: Tensor | None, part: Table[Tensor]) -> Table[Tensor]:
    """The table, NaN all over if the loss scaler skipped the step: `skipped` [1] is not 0 then; None: no scaler."""
    if skipped is None:
        return part
    skip = skipped.to(part.array.device).reshape(()).ne(0)
    return Table(part.statistics, part.layers, torch.where(skip, torch.nan, part.array))


def _is_dense(gradient: Tensor | None) -> bool:
    return gradient is not None and not gradient.is_sparse


def _planned(index: int, planner: Planner, intent: WholeTensor) -> _WholeBucket:
    entry = planner.watched[index]
    turn = _WholeTensorStep(intent, entry.parameter)
    sample, copies = planner.draw_sample(index, "all"), planner.casts_known([index])
    layers = planner.names_of([index])
    return _WholeBucket(
        [index],
        [entry.parameter],
        [sample],
        turn,
        entry.group,
        layers,
        copies=copies,
        scratch=planner.scratch,
    )
