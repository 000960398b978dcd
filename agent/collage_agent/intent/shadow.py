"""The shadow step: a clone of the user's optimizer steps gathered samples in fp64 and so gives u.

It is used only for an optimizer that has passed the self-test. Tolerances are those of `selftest.py`; that u is
exact is tested against fp64 references in `tests/agent/intent/`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.optimizer_clone import (
    clone_group,
    clone_optimizer,
    clone_value,
    uncompiled,
    undecorated_step,
    without_output,
)
from collage_agent.intent.widening import Widening, widened
from collage_agent.sample.state_mappings import flat_state, nested_state
from collage_agent.sample.stored_parts import PLAIN, Composition

__all__ = ["Shadow"]

_SETTINGS: Final = frozenset({"defaults", "state", "param_groups"})


class Shadow:
    """u of any elementwise optimizer, bit-equal to a full fp64 re-run of the step from the same stored state."""

    kind: Final = "shadow"

    def __init__(
        self,
        optimizer: Optimizer,
        composition: Composition = PLAIN,
        *,
        widens: bool = False,
        stochastic: bool | None = None,
        unexplained: str | None = None,
    ) -> None:
        """widens: the optimizer's own code casts down, which its clone must not."""
        self.composition = composition
        self.stochastic = stochastic
        self.unexplained = unexplained
        self.is_verbose = False
        """Whether its step prints or logs, which at measured steps would be once too often."""
        self._widens = widens
        self._foreign = not type(optimizer).__module__.startswith("torch.optim")
        self._shared: dict[str, Any] = {}
        self._weights = frozenset((composition.residual, composition.master)) - {None}
        self._clone = clone_optimizer(optimizer)
        self._step = undecorated_step(optimizer)
        self._running = {
            name: value
            for name, value in vars(self._clone).items()
            if name not in _SETTINGS and not name.endswith("_hooks") and _may_run(value)
        }

    def refresh(self, optimizer: Optimizer) -> None:
        """Take over the numbers that the live instance keeps on itself, before it takes its next step."""
        if self._running:
            self._running = {name: clone_value(vars(optimizer).get(name), objects=False) for name in self._running}
        if self._foreign:
            # Some keep a counter for all tensors under a name of its own in the state.
            entries: dict[Any, Any] = optimizer.state
            self._shared = {key: clone_value(value) for key, value in entries.items() if isinstance(key, str)}

    def step(
        self,
        group: dict[str, Any],
        state: dict[str, Any],
        parameter: Tensor,
        gradient: Tensor,
        native: torch.dtype | None = None,
    ) -> None:
        """Step `parameter` [n] fp64 in place; `native`: the dtype of the live gradient, if that matters.

        `group` is a live parameter group and only read. `state` holds what the optimizer keeps for one parameter:
        fp64 tensors [n] and its scalars; empty for a first step. It is advanced in place, new keys included.
        Runs inside `isolated`. Synchronises only if the optimizer's own step does.
        """
        own = clone_group(group, type(self._clone), parameter.device)
        if self._widens:
            own, state_before = widened(own), widened(state)
        else:
            state_before = dict(state)
        own["params"] = [parameter]
        self._clone.param_groups = [own]
        self._clone.state = defaultdict(dict)
        for key, value in self._shared.items():
            vars(self._clone)["state"][key] = clone_value(value)
        if state_before:
            # Settings that are kept there, as gradient release has them, are none of a step's.
            is_made = "step" in state_before or any(_is_like(value, parameter) for value in state_before.values())
            with_weights = self._with_weights(state_before, parameter) if is_made else state_before
            self._clone.state[parameter] = nested_state(with_weights) if self._foreign else with_weights
        self._give(parameter, gradient)
        if self._running:
            running = clone_value(self._running, objects=False)
            vars(self._clone).update(widened(running) if self._widens else running)
        try:
            quiet = without_output() if self.is_verbose else nullcontext()
            with (
                quiet,
                uncompiled(type(self._clone)) if self._foreign else nullcontext(),
                Widening(native) if self._widens or native else nullcontext(),
            ):
                self._step(self._clone)
            kept = self._clone.state
            stepped = flat_state(kept, [parameter], 0) if self._foreign else kept[parameter]
            state.update({key: value for key, value in stepped.items() if key not in self._weights})
        finally:
            self._give(parameter, None)
            self._clone.param_groups = []
            self._clone.state = defaultdict(dict)

    def _give(self, parameter: Tensor, gradient: Tensor | None) -> None:
        composition = self.composition
        if composition.sparse:
            composition.give(parameter, gradient)
        else:
            setattr(parameter, composition.gradient, gradient)

    def _with_weights(self, state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """The state with a residual of 0 and a master weight of its own: `parameter` is all that is stored."""
        if self.composition.residual is not None:
            kind = parameter.dtype if self.composition.code is None else self.composition.counts
            state[self.composition.residual] = torch.zeros_like(parameter, dtype=kind)
        if self.composition.master is not None:
            state[self.composition.master] = parameter.clone()
        return state

    def displacement(
        self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor, out: Tensor
    ) -> bool:
        """Write u [n] fp64 of the step to `out`; `parameter` is left as it was, `state` advanced (see `step`).

        True: there is a u.
        """
        out.copy_(parameter)
        self.step(group, state, out, gradient)
        out.sub_(parameter)
        return True


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _may_run(value: object) -> bool:
    """Whether a step may count up or average this attribute of an instance."""
    return isinstance(value, Tensor | float | list | dict | deque) or (
        isinstance(value, int) and not isinstance(value, bool)
    )
