"""Streams of gradients on which optimizers are compared with fp64, the same for equal arguments."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch


def constant_gradients(
    elements: int, steps: int, dtype: torch.dtype = torch.bfloat16, seed: int = 3
) -> Iterator[torch.Tensor]:
    """One gradient for all steps."""
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * 1e-3
    for _ in range(steps):
        yield gradient.to(dtype)


def noisy_gradients(
    elements: int, steps: int, dtype: torch.dtype = torch.bfloat16, seed: int = 3
) -> Iterator[torch.Tensor]:
    """Gradients with noise three times as large as their mean, both of the size that small models see."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(elements, generator=generator) * 3e-4
    for _ in range(steps):
        yield (mean + torch.randn(elements, generator=generator) * 1e-3).to(dtype)


def falling_gradients(
    elements: int, steps: int, dtype: torch.dtype = torch.bfloat16, seed: int = 3
) -> Iterator[torch.Tensor]:
    """Noisy gradients that fall by a factor of thirty over the steps."""
    for index, gradient in enumerate(noisy_gradients(elements, steps, torch.float32, seed)):
        yield (gradient * 30 ** (-index / steps)).to(dtype)


def tiny_gradients(
    elements: int, steps: int, dtype: torch.dtype = torch.bfloat16, seed: int = 3
) -> Iterator[torch.Tensor]:
    """Noisy gradients a billion times smaller: their squares are near 1e-24."""
    for gradient in noisy_gradients(elements, steps, torch.float32, seed):
        yield (gradient * 1e-9).to(dtype)


@dataclass(frozen=True)
class Stream:
    """Gradients, the weights they start from (mean and spread), and AdamW's options for them."""

    gradients: Callable[..., Iterator[torch.Tensor]]
    mean: float = 0.0
    spread: float = 0.02
    options: dict[str, float] = field(default_factory=lambda: {"lr": 1e-4, "weight_decay": 0.01})

    def start(self, elements: int, dtype: torch.dtype = torch.bfloat16, seed: int = 2) -> torch.Tensor:
        """The weights at the beginning."""
        noise = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
        return (self.mean + noise * self.spread).to(dtype)


STREAMS = {
    "constant": Stream(constant_gradients),
    "noisy": Stream(noisy_gradients),
    "falling": Stream(falling_gradients),
    "tiny-update": Stream(noisy_gradients, mean=1.0, spread=0.1, options={"lr": 1e-6, "weight_decay": 0.1}),
    "tiny-gradient": Stream(tiny_gradients, options={"lr": 1e-4, "weight_decay": 0.01, "eps": 1e-16}),
}
