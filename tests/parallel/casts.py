"""Copies of fp32 weights, of a model that is spread in several ways; rows of 64 elements, so that blocks fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from collage_monitor.statistics.casts import FORMATS
from tests.parallel.jobs import measured
from tests.parallel.launch import among_asked
from tests.parallel.models import SPREAD, adamw, dyadic, gradient

WAYS = ("ddp", "zero", "fsdp2", "fsdp1 original", "fsdp1 flat")
CASTS = (*FORMATS, "bf16>fp8_block128", "bf16>mxfp8")
SHAPES = ((6, 64), (5, 64), (96,), (7, 3), (256, 64), (200, 64))


class Wide(nn.Module):
    """One parameter whose gradient is exactly known."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(dyadic(SHAPES[index], 300 + index))

    def forward(self, step):
        return (self.weight * gradient(self.weight.shape, self.index, 0, step)).sum()


class WideModel(nn.Module):
    """Such parameters in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Wide(index) for index in range(len(SHAPES)))

    def forward(self, step):
        return sum(part(step) for part in self.parts)


OPTIONS: dict[str, Any] = {"steps": 8, "casts": CASTS, "windows": (2,)}


def alone():
    model = WideModel()
    return measured(model, adamw(model.parameters()), **OPTIONS)


def copies(folder):
    """What this rank saw of each way to spread the model that is asked for."""
    asked = among_asked(SPREAD)
    return {name: measured(*spread(torch.float32, WideModel()), **OPTIONS) for name, spread in asked.items()}
