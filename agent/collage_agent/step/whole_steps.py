"""Steps whose u is known only for whole tensors, read slot by slot like any other.

The clones of `rotation.py` and the copies of `intent/whole_optimizer.py` take such steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.before_after import BeforeAfter
from collage_agent.intent.whole_optimizer import WholeOptimizer
from collage_agent.sample import stored_parts
from collage_agent.sample.sampling import TensorSample
from collage_agent.step.bucket import Bucket
from collage_agent.step.gather import BlockLayout, Staging
from collage_monitor.totals_table import Table

__all__ = ["CopiedBucket", "LaidOutStep"]


class LaidOutStep:
    """u and the stepped states of whole tensors, once `lay_out` has put them where a layout has its slots."""

    def __init__(self, intent: BeforeAfter, kind: Literal["whole-tensor", "whole-optimizer"]) -> None:
        self.kind: Final = kind
        self.composition = intent.composition
        self.stochastic = intent.stochastic
        self.unexplained = intent.unexplained
        self._flat: dict[str, Tensor] = {}
        self._position = 0

    def refresh(self, optimizer: Optimizer) -> None:
        """Nothing is kept from one step to the next."""

    def lay_out(
        self, displacements: Sequence[Tensor], states: Sequence[Mapping[str, Any]], layout: BlockLayout
    ) -> None:
        """Take over u, fp64 in the shape of each tensor of `layout`, and the states after the step."""
        kept = stored_parts.elementwise_state(displacements[0], states[0])
        keys = [
            key
            for key, value in kept.items()
            if value.is_floating_point() and all(key in state for state in states)
        ]
        self._flat = {key: _in_layout([state[key] for state in states], layout) for key in keys}
        self._flat[stored_parts.PARAMETER] = _in_layout(displacements, layout)
        self._position = 0

    def displacement(
        self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor, out: Tensor
    ) -> bool:
        """Write u of the next `len(out)` slots to `out`, and the stepped states of these to `state`.

        False: nothing was laid out.
        """
        if not self._flat:
            return False
        slots = slice(self._position, self._position + out.numel())
        self._position = slots.stop
        for key, values in self._flat.items():
            if key in state:
                state[key] = values[slots]
        out.copy_(self._flat[stored_parts.PARAMETER][slots])
        return True

    def release(self) -> None:
        """Free what was laid out."""
        self._flat = {}


class CopiedBucket(Bucket):
    """A bucket of an optimizer that is copied whole: u is known once the copy has taken the step."""

    intent: LaidOutStep

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[Tensor],
        samples: Sequence[TensorSample],
        intent: WholeOptimizer,
        *others: Any,
        **options: Any,
    ) -> None:
        super().__init__(members, parameters, samples, LaidOutStep(intent, "whole-optimizer"), *others, **options)
        self._copied = intent.copied

    def measure(
        self, optimizer: Optimizer, scale: Tensor | None, *, counterfactuals: bool = False
    ) -> list[Table[Tensor]]:
        if self._copied.refused is None:
            stepped = [self._copied.stepped(parameter) for parameter in self.parameters]
            self.intent.lay_out([u for u, _ in stepped], [state for _, state in stepped], self.layout)
        else:
            self.missing |= {"intended"}
        found = super().measure(optimizer, scale, counterfactuals=counterfactuals)
        self.intent.release()
        return found


def _in_layout(tensors: Sequence[Tensor], layout: BlockLayout) -> Tensor:
    staging = Staging(layout, torch.float64)
    layout.gather([tensor.double() for tensor in tensors], staging, lasting=False)
    return staging.values
