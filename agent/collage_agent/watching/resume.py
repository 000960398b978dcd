"""What an optimizer brought along to a launch: whether what it keeps beside its weights came through the resume.

Looked at once around the first measured step of a launch, and again after states were loaded in the middle of one.
A sample of each tensor is read before the step, and the counters after it: a device is waited for then, and at no
other step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from collage_optim import RESIDUALS_FROM, CollageOptimizer
from collage_optim.names import dtype_name
from collage_optim.stepping import local_part
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.choose import Intent
from collage_agent.sample.quantised import is_quantised
from collage_agent.sample.stored import OURS, average_names, components, elementwise_state
from collage_agent.training.parameters import WatchedParameter
from collage_monitor import wire

__all__ = ["ResumeCheck", "largest_step_count"]

_SIGNED: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""What torch counts in, for what it cannot count in."""
_SAMPLED: Final = 4096
"""Elements of each tensor."""
_FEWEST: Final = 64
"""Elements that speak for the whole."""
_FEWEST_STEPS: Final = 2
"""A first step at rate 0 leaves nothing beside a weight."""


def largest_step_count(optimizer: Optimizer) -> int | None:
    """The largest count of steps in the optimizer's states and groups; 0: none was taken, None: it keeps no count.

    Synchronises, once, a device on which counts are kept: all of them are read together.
    """
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping) and state]
    counts = [state["step"] for state in states if "step" in state]
    counts += [group["step"] for group in optimizer.param_groups if "step" in group]
    if not counts and getattr(optimizer, "defaults", {}).get("k", 0) == 0:
        # Schedule-free optimizers and D-Adaptation count in a group's `k`, from 0; Ranger's `k` is a period.
        counts = [group["k"] for group in optimizer.param_groups if "k" in group]
    tensors = [count.max() for count in counts if isinstance(count, Tensor)]
    known = [int(count) for count in counts if not isinstance(count, Tensor)]
    if tensors:
        device = tensors[0].device
        known.append(int(torch.stack([count.to(device, torch.float64) for count in tensors]).max()))
    return max(known) if known else None if states else 0


class ResumeCheck:
    """`losses`: what was lost, in the order in which it was found, each kind once."""

    def __init__(self) -> None:
        self.losses: list[wire.ResumeLoss] = []
        self._counted: list[float] | None = None
        self._absent: list[tuple[Tensor, str]] = []

    def before(
        self, optimizer: Optimizer, watched: Sequence[WatchedParameter], intents: Sequence[Intent], step: int
    ) -> None:
        """The first step of a launch is about to be taken. Synchronises the device."""
        kept = [
            (entry, state, intents[entry.group])
            for entry in watched
            if (state := optimizer.state.get(entry.parameter)) and entry.stepped
        ]
        counters = _counters(optimizer)
        self._counted = [float(value) for value in counters]
        taken = max(self._counted, default=None)
        found = {
            **_in_narrow_counters(counters),
            **_beside_weights(optimizer, kept, taken),
            **_in_averages(kept, taken),
        }
        if "masters" not in found and "residuals" not in found and _has_history(kept, taken):
            self._absent = list(_absent_beside_weights(kept))
        for kind, (text, lasting) in found.items():
            self._note(kind, text, step, lasting=lasting)

    def after(self, optimizer: Optimizer, step: int) -> None:
        """It has been taken. Synchronises the device."""
        before, self._counted = self._counted, None
        now = [float(value) for value in _counters(optimizer)]
        if before and len(now) == len(before) and max(now) <= max(before) and max(before) > 0:
            text = f"the step counter stands at {max(before):,.0f} before a step and after it"
            self._note("counter", text, step, lasting=True)
        absent, self._absent = self._absent, []
        made = [key for parameter, key in absent if key in optimizer.state.get(parameter, {})]
        if made and len(made) == len(absent):
            text = (
                f"what stands beside the 16-bit weights ({' and '.join(dict.fromkeys(made))}) was made anew in the "
                "first step of this launch, beside averages of earlier steps: what it had held is gone"
            )
            self._note("masters", text, step, lasting=False)

    def _note(self, kind: LossKind, text: str, step: int, *, lasting: bool) -> None:
        if all(loss.kind != kind for loss in self.losses):
            self.losses.append(wire.ResumeLoss(kind=kind, text=text, step=step, lasting=lasting))


_Kept = Sequence[tuple[WatchedParameter, Mapping[str, Any], Intent]]
LossKind = Literal["masters", "residuals", "averages", "count", "counter"]
_Found = dict[LossKind, tuple[str, bool]]
"""What was lost: the sentence, and whether it goes on."""


