"""LoRA in its usual form: a frozen linear layer and, added to it, the product of two thin ones that learn.

The study of fine-tuning trains them, `pretrained.py` puts them on a checkpoint.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

__all__ = ["ADAPTED", "AdapterIn", "AdapterOut", "LowRankLinear", "adapt"]

ADAPTED: Final = ("attention", "attention_out", "perceptron", "perceptron_out")
"""The linear layers of a block."""


class AdapterIn(nn.Linear):
    """A: [rank, inputs], drawn as peft draws it (Kaiming's uniform law)."""


class AdapterOut(nn.Linear):
    """B: [outputs, rank], 0 at the start, so that the adapted layer begins as the frozen one."""


class LowRankLinear(nn.Module):
    """base(x) + scale · B A x; [..., inputs] to [..., outputs]."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        self.adapter_in = AdapterIn(base.in_features, rank, bias=False)
        self.adapter_out = AdapterOut(rank, base.out_features, bias=False)
        nn.init.zeros_(self.adapter_out.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.adapter_out(self.adapter_in(inputs))
        result: torch.Tensor = self.base(inputs) + self.scale * added
        return result


def adapt(model: nn.Module, rank: int, scale: float, seed: int) -> None:
    """Freeze the model, and give every linear layer of its blocks an adapter in the weights' dtype.

    Random weights are rounded to bfloat16 first, so the same seed gives the same adapters in any dtype.
    """
    dtype = next(model.parameters()).dtype
    model.requires_grad_(False)
    torch.manual_seed(seed)
    chosen = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in ADAPTED]
    for name in chosen:
        place, _, attribute = name.rpartition(".")
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        adapted = LowRankLinear(base, rank, scale)
        for part in (adapted.adapter_in, adapted.adapter_out):
            part.to(torch.bfloat16).to(dtype)
        setattr(model.get_submodule(place), attribute, adapted)
