"""Checks whether an optimizer's states survived the resume.

Checked once around the first measured step of a launch, and again after states are loaded later. It reads samples
before the step and some counters after it: this is the only step that waits for a device. It reports nothing if
nothing was loaded. Zeros are a loss only if the step fills them, and a count of 0 only beside averages that nothing
but steps can fill. So it suspects before the step, and reports after it. Of intact states it reads the first
tensors; only empty states are read to their end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from collage_optim import RESIDUALS_FROM, CollageOptimizer
from collage_optim.names import dtype_name
from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.intent_choice import Intent
from collage_agent.sample.quantised_states import is_quantised
from collage_agent.sample.state_mappings import state_of, states_of, step_of
from collage_agent.sample.stored_parts import OURS, average_names, components, elementwise_state, leaves_residual
from collage_agent.training.watched_parameters import WatchedParameter
from collage_monitor import wire

__all__ = ["ResumeCheck", "largest_step_count"]

_SIGNED: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""What torch counts in, for what it cannot count in."""
_SAMPLED: Final = 4096
"""Elements of each tensor."""
_FEWEST: Final = 64
"""Elements that speak for the whole."""
_FEWEST_LEFT: Final = 0.1
"""Of the elements that moved. fp32 arithmetic itself leaves a last bit beside a few."""
_SOME_COUNTERS: Final = 64
_FEWEST_STEPS: Final = 2
"""A first step at rate 0 leaves nothing beside a weight."""


def largest_step_count(optimizer: Optimizer) -> int | None:
    """The largest count of steps in the optimizer's states and groups; 0: none was taken, None: it keeps no count.

    Synchronises, once, a device on which counts are kept: all of them are read together.
    """
    return _largest_of(optimizer, _counters(optimizer))


def _largest_of(optimizer: Optimizer, counts: Sequence[Any]) -> int | None:
    if not counts and getattr(optimizer, "defaults", {}).get("k", 0) == 0:
        # Schedule-free optimizers and D-Adaptation count in a group's `k`, from 0; Ranger's `k` is a period.
        counts = [group["k"] for group in optimizer.param_groups if "k" in group]
    if counts:
        return int(_largest(counts))
    return None if any(optimizer.state.values()) else 0


def _counters(optimizer: Optimizer) -> list[Any]:
    """All counts of steps, in states and groups, as they are kept; none of parameters on the meta device."""
    kept = states_of(optimizer)
    states = (kept(own, {}) for group in optimizer.param_groups for own in group["params"] if not own.is_meta)
    found = (step_of(holder) for holder in chain(states, optimizer.param_groups))
    return [count for count in found if count is not None]


def _largest(counts: Sequence[Any]) -> float:
    """The largest of some counts; of those on a device all of one dtype are read together."""
    read: list[float] = []
    alike: dict[object, list[Tensor]] = {}
    for count in counts:
        if not isinstance(count, Tensor):
            read.append(float(count))
        elif count.is_cpu:
            read.append(_of_count(count))
        else:
            alike.setdefault((count.dtype, count.device), []).append(count if not count.dim() else count.max())
    return max([*read, *(float(torch.stack(tensors).max()) for tensors in alike.values())])


