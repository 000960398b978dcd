"""Optimizers that need whole matrices, on matrices that are spread over ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytorch_optimizer
import torch
from torch import nn

from tests.parallel.jobs import STEPS, measured, train
from tests.parallel.models import fsdp2, gradient, replicated, zero
from tests.parallel.optimizers import whole

SHAPES = ((24, 16), (12, 20), (9, 7), (16, 16))


class Matrix(nn.Module):
    """One matrix, whose gradient is `gradient`'s."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        generator = torch.Generator().manual_seed(index)
        self.weight = nn.Parameter(torch.randn(SHAPES[index], generator=generator) / 8)

    def forward(self, step):
        return (self.weight * gradient(self.weight.shape, self.index, 0, step).to(self.weight.dtype)).sum()


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Matrix(index) for index in range(len(SHAPES)))

    def forward(self, step):
        return sum(part(step) for part in self.parts)


def _muon_of_groups(parameters, **options):
    return pytorch_optimizer.Muon([{"params": list(parameters), "use_muon": True}], **options)


MAKERS: dict[str, Any] = {
    "torch": functools.partial(torch.optim.Muon, lr=2**-9, weight_decay=2**-4),
    "pytorch_optimizer": functools.partial(_muon_of_groups, lr=2**-9),
    "Lamb": functools.partial(pytorch_optimizer.Lamb, lr=2**-9),
}
SPREAD: dict[str, Any] = {"zero": zero, "fsdp2": fsdp2, "ddp": replicated}

NOT_TOGETHER = {
    ("zero", "pytorch_optimizer"): "ZeroRedundancyOptimizer makes its inner optimizer without groups",
    ("fsdp2", "Lamb"): "its step asks distributed tensors for what they cannot do",
}


def matrices():
    return Matrices().to(torch.bfloat16)


def alone():
    """What one process measures, by maker."""
    found = {}
    for maker, make in MAKERS.items():
        model = matrices()
        found[maker] = measured(model, make(model.parameters()))
    return found


def spread_matrices(folder):
    """What each way to spread them shows, and the weights with the agent and without."""
    seen = {}
    for way, spread in SPREAD.items():
        for maker, make in MAKERS.items():
            if (way, maker) in NOT_TOGETHER:
                continue
            model, optimizer = spread(torch.bfloat16, matrices(), make)
            found = measured(model, optimizer)
            other, unwatched = spread(torch.bfloat16, matrices(), make)
            train(other, unwatched, STEPS)
            found["identical"] = all(
                torch.equal(whole(one.detach()), whole(two.detach()))
                for one, two in zip(model.parameters(), other.parameters(), strict=True)
            )
            seen[way, maker] = found
    return seen
