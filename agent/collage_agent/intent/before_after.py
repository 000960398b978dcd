"""No u of a sample: for optimizers whose elements depend on each other, only what changed is known."""

from __future__ import annotations

from typing import Any, Final, Literal

from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.shadow import Shadow
from collage_agent.sample.stored_parts import PLAIN, Composition

__all__ = ["BeforeAfter", "WholeTensor"]


class BeforeAfter:
    """The source of u that gives none; `reason` says why, in words for the run's page."""

    kind: Final = "before-after"

    def __init__(
        self,
        reason: str,
        composition: Composition = PLAIN,
        stochastic: bool | None = None,
        unexplained: str | None = None,
    ) -> None:
        self.source: Literal["whole-tensor", "whole-optimizer", "before-after"] = "before-after"
        """Where its tensors have u from, as reported with the run."""
        self.reason = reason
        self.composition = composition
        self.stochastic = stochastic
        self.unexplained = unexplained

    def refresh(self, optimizer: Optimizer) -> None:
        """Nothing is kept from one step to the next."""

    def displacement(
        self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor, out: Tensor
    ) -> bool:
        """False: there is no intended update to compare with."""
        return False


class WholeTensor(BeforeAfter):
    """Only before and after on a sample; during its turn in the rotation, a tensor has u from `shadow`."""

    def __init__(self, shadow: Shadow, reason: str) -> None:
        super().__init__(reason, shadow.composition, shadow.stochastic, shadow.unexplained)
        self.shadow = shadow
        self.source = "whole-tensor"
