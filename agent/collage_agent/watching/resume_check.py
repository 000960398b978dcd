"""Checks whether weights and states fit together as a launch begins, and whether they survived the resume.

Checked once around the first measured step of a launch, and again after states are loaded later. It reads samples
before the step and some counters after it: this is the only step that waits for a device. It reports no lost
states if nothing was loaded. Zeros are a loss only if the step fills them, a count of 0 only beside averages that
nothing but steps fills. So it suspects before the step, and reports after it. Of intact states it reads the first
tensors, and a few numbers of the others; only empty states are read to their end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from collage_agent.sample.state_mappings import counts_to, state_of, states_of, step_of
from collage_agent.sample.stored_parts import OURS, leaves_residual
from collage_agent.training.watched_parameters import WatchedParameter
from collage_agent.watching.kept_states import (
    SAMPLED,
    KeptStates,
    averages_of,
    glance,
    places_alike,
    sample,
    weights_were_rounded,
)
from collage_monitor import wire
from collage_monitor.diagnosis import launch

__all__ = ["ResumeCheck", "largest_step_count"]

_SIGNED: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""What torch counts in, for what it cannot count in."""
_FEWEST: Final = 64
"""Elements that speak for the whole."""
_FEWEST_LEFT: Final = 0.1
"""Of the elements that moved. fp32 arithmetic itself leaves a last bit beside a few."""
_SOME_COUNTERS: Final = 64
_FEWEST_STEPS: Final = 2
"""A first step at rate 0 leaves nothing beside a weight."""
_GAPS_APART: Final = 2
"""A weight that is rounded at random, or cut off, stands within a gap of its master weight."""
_SHARE_APART: Final = 0.1
_JUMP: Final = 2.0
"""So many times what the master weights moved: then the step did more than take a step."""
_SHARE_FILLED: Final = 0.5


def largest_step_count(optimizer: Optimizer) -> int | None:
    """The largest count of steps in the optimizer's states and groups; 0: none was taken, None: it keeps no count.

    Synchronises, once, a device on which counts are kept: all of them are read together.
    """
    return _largest_of(optimizer, _counters(optimizer))


def _largest_of(optimizer: Optimizer, counts: Sequence[Any]) -> int | None:
    begins = getattr(optimizer, "defaults", {})
    if not counts and begins.get("k", 0) == 0:
        # Schedule-free optimizers and D-Adaptation count in a group's `k`, from 0; Ranger's `k` is a period.
        counts = [group["k"] for group in optimizer.param_groups if "k" in group]
    if counts:
        return int(_largest(counts) - begins.get("step", 0))  # Prodigy's (pytorch_optimizer) begins at 1.
    return None if any(optimizer.state.values()) else 0


