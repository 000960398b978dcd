"""What demo and studies train: a recipe, and plans that differ only in how numbers are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["PLANS", "Plan", "Recipe"]


@dataclass(frozen=True)
class Recipe:
    """Everything that a training depends on, except its storage.

    At this size, learning rate and β₂, bf16 rounding shows in the loss after a few hundred steps. It does not with
    larger learning rates, fewer steps, or a smaller β₂.
    """

    model: Literal["gpt", "bert"] = "gpt"
    steps: int = 350
    batch_size: int = 16
    length: int = 128
    layers: int = 4
    width: int = 128
    learning_rate: float = 2e-4
    schedule: Literal["constant", "cosine"] = "constant"
    warm_up_steps: int = 50
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    seed: int = 1
    measure_every: int = 10
    validate_every: int = 50
    validation_batches: int = 8
    windows: tuple[int, ...] = ()

    def rate_factor(self, step: int) -> float:
        """The factor of the learning rate at a step, counted from 0: warm-up, then constant or a cosine to zero."""
        warm = min(1.0, (step + 1) / self.warm_up_steps)
        if self.schedule == "constant":
            return warm
        done = max(0, step - self.warm_up_steps) / max(1, self.steps - self.warm_up_steps)
        return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a batch."""
        return self.batch_size * self.length


@dataclass(frozen=True)
class Plan:
    """How a training keeps its numbers: the strategy, and the dtype of weights and arithmetic."""

    strategy: str
    dtype: Literal["bfloat16", "float32"]

    @property
    def name(self) -> str:
        """The run's name."""
        return f"{self.strategy} {self.dtype}"


PLANS: Final = (
    Plan("plain", "float32"),
    Plan("plain", "bfloat16"),
    Plan("light", "bfloat16"),
    Plan("plus", "bfloat16"),
    Plan("master-weights", "bfloat16"),
)
"""The float32 reference comes first; the others are compared with it."""