class ResumeCheck:
    """`losses`: the losses in the order of their discovery, each kind once."""

    def __init__(self) -> None:
        self.losses: list[wire.ResumeLoss] = []
        self._taken: int | None = None
        self._some: list[float] = []
        self._absent: list[tuple[Tensor, str]] = []
        self._empty: list[str] = []
        self._came_along: list[str] = []
        self._suspected: _Found = {}
        self._weights: dict[int, Tensor] = {}

    def before(
        self, optimizer: Optimizer, watched: Sequence[WatchedParameter], intents: Sequence[Intent], step: int
    ) -> None:
        """The first step of a launch is about to be taken. Synchronises the device."""
        kept, counters = _Kept(optimizer, watched, intents), _counters(optimizer)
        taken = self._taken = _largest_of(optimizer, counters)
        self._some = list(map(_of_count, _spread(counters)))
        self._look_at_averages(kept)
        if _has_history(kept, taken):
            self._suspected = _beside_weights(optimizer, kept, taken)
            self._weights = {place: shown.clone() for place, shown, _ in _sums(kept)} if self._suspected else {}
            self._absent = [] if self._suspected else list(_absent_beside_weights(kept))
        for kind, (text, lasting) in _in_narrow_counters(counters).items():
            self._note(kind, text, step, lasting=lasting)

    def _look_at_averages(self, kept: _Kept) -> None:
        """Suspects averages that are 0 everywhere though steps are counted, and counts of 0 beside averages."""
        if self._empty or self._came_along or self._taken is None or 0 < self._taken < _FEWEST_STEPS:
            # An earlier suspicion is reported after this step: a repeated closure call hid the last step.
            return
        filled = _holding(kept, _is_filled)
        if not self._taken:
            self._came_along = [name for name, held in _holding(kept, _left_by_steps).items() if held]
        if self._taken or self._came_along:
            self._empty = [name for name, held in filled.items() if not held]

    def after(
        self, optimizer: Optimizer, watched: Sequence[WatchedParameter], intents: Sequence[Intent], step: int
    ) -> None:
        """It has been taken. Synchronises the device."""
        suspected, self._suspected, weights, self._weights = self._suspected, {}, self._weights, {}
        if suspected and not _leaves_nothing(weights, _Kept(optimizer, watched, intents)):
            for kind, (text, lasting) in suspected.items():
                self._note(kind, text, step, lasting=lasting)
        self._note_averages(optimizer, _Kept(optimizer, watched, intents), step)
        if self._taken and self._stands_still(optimizer):
            text = f"the step counter stands at {self._taken:,} before a step and after it"
            self._note("counter", text, step, lasting=True)
        absent, self._absent = self._absent, []
        made = [key for parameter, key in absent if key in state_of(optimizer, parameter)]
        if made and len(made) == len(absent):
            text = (
                f"what stands beside the 16-bit weights ({' and '.join(dict.fromkeys(made))}) was made anew in the "
                "first step of this launch, beside averages of earlier steps: what it had held is gone"
            )
            self._note("masters", text, step, lasting=False)

    def _note_averages(self, optimizer: Optimizer, kept: _Kept, step: int) -> None:
        """Notes the suspected losses, except of averages that this step leaves at 0: nothing fills them."""
        empty, self._empty, came_along, self._came_along = self._empty, [], self._came_along, []
        if empty and not _was_skipped(optimizer):
            filled = _holding(kept, _is_filled)
            empty = [name for name in empty if filled.get(name, False)]
        if came_along:
            # If another average begins at 0, nothing was loaded; a counter that stays 0 counts something else.
            if not empty and not self._stands_still(optimizer):
                text = f"steps are counted from 0 again, though {' and '.join(came_along)} came along: "
                self._note("count", text + "bias is corrected for as if it had not", step, lasting=False)
        elif empty:
            text = (
                f"{' and '.join(empty)} {'was' if len(empty) == 1 else 'were'} 0 everywhere before the first step "
                f"of this launch, though {self._taken:,} steps are counted"
            )
            self._note("averages", text, step, lasting=False)

    def _stands_still(self, optimizer: Optimizer) -> bool:
        """Whether no counter has counted the step; False for one that was skipped."""
        if _was_skipped(optimizer):
            return False
        counters = _counters(optimizer)
        now = map(_of_count, _spread(counters))
        if any(after > before for before, after in zip(self._some, now, strict=False)):
            return False
        largest = _largest_of(optimizer, counters)
        return largest is not None and largest <= (self._taken or 0)

    def _note(self, kind: wire.LossKind, text: str, step: int, *, lasting: bool) -> None:
        if all(loss.kind != kind for loss in self.losses):
            self.losses.append(wire.ResumeLoss(kind=kind, text=text, step=step, lasting=lasting))


