"""u of optimizers that step tensors independently of each other, but not elements: from whole tensors in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.before_after import BeforeAfter
from collage_agent.intent.clone import clone_value
from collage_agent.intent.shadow import Shadow
from collage_agent.intent.widen import widened
from collage_agent.sample import stored
from collage_agent.sample.gather import BlockLayout, Staging
from collage_agent.sample.quantised import reading

__all__ = ["WholeTensorStep", "WholeTensor"]


class WholeTensor(BeforeAfter):
    """Before and after alone on a sample; a tensor whose turn it is in the rotation has u from `shadow`."""

    def __init__(self, shadow: Shadow, reason: str) -> None:
        super().__init__(reason, shadow.composition, shadow.stochastic, shadow.unexplained)
        self.shadow = shadow


class WholeTensorStep:
    """u of a tensor at one step: `clone_inputs` before it, `step_clones` and `displacement` after it."""

    kind: Final = "whole-tensor"

    def __init__(self, whole: WholeTensor, parameter: Tensor) -> None:
        self.composition = whole.composition
        self.stochastic = whole.stochastic
        self.unexplained = whole.unexplained
        self._shadow = whole.shadow
        self._parameter = parameter
        self._group: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._weight = self._gradient = parameter
        self._flat: dict[str, Tensor] = {}
        self._position = 0

    def refresh(self, optimizer: Optimizer) -> None:
        """Take over what the live instance keeps on itself, before its step."""
        self._shadow.refresh(optimizer)

    def clone_inputs(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Clone weight, gradient, state and the group's numbers before the live step. Synchronises nothing."""
        parameter, composition = self._parameter, self.composition
        gradient = composition.gradient_of(parameter)
        assert gradient is not None
        elementwise = stored.elementwise_state(parameter, state)
        self._group = {key: clone_value(value) for key, value in group.items() if key != "params"}
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
        self._flat = {
            key: _in_layout(value, layout)
            for key, value in stored.elementwise_state(moved, state).items()
            if value.is_floating_point()
        }
        self._flat[stored.PARAMETER] = _in_layout(moved.sub_(self._weight), layout)
        self._position = 0

    def displacement(
        self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor, out: Tensor
    ) -> bool:
        """Write u of the next `len(out)` slots to `out`, and the stepped states of these to `state`. True."""
        slots = slice(self._position, self._position + out.numel())
        self._position = slots.stop
        for key, values in self._flat.items():
            if key in state:
                state[key] = values[slots]
        out.copy_(self._flat[stored.PARAMETER][slots])
        return True

    def release_clones(self) -> None:
        """Release the clones; the next `clone_inputs` makes new ones."""
        self._weight = self._gradient = self._parameter
        self._state, self._flat = {}, {}


def _in_layout(tensor: Tensor, layout: BlockLayout) -> Tensor:
    staging = Staging(layout, torch.float64)
    layout.gather([tensor.double()], staging, lasting=False)
    return staging.values
