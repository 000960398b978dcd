"""The first half of a measured step: θ, g and u of gathered slots, from what was known before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collage_agent.intent.choose import Intent
from collage_agent.intent.clone import clone_value
from collage_agent.sample import stored

__all__ = ["IntendedUpdate", "StepInputs", "Values", "Workspace", "add_up"]

Values = Mapping[str, Tensor]


class Workspace:
    """Large fp64 buffers that each run of slots writes over: a fresh one costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def buffer(self, name: str, device: torch.device, *shape: int) -> Tensor:
        """fp64 of this shape, with whatever was left in it; valid until the name is asked for again."""
        elements = math.prod(shape)
        known = self._buffers.get((name, device))
        if known is None or known.numel() < elements:
            known = self._buffers[name, device] = torch.empty(elements, dtype=torch.float64, device=device)
        return known[:elements].view(shape)


@dataclass(frozen=True)
class StepInputs:
    """A run of gathered slots before the live step: values by key, in their stored dtypes.

    `group` and `scalars` are what the optimizer held; `decay` is lr·λ where it decays weights apart from the
    gradient; `scale` is what gradients are to be divided by; in `workspace` the work is done, until the next one's.
    """

    before: Values
    group: dict[str, Any]
    scalars: dict[str, Any]
    decay: float | Tensor | None
    intent: Intent
    scale: Tensor | None
    workspace: Workspace


class IntendedUpdate:
    """u, and the moving averages before the step and after it in exact arithmetic. Synchronises nothing.

    Fills θ, g and u: fp64 [slots]. `averages` are the names of the rows of `states` fp64 [3, averages, slots]: |s|
    before the step, s after it, and room for s as stored after it. `known`: there is a u; without, it is 0.
    """

    def __init__(self, seen: StepInputs, parameter: Tensor, gradient: Tensor, intended: Tensor) -> None:
        kept, before = seen.intent.kept, seen.before
        add_up(before, stored.stored_parameter(before, kept), parameter)
        _fill_gradient(seen, gradient)
        names = stored.average_names(before, kept)
        self.averages = [name for name in names if before[name].is_floating_point()]
        slots = parameter.numel()
        self.states = seen.workspace.buffer("states", parameter.device, 3, len(self.averages), slots)
        self.known = self._intend(seen, parameter, gradient, intended)

    def _intend(self, seen: StepInputs, parameter: Tensor, gradient: Tensor, intended: Tensor) -> bool:
        kept = seen.intent.kept
        state: dict[str, Any] = clone_value(seen.scalars)
        for name in stored.average_names(seen.before, kept):
            if not seen.before[name].is_floating_point():
                state[name] = seen.before[name].clone()
        for index, name in enumerate(self.averages):
            state[name] = add_up(seen.before, stored.components(name, seen.before, kept), self.states[1, index])
        torch.abs(self.states[1], out=self.states[0])
        if not seen.intent.displacement(seen.group, state, parameter, gradient, intended):
            intended.zero_()
            return False
        for index, name in enumerate(self.averages):
            if state[name].data_ptr() != self.states[1, index].data_ptr():
                self.states[1, index].copy_(state[name])
        return True


def _fill_gradient(seen: StepInputs, target: Tensor) -> None:
    gradient = seen.before.get(stored.GRADIENT)
    if gradient is None:
        target.zero_()
        return
    target.copy_(gradient)
    if seen.scale is not None:
        target.div_(seen.scale)


def add_up(values: Values, keys: list[str], target: Tensor) -> Tensor:
    """The sum of the values under `keys`, written to `target` and returned."""
    target.copy_(values[keys[0]])
    for key in keys[1:]:
        target.add_(values[key])
    return target