def _counters(optimizer: Optimizer, alone: Sequence[WatchedParameter] = ()) -> list[Any]:
    """All counts of steps, in states and groups, as they are kept; none of parameters on the meta device. Or those
    of a parameter that is stepped alone."""
    if alone:
        return [count for own in alone if (count := step_of(state_of(optimizer, own.parameter))) is not None]
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
    """`losses`: in the order of discovery, each kind once. `doubts`: what may be one. `note`: a sentence, or ""."""

    def __init__(self, *, alone: bool = False) -> None:
        """alone: one parameter is looked at; the counts of others, stepped at other times, tell nothing of it."""
        self._alone = alone
        self.losses, self.doubts = list[wire.ResumeLoss](), list[wire.ResumeLoss]()
        self._taken: int | None = None
        self._some: list[float] = []
        self._absent: list[tuple[Tensor, str]] = []
        self._empty: list[str] = []
        self._came_along: list[str] = []
        self._suspected: _Found = {}
        self._weights: dict[int, Tensor] = {}
        self.note = ""
        self._told: int | None = None
        self._without: list[WatchedParameter] = []
        self._apart: list[_Apart] = []
        self._empty_layers: list[_EmptyAverage] = []
        self._counted_empty = False

    def before(
        self,
        optimizer: Optimizer,
        watched: Sequence[WatchedParameter],
        intents: Sequence[Intent],
        step: int,
        told: int | None = None,
    ) -> None:
        """The first step of a launch is about to be taken; told: its number, if the user has passed it.

        Synchronises the device.
        """
        kept, counters = KeptStates(optimizer, watched, intents), self._counters(optimizer, watched)
        taken = self._taken = _largest_of(optimizer, counters)
        self._some = list(map(_of_count, _spread(counters)))
        self._look_at_averages(kept)
        self._counted_empty = taken == 1 and not any(_holding(kept, _is_filled).values())
        goes_on = told == step > _FEWEST_STEPS
        self._told = told if goes_on and taken == 0 and not any(_holding(kept, _is_filled).values()) else None
        if _has_history(kept, taken):
            self._suspected = _beside_weights(optimizer, kept, taken)
            self._weights = {place: shown.clone() for place, shown, _ in _sums(kept)} if self._suspected else {}
            self._absent = [] if self._suspected else list(_absent_beside_weights(kept))
            held = states_of(optimizer)
            self._without = [own for own in watched if own.stepped and not held(own.parameter, {})]
            self._empty_layers = [own for own in _empty_in_layers(kept) if own.name not in self._empty]
            if (dtype := weights_were_rounded(kept)) is not None:
                self.doubts.append(launch.weights_are_narrow(dtype_name(dtype), taken, step))
        self._apart = list(_apart_from_masters(kept))
        self._note(*_in_narrow_counters(counters, step))

    def _look_at_averages(self, kept: KeptStates) -> None:
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
        kept = KeptStates(optimizer, watched, intents)
        suspected, self._suspected, weights, self._weights = self._suspected, {}, self._weights, {}
        if suspected and not _leaves_nothing(weights, kept):
            for kind, names in suspected.items():
                self._note(launch.nothing_beside_weights(kind, names, self._taken, step))
        self._note_averages(optimizer, kept, step)
        if self._told is not None and (
            names := [name for name, held in _holding(kept, _is_filled).items() if held]
        ):
            self._note(launch.states_missing(self._told, names, step))
        self._note_layers(optimizer, step)
        without, self._without = self._without, []
        made = [own.name for own in without if state_of(optimizer, own.parameter)]
        if made and self._taken:
            self.doubts.append(launch.begins_beside_others(made, self._taken, step))
        if self._counted_empty and any(_holding(kept, _is_filled).values()):
            self.note = launch.empty_step_counted()
        if self._taken and self._stands_still(optimizer, kept.watched):
            self._note(launch.counter_stands(self._taken, step))
        self._note(*_in_narrow_counters(self._counters(optimizer, watched), step))
        absent, self._absent = self._absent, []
        names = [key for parameter, key in absent if key in state_of(optimizer, parameter)]
        if names and len(names) == len(absent):
            self._note(launch.masters_made_anew(dict.fromkeys(names), step))

    def _note_averages(self, optimizer: Optimizer, kept: KeptStates, step: int) -> None:
        """Notes the suspected losses, except of averages that this step leaves at 0: nothing fills them."""
        empty, self._empty, came_along, self._came_along = self._empty, [], self._came_along, []
        if empty and not _was_skipped(optimizer):
            filled = _holding(kept, _is_filled)
            empty = [name for name in empty if filled.get(name, False)]
        if came_along:
            # If another average begins at 0, nothing was loaded; a counter that stays 0 counts something else.
            if not empty and not self._stands_still(optimizer, kept.watched):
                self._note(launch.count_begins_again(came_along, step))
        elif empty:
            self._note(launch.averages_empty(empty, self._taken, step))

    def _note_layers(self, optimizer: Optimizer, step: int) -> None:
        """Notes layers whose master weights were those of other weights, or of which one average was empty."""
        apart, self._apart, empty, self._empty_layers = self._apart, [], self._empty_layers, []
        if _was_skipped(optimizer):
            return
        written = [own for own in apart if own.was_written_over(optimizer)]
        if written:
            moved, whole = (sum(squares) for squares in zip(*(own.moved() for own in written), strict=True))
            names = [own.entry.name for own in written]
            self._note(launch.masters_are_others(names, (moved / whole) ** 0.5 if whole else math.inf, step))
        filled = [own for own in empty if own.was_filled(optimizer)]
        if filled:
            names = list(dict.fromkeys(own.entry.name for own in filled))
            self._note(launch.layers_empty(filled[0].name, filled[0].beside, names, step))

    def _stands_still(self, optimizer: Optimizer, watched: Sequence[WatchedParameter]) -> bool:
        """Whether no counter has counted the step; False for one that was skipped."""
        if _was_skipped(optimizer):
            return False
        counters = self._counters(optimizer, watched)
        now = map(_of_count, _spread(counters))
        if any(after > before for before, after in zip(self._some, now, strict=False)):
            return False
        largest = _largest_of(optimizer, counters)
        return largest is not None and largest <= (self._taken or 0)

    def _counters(self, optimizer: Optimizer, watched: Sequence[WatchedParameter]) -> list[Any]:
        return _counters(optimizer, watched if self._alone else ())

    def _note(self, *found: wire.ResumeLoss) -> None:
        for loss in found:
            if all(known.kind != loss.kind for known in self.losses):
                self.losses.append(loss)