@dataclass(frozen=True)
class _Kept:
    """Each stepped parameter that has a state, with that state and its group's intent.

    Each look builds them again: 20,000 kept tuples would make Python's garbage collector scan everything, which
    takes longer than the rest of the look.
    """

    optimizer: Optimizer
    watched: Sequence[WatchedParameter]
    intents: Sequence[Intent]

    def __iter__(self) -> Iterator[tuple[WatchedParameter, Mapping[str, Any], Intent]]:
        kept = states_of(self.optimizer)
        for entry in self.watched:
            if entry.stepped and (state := kept(entry.parameter, {})):
                yield entry, state, self.intents[entry.group]


_Found = dict[wire.LossKind, tuple[str, bool]]
"""What was lost: the sentence, and whether it goes on."""


def _was_skipped(optimizer: Optimizer) -> bool:
    """Whether a loss scaler skipped the step. A fused optimizer is called for it, too."""
    skipped = getattr(optimizer, "found_inf", None)
    return skipped is not None and bool(skipped)


def _spread(counters: Sequence[Any]) -> Sequence[Any]:
    """A few counters, evenly spread: layers without a gradient do not count."""
    return counters[:: max(-(-len(counters) // _SOME_COUNTERS), 1)]


def _of_count(count: Any) -> float:
    return float(count.max() if isinstance(count, Tensor) and count.dim() else count)


def _in_narrow_counters(counters: Sequence[Any]) -> _Found:
    """Counters in a dtype that cannot hold every count."""
    for counter in counters:
        if isinstance(counter, Tensor) and counter.dtype.is_floating_point and counter.dtype.itemsize < 4:
            most = round(2 / torch.finfo(counter.dtype).eps)
            name, value = dtype_name(counter.dtype), float(counter)
            text = f"the step counter is kept in {name}, which counts to {most:,} and no further: it stands at "
            text += f"{value:,.0f}"
            return {"counter": (text, True)}
    return {}


def _beside_weights(optimizer: Optimizer, kept: _Kept, taken: int | None) -> _Found:
    """Finds master weights that equal the weight, and residuals that are 0, if this holds for all of them."""
    names: dict[wire.LossKind, dict[str, None]] = {}
    sampled = 0
    for entry, state, intent in kept:
        own, weight = intent.composition, entry.parameter
        if own.is_plain or weight.dtype.itemsize >= 4:
            continue
        if own is OURS and _just_converted(optimizer, entry, taken):
            continue
        weight = local_part(weight.detach())
        master, residual = (state.get(key) if key else None for key in (own.master, own.residual))
        if isinstance(master, Tensor) and local_part(master).dtype.itemsize >= 4:
            held, shown = _sample(local_part(master)), _sample(weight)
            if not torch.equal(held, shown.to(held.dtype)):
                return {}
            names.setdefault("masters", {})[str(own.master)] = None
        elif isinstance(residual, Tensor) and not is_quantised(local_part(residual)):
            if not _is_zero(local_part(residual)):
                return {}
            names.setdefault("residuals", {})[str(own.residual)] = None
        else:
            continue
        sampled += min(weight.numel(), _SAMPLED)
    if sampled < _FEWEST or len(names) != 1:
        return {}
    [(kind, named)] = names.items()
    what = "every master weight equalled its 16-bit weight" if kind == "masters" else "every residual was 0"
    steps = "" if taken is None else f", {taken:,} steps into the training"
    text = f"{what} ({' and '.join(named)}) before the first step of this launch{steps}: what they held is gone"
    return {kind: (text, False)}


def _sums(kept: _Kept) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The identity and a sample of each 16-bit weight, and the same sample in fp64 with the part kept beside it."""
    for entry, state, intent in kept:
        own, weight = intent.composition, local_part(entry.parameter.detach())
        master, residual = (state.get(key) if key else None for key in (own.master, own.residual))
        if weight.dtype.itemsize >= 4:
            continue
        shown = _sample(weight)
        if isinstance(master, Tensor):
            yield id(entry.parameter), shown, _sample(local_part(master)).double()
        elif isinstance(residual, Tensor) and not is_quantised(local_part(residual)):
            beside = own.residual_of(shown, _sample(local_part(residual)))
            yield id(entry.parameter), shown, shown.double().add_(beside)


def _leaves_nothing(before: Mapping[int, Tensor], kept: _Kept) -> bool:
    """Whether the step, which began without parts beside the weights, left next to nothing in them: then their
    absence is no loss."""
    moved = left = 0
    for place, _, now in _sums(kept):
        if place in before:
            update = now - before[place]
            moved += int(update.count_nonzero())
            left += int(leaves_residual(update, before[place]).sum())
    return left < _FEWEST_LEFT * moved


def _absent_beside_weights(kept: _Kept) -> Iterator[tuple[Tensor, str]]:
    """16-bit weights, with the parts that their optimizer should keep beside them and now lacks."""
    for entry, state, intent in kept:
        own = intent.composition
        key = None if own is OURS else own.master or own.residual
        if key is not None and key not in state and entry.parameter.dtype.itemsize < 4:
            yield entry.parameter, key


def _just_converted(optimizer: Optimizer, entry: WatchedParameter, taken: int | None) -> bool:
    """Whether our optimizer has taken no step since it began to keep the part beside the weight."""
    group = optimizer.param_groups[entry.group]
    began = group.get(RESIDUALS_FROM)
    steps = (taken or 0) - int(began or 0)
    return isinstance(optimizer, CollageOptimizer) and began is not None and steps < _FEWEST_STEPS


def _holding(kept: _Kept, holds: Callable[[Tensor, Tensor], bool]) -> dict[str, bool]:
    """Whether each moving average holds something in any layer, by `holds(average, weight)`. Averages of very few
    elements are left out: their zeros prove nothing."""
    found: dict[str, bool] = {}
    sampled: dict[str, int] = {}
    settled: set[object] = set()
    for entry, state, intent in kept:
        # Once an average is not 0, it is not checked again in states like this one.
        if (alike := (entry.group, *state)) in settled:
            continue
        names, weight = [], local_part(entry.parameter)
        for name, tensors in _averages(entry, state, intent):
            names.append(name)
            if not found.get(name, False):
                found[name] = any(holds(tensor, weight) for tensor in tensors)
                sampled[name] = sampled.get(name, 0) + min(tensors[0].numel(), _SAMPLED)
        if all(found[name] for name in names):
            settled.add(alike)
    return {name: held for name, held in found.items() if held or sampled[name] >= _FEWEST}


def _has_history(kept: _Kept, taken: int | None) -> bool:
    """Whether steps were taken before: by the count, or without one by averages that hold what steps leave."""
    if taken is not None:
        return taken >= _FEWEST_STEPS
    return any(
        _left_by_steps(tensor, local_part(entry.parameter))
        for entry, state, intent in kept
        for _, tensors in _averages(entry, state, intent)
        for tensor in tensors
    )


def _averages(
    entry: WatchedParameter, state: Mapping[str, Any], intent: Intent
) -> Iterator[tuple[str, list[Tensor]]]:
    """The name of each moving average of a parameter, and its tensors."""
    keys = tuple(elementwise_state(entry.parameter, state))
    for name in average_names(keys, intent.composition):
        tensors = [local_part(state[key]) for key in components(name, keys, intent.composition)]
        if not any(map(is_quantised, tensors)):
            yield name, tensors


def _is_zero(tensor: Tensor) -> bool:
    """Whether the sampled elements are all 0."""
    sampled = _sample(tensor)
    signed = _SIGNED.get(sampled.dtype)
    return not bool((sampled if signed is None else sampled.view(signed)).count_nonzero())


def _is_filled(average: Tensor, weight: Tensor) -> bool:
    return not _is_zero(average)


def _left_by_steps(average: Tensor, weight: Tensor) -> bool:
    """Whether only steps can have left the sampled elements. An optimizer that is built may fill a state with one
    value or with the weight, or draw a mask."""
    held, shown = _sample(average), _sample(weight)
    if not held.is_floating_point():
        return False
    narrower = min(held.dtype, shown.dtype, key=lambda dtype: dtype.itemsize)
    varies = bool((held.double() != held[:1].double()).any())
    return varies and not torch.equal(held.to(narrower).double(), shown.to(narrower).double())


def _sample(tensor: Tensor) -> Tensor:
    """Elements at equal distances, at most _SAMPLED."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(-(-flat.numel() // _SAMPLED), 1)]
