"""The oracle: the shadow left running, with its own fp64 weights and states since attach, fed the same gradients.

It follows its own, smaller sample and needs that sample's gradient at every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collage_agent.intent.choose import Intent
from collage_agent.sample.gather import BlockLayout, Staging
from collage_agent.sample.sampling import TensorSample

__all__ = ["Oracle"]


class Oracle:
    """fp64 weights and states of sampled elements of tensors that are stepped in lock-step.

    `members` are indices of watched parameters, one sample each. `parameter`, `displacement` (of the last step)
    and `attached` (the weights at attach) are fp64 [slots] in the order of `layout`. Synchronises nothing.
    """

    def __init__(
        self,
        members: Sequence[int],
        samples: Sequence[TensorSample],
        layout: BlockLayout,
        parameter: Tensor,
        state: dict[str, Any],
    ) -> None:
        self.members = tuple(members)
        self.samples = tuple(samples)
        self.layout = layout
        self.parameter = parameter
        self.attached = parameter.clone()
        self.displacement = torch.zeros_like(parameter)
        self.steps = 0
        self._state = state
        self._gradient: Staging | None = None

    def gather(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sample of whole gradients, one a member: [slots], valid until the next call."""
        if self._gradient is None or self._gradient.values.dtype != gradients[0].dtype:
            self._gradient = Staging(self.layout, gradients[0].dtype)
        self.layout.gather(gradients, self._gradient, lasting=False)
        return self._gradient.values

    def step(
        self,
        intent: Intent,
        group: dict[str, Any],
        gradient: Tensor,
        scale: Tensor | None,
        skipped: Tensor | None,
    ) -> None:
        """Take the step that the live optimizer is about to take. Runs inside `isolated`.

        gradient: [slots], in its own dtype; `scale`: what it is to be divided by; `skipped`: one element, 1 where
        the loss scaler skips this step, in which case nothing moves.
        """
        gradient = gradient.to(torch.float64)
        if scale is not None:
            gradient.div_(scale)
        before = None if skipped is None else _copied(self._state)
        intent.displacement(group, self._state, self.parameter, gradient, self.displacement)
        if skipped is not None and before is not None:
            self._take_back(before, skipped)
        self.parameter.add_(self.displacement)
        self.steps += 1

    def split(self, members: Sequence[int], parameters: Mapping[int, Tensor]) -> Oracle:
        """The part of this oracle that follows `members` only, to go its own way from here."""
        chosen = [self.members.index(member) for member in members]
        samples = [self.samples[index] for index in chosen]
        layout = BlockLayout(samples, [parameters[member] for member in members])
        blocks = torch.from_numpy(self.layout.positions_of(layout, chosen)).to(self.layout.device)

        def part(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape == self.parameter.shape:
                return value.view(-1, self.layout.block).index_select(0, blocks).view(-1)
            return value.clone() if isinstance(value, Tensor) else value

        other = Oracle(members, samples, layout, part(self.parameter), {k: part(v) for k, v in self._state.items()})
        other.attached = part(self.attached)
        other.displacement = part(self.displacement)
        other.steps = self.steps
        return other

    def _take_back(self, before: dict[str, Any], skipped: Tensor) -> None:
        skip = skipped.reshape(()).ne(0)
        self.displacement = torch.where(skip, torch.zeros_like(self.displacement), self.displacement)
        for key, new in self._state.items():
            if isinstance(new, Tensor):
                old = before.get(key, torch.zeros_like(new))
                self._state[key] = torch.where(skip.to(new.device), old, new)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