_Found = dict[wire.LossKind, Collection[str]]
"""What was lost, and the names of the states that held it."""


def _was_skipped(optimizer: Optimizer) -> bool:
    """Whether a loss scaler skipped the step. A fused optimizer is called for it, too."""
    return bool(getattr(optimizer, "found_inf", None))


def _spread(counters: Sequence[Any]) -> Sequence[Any]:
    """A few counters, evenly spread: layers without a gradient do not count."""
    return counters[:: max(-(-len(counters) // _SOME_COUNTERS), 1)]


def _of_count(count: Any) -> float:
    return float(count.max() if isinstance(count, Tensor) and count.dim() else count)


def _in_narrow_counters(counters: Sequence[Any], step: int) -> Iterator[wire.ResumeLoss]:
    """Counters in a dtype that cannot hold every count."""
    narrow = (own for own in counters if isinstance(own, Tensor) and own.dtype.itemsize < 4)
    if (counter := next(narrow, None)) is not None:
        yield launch.counter_is_narrow(dtype_name(counter.dtype), counts_to(counter) or 0, _of_count(counter), step)


def _beside_weights(optimizer: Optimizer, kept: KeptStates, taken: int | None) -> _Found:
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
            held, shown = sample(local_part(master)), sample(weight)
            if not torch.equal(held, shown.to(held.dtype)):
                return {}
            names.setdefault("masters", {})[str(own.master)] = None
        elif isinstance(residual, Tensor) and not is_quantised(local_part(residual)):
            if not _is_zero(local_part(residual)):
                return {}
            names.setdefault("residuals", {})[str(own.residual)] = None
        else:
            continue
        sampled += min(weight.numel(), SAMPLED)
    if sampled < _FEWEST or len(names) != 1:
        return {}
    return {**names}


def _sums(kept: KeptStates) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The identity and a sample of each 16-bit weight, and the same sample in fp64 with the part kept beside it."""
    for entry, state, intent in kept:
        own, weight = intent.composition, local_part(entry.parameter.detach())
        master, residual = (state.get(key) if key else None for key in (own.master, own.residual))
        if weight.dtype.itemsize >= 4:
            continue
        shown = sample(weight)
        if isinstance(master, Tensor):
            yield id(entry.parameter), shown, sample(local_part(master)).double()
        elif isinstance(residual, Tensor) and not is_quantised(local_part(residual)):
            beside = own.residual_of(shown, sample(local_part(residual)))
            yield id(entry.parameter), shown, shown.double().add_(beside)


def _leaves_nothing(before: Mapping[int, Tensor], kept: KeptStates) -> bool:
    """Whether the step, which began without parts beside the weights, left next to nothing in them: then their
    absence is no loss."""
    moved = left = 0
    for place, _, now in _sums(kept):
        if place in before:
            update = now - before[place]
            moved += int(update.count_nonzero())
            left += int(leaves_residual(update, before[place]).sum())
    return left < _FEWEST_LEFT * moved


def _absent_beside_weights(kept: KeptStates) -> Iterator[tuple[Tensor, str]]:
    """16-bit weights, with the parts that their optimizer should keep beside them and now lacks."""
    for entry, state, intent in kept:
        own = intent.composition
        key = None if own is OURS else own.master or own.residual
        if key is not None and key not in state and entry.parameter.dtype.itemsize < 4:
            yield entry.parameter, key


@dataclass(frozen=True)
class _Apart:
    """A 16-bit weight, and samples of it and of its master weight from which it differs, before a step."""

    entry: WatchedParameter
    key: str
    shown: Tensor
    master: Tensor

    def was_written_over(self, optimizer: Optimizer) -> bool:
        """Whether the step wrote the master weight over the weight, which jumped by more than the master moved."""
        held = state_of(optimizer, self.entry.parameter).get(self.key)
        if not isinstance(held, Tensor):
            return False
        now, master = self._now(), sample(local_part(held))
        apart = _is_apart(self.shown, self.master)
        jump, step = (now - self.shown.double())[apart], (master.double() - self.master.double())[apart]
        fits = not bool(_is_apart(now.to(self.shown.dtype), master).any())
        return fits and float(jump.square().sum()) > _JUMP**2 * float(step.square().sum())

    def moved(self) -> tuple[float, float]:
        """Estimates of ‖change‖² and ‖weight‖² of the whole tensor."""
        scale = local_part(self.entry.parameter).numel() / len(self.shown)
        change = self._now() - self.shown.double()
        return scale * float(change.square().sum()), scale * float(self.shown.double().square().sum())

    def _now(self) -> Tensor:
        return sample(local_part(self.entry.parameter)).double()


def _is_apart(shown: Tensor, master: Tensor) -> Tensor:
    """Which weights are not what rounding, of whatever kind, makes of their master weights: bool."""
    finest = torch.finfo(shown.dtype)
    weight, held = shown.double(), master.double()
    gap = torch.maximum(weight.abs(), held.abs()).mul_(finest.eps).clamp_(min=finest.smallest_normal * finest.eps)
    return (weight - held).abs() > _GAPS_APART * gap


def _apart_from_masters(kept: KeptStates) -> Iterator[_Apart]:
    """Weights that do not stand beside their master weights."""
    if all(intent.composition.master is None for intent in kept.intents):
        return
    found, glances = [], []
    for entry, state, intent in kept:
        weight, master = local_part(entry.parameter.detach()), state.get(intent.composition.master or "")
        if isinstance(master, Tensor) and weight.dtype.itemsize < local_part(master).dtype.itemsize:
            found.append((entry, str(intent.composition.master), weight, local_part(master)))
            glances.append((glance(weight), glance(master)))
    for places in places_alike(glances):
        shown, held = (torch.cat([glances[place][part] for place in places]) for part in (0, 1))
        sizes = [len(glances[place][0]) for place in places]
        flags = torch.split(_is_apart(shown, held).to(torch.float32), sizes)
        shares = torch.stack([own.mean() for own in flags]).tolist()
        for place, share in zip(places, shares, strict=True):
            if share >= _SHARE_APART:
                entry, key, weight, master = found[place]
                yield _Apart(entry, key, sample(weight).clone(), sample(master).clone())


@dataclass(frozen=True)
class _EmptyAverage:
    """An average that is 0 in the whole tensor, and another of the same weight that is not."""

    entry: WatchedParameter
    name: str
    beside: str

    def was_filled(self, optimizer: Optimizer) -> bool:
        """Whether the step filled it where the other one holds something."""
        state = state_of(optimizer, self.entry.parameter)
        if self.name not in state or self.beside not in state:
            return False
        held = sample(local_part(state[self.beside])).ne(0)
        return bool(sample(local_part(state[self.name]))[held].ne(0).double().mean() >= _SHARE_FILLED)


def _empty_in_layers(kept: KeptStates) -> Iterator[_EmptyAverage]:
    """Averages that hold nothing in single layers. float16 ones may be too small to be held."""
    wide = (torch.float32, torch.float64, torch.bfloat16)
    names: dict[object, list[str]] = {}
    owners: list[tuple[WatchedParameter, str]] = []
    glances: list[tuple[Tensor]] = []
    for entry, state, intent in kept:
        form = (entry.group, *state)
        if form not in names:
            names[form] = [name for name, tensors in averages_of(entry, state, intent) if tensors[0].dtype in wide]
        if len(names[form]) > 1 and entry.shard.elements:
            for name in names[form]:
                owners.append((entry, name))
                glances.append((glance(state[name]),))
    filled: dict[int, str] = {}
    empty = []
    for places in places_alike(glances):
        largest = torch.stack(torch._foreach_norm([glances[place][0] for place in places], math.inf)).tolist()
        for place, value in zip(places, largest, strict=True):
            entry, name = owners[place]
            if value:
                filled[id(entry.parameter)] = name
            else:
                empty.append((entry, name))
    for entry, name in empty:
        whole = local_part(state_of(kept.optimizer, entry.parameter)[name])
        if id(entry.parameter) in filled and whole.numel() and not whole.count_nonzero():
            yield _EmptyAverage(entry, name, filled[id(entry.parameter)])


def _just_converted(optimizer: Optimizer, entry: WatchedParameter, taken: int | None) -> bool:
    """Whether our optimizer has taken no step since it began to keep the part beside the weight."""
    group = optimizer.param_groups[entry.group]
    began = group.get(RESIDUALS_FROM)
    steps = (taken or 0) - int(began or 0)
    return isinstance(optimizer, CollageOptimizer) and began is not None and steps < _FEWEST_STEPS


def _holding(kept: KeptStates, holds: Callable[[Tensor, Tensor], bool]) -> dict[str, bool]:
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
        for name, tensors in averages_of(entry, state, intent):
            names.append(name)
            if not found.get(name, False):
                found[name] = any(holds(tensor, weight) for tensor in tensors)
                sampled[name] = sampled.get(name, 0) + min(tensors[0].numel(), SAMPLED)
        if all(found[name] for name in names):
            settled.add(alike)
    return {name: held for name, held in found.items() if held or sampled[name] >= _FEWEST}


def _has_history(kept: KeptStates, taken: int | None) -> bool:
    """Whether steps were taken before: by the count, or without one by averages that hold what steps leave."""
    if taken is not None:
        return taken >= _FEWEST_STEPS
    return any(
        _left_by_steps(tensor, local_part(entry.parameter))
        for entry, state, intent in kept
        for _, tensors in averages_of(entry, state, intent)
        for tensor in tensors
    )


def _is_zero(tensor: Tensor) -> bool:
    """Whether the sampled elements are all 0."""
    sampled = sample(tensor)
    signed = _SIGNED.get(sampled.dtype)
    return not bool((sampled if signed is None else sampled.view(signed)).count_nonzero())


def _is_filled(average: Tensor, weight: Tensor) -> bool:
    return not _is_zero(average)


def _left_by_steps(average: Tensor, weight: Tensor) -> bool:
    """Whether only steps can have left the sampled elements. An optimizer that is built may fill a state with one
    value or with the weight, or draw a mask."""
    held, shown = sample(average), sample(weight)
    if not held.is_floating_point():
        return False
    narrower = min(held.dtype, shown.dtype, key=lambda dtype: dtype.itemsize)
    varies = bool((held.double() != held[:1].double()).any())
    return varies and not torch.equal(held.to(narrower).double(), shown.to(narrower).double())