def _counters(optimizer: Optimizer) -> list[Any]:
    """All counts of steps, in states and groups, as they are kept."""
    states = (state for state in optimizer.state.values() if isinstance(state, Mapping))
    holders: Iterator[Mapping[str, Any]] = (*states, *optimizer.param_groups)  # type: ignore[assignment]
    return [holder["step"] for holder in holders if isinstance(holder.get("step"), int | float | Tensor)]


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


def _beside_weights(optimizer: Optimizer, kept: _Kept, taken: float | None) -> _Found:
    """Master weights that hold nothing but the weight, and residuals that are 0, though steps were taken."""
    masters: list[bool] = []
    residuals: list[bool] = []
    sampled = 0
    names: dict[str, None] = {}
    for entry, state, intent in kept:
        own, weight = intent.composition, local_part(entry.parameter.detach())
        if weight.dtype.itemsize >= 4 or (own is OURS and _just_converted(optimizer, entry, taken)):
            continue
        master, residual = (state.get(key) if key else None for key in (own.master, own.residual))
        if isinstance(master, Tensor) and local_part(master).dtype.itemsize >= 4:
            held, shown = _sample(local_part(master)), _sample(weight)
            masters.append(torch.equal(held, shown.to(held.dtype)))
            names[str(own.master)] = None
        elif isinstance(residual, Tensor) and not is_quantised(local_part(residual)):
            residuals.append(_is_zero(local_part(residual)))
            names[str(own.residual)] = None
        else:
            continue
        sampled += min(weight.numel(), _SAMPLED)
    if sampled < _FEWEST or not _has_history(kept, taken):
        return {}
    named, steps = " and ".join(names), "" if not taken else f", {taken:,.0f} steps into the training"
    if masters and all(masters) and not residuals:
        text = (
            f"every master weight ({named}) equalled its 16-bit weight before the first step of this launch"
            f"{steps}: what they held below is gone"
        )
        return {"masters": (text, False)}
    if residuals and all(residuals) and not masters:
        text = f"every residual ({named}) was 0 before the first step of this launch{steps}: what they held is gone"
        return {"residuals": (text, False)}
    return {}


def _absent_beside_weights(kept: _Kept) -> Iterator[tuple[Tensor, str]]:
    """16-bit weights, and what their optimizer is known to keep beside them and does not hold now."""
    for entry, state, intent in kept:
        own = intent.composition
        key = own.master or own.residual
        if own is not OURS and key is not None and key not in state and entry.parameter.dtype.itemsize < 4:
            yield entry.parameter, key


def _just_converted(optimizer: Optimizer, entry: WatchedParameter, taken: float | None) -> bool:
    """Whether our optimizer has taken no step since it began to keep what stands beside the weight."""
    group = optimizer.param_groups[entry.group]
    began = group.get(RESIDUALS_FROM)
    steps = (taken or 0) - int(began or 0)
    return isinstance(optimizer, CollageOptimizer) and began is not None and steps < _FEWEST_STEPS


def _in_averages(kept: _Kept, taken: float | None) -> _Found:
    """Moving averages that are 0 everywhere though steps are counted, and counts of 0 beside averages."""
    zero: dict[str, bool] = {}
    sampled: dict[str, int] = {}
    for entry, state, intent in kept:
        for name, tensors in _averages(entry, state, intent):
            zero[name] = zero.get(name, True) and all(map(_is_zero, tensors))
            sampled[name] = sampled.get(name, 0) + min(tensors[0].numel(), _SAMPLED)
    known = {name: empty for name, empty in zero.items() if sampled[name] >= _FEWEST}
    gone = [name for name, empty in known.items() if empty]
    if gone and taken is not None and taken >= _FEWEST_STEPS:
        text = (
            f"{' and '.join(gone)} {'was' if len(gone) == 1 else 'were'} 0 everywhere before the first step of "
            f"this launch, though {taken:,.0f} steps are counted"
        )
        return {"averages": (text, False)}
    if taken == 0 and known and not all(known.values()):
        held = " and ".join(name for name, empty in known.items() if not empty)
        text = f"steps are counted from 0 again, though {held} came along: bias is corrected for as if it had not"
        return {"count": (text, False)}
    return {}


def _has_history(kept: _Kept, taken: float | None) -> bool:
    """Whether steps were taken before: by the count, or where none is kept by averages that hold something."""
    if taken is not None:
        return taken >= _FEWEST_STEPS
    return any(
        not _is_zero(tensor)
        for entry, state, intent in kept
        for _, tensors in _averages(entry, state, intent)
        for tensor in tensors
    )


def _averages(
    entry: WatchedParameter, state: Mapping[str, Any], intent: Intent
) -> Iterator[tuple[str, list[Tensor]]]:
    """The name of each moving average of a parameter, and what it is kept in."""
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


def _sample(tensor: Tensor) -> Tensor:
    """Elements at equal distances, at most _SAMPLED."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(-(-flat.numel() // _SAMPLED), 1)]
