"""Weights held to formats that no optimizer of ours keeps: fp32 parameters, rounded after each step.

Steps compute in fp32, and the stored values are split once, as in our own strategies. The rounding is a hook of the
optimizer, called before the agent's, so the agent sees the losses of the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from collage_optim.numerics import join, split, stochastic_round
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["ReadInBfloat16", "RoundToFormat", "expansion", "round_weights_after_steps"]

RoundToFormat = Callable[[Tensor], Tensor]
"""Rounds values to those that a format can hold; the dtype stays."""


class ReadInBfloat16(nn.Module):
    """A model of fp32 parameters that computes in bfloat16: forward and backward pass read the rounded weights."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        weights = {name: weight.to(torch.bfloat16) for name, weight in self.inner.named_parameters()}
        outputs: Tensor = torch.func.functional_call(self.inner, weights, (inputs,))
        return outputs


def expansion(dtype: torch.dtype, parts: int, generator: torch.Generator | None = None) -> RoundToFormat:
    """Sums of `parts` numbers of `dtype`, the last one rounded at random if there is a generator.

    Formats of 8 bits have one scale a tensor, a power of two: the largest with which no weight exceeds the format.
    """

    def hold(weights: Tensor) -> Tensor:
        scale = _scale(weights, dtype)
        exact = weights.double() * scale
        if generator is None:
            return (join(*split(exact, dtype, parts)) / scale).to(weights.dtype)
        kept = join(*split(exact, dtype, parts - 1)) if parts > 1 else torch.zeros_like(exact)
        last = stochastic_round(exact - kept, dtype, generator).double()
        return ((kept + last) / scale).to(weights.dtype)

    return hold


def round_weights_after_steps(optimizers: Sequence[Optimizer], hold: RoundToFormat) -> None:
    """Round the parameters now, and after each step of their optimizer; to be called before `watch`."""

    @torch.no_grad()
    def held(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.copy_(hold(parameter))

    for optimizer in optimizers:
        held(optimizer)
        optimizer.register_step_post_hook(held)


def _scale(weights: Tensor, dtype: torch.dtype) -> float:
    largest = weights.abs().max().item()
    if dtype.itemsize > 1 or not 0 < largest < math.inf:
        return 1.0
    return float(2.0 ** math.floor(math.log2(torch.finfo(dtype).max / largest)))
