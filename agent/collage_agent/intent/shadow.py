"""The shadow step: a clone of the user's optimizer steps gathered samples in fp64 and so gives u."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Final

from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.clone import clone_group, clone_optimizer, clone_value, undecorated_step

__all__ = ["Shadow"]

_SETTINGS: Final = frozenset({"defaults", "state", "param_groups"})


class Shadow:
    """u of any elementwise optimizer, bit-equal to a full fp64 re-run of the step from the same stored state."""

    kind: Final = "shadow"

    def __init__(self, optimizer: Optimizer) -> None:
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
            self._running = {name: clone_value(vars(optimizer).get(name)) for name in self._running}

    def step(self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        """Step `parameter` [n] fp64 in place.

        `group` is a live parameter group and only read. `state` holds what the optimizer keeps for one parameter:
        fp64 tensors [n] and its scalars; empty for a first step. It is advanced in place, new keys included.
        Runs inside `isolated`. Synchronises only if the optimizer's own step does.
        """
        own = clone_group(group, type(self._clone), parameter.device)
        own["params"] = [parameter]
        self._clone.param_groups = [own]
        self._clone.state = defaultdict(dict)
        if state:
            self._clone.state[parameter] = state
        parameter.grad = gradient
        if self._running:
            vars(self._clone).update(clone_value(self._running))
        try:
            self._step(self._clone)
            stepped = self._clone.state[parameter]
            if stepped is not state:
                state.update(stepped)
        finally:
            parameter.grad = None
            self._clone.param_groups = []
            self._clone.state = defaultdict(dict)

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


def _may_run(value: object) -> bool:
    """Whether an instance's attribute can be something that a step counts up or averages."""
    return isinstance(value, Tensor | float | list | dict | deque) or (
        isinstance(value, int) and not isinstance(value, bool)
    )
