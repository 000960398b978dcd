"""A bf16 byte-level GPT of about 10 million parameters, and its training one step at a time. Knows no agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["BATCH", "CONTEXT", "Training", "adamw"]

CONTEXT, BATCH, VOCABULARY = 128, 8, 256
WIDTH, LAYERS, HEADS = 384, 6, 6


def adamw(parameters: Any) -> Optimizer:
    """Torch's AdamW with its default implementation."""
    return torch.optim.AdamW(parameters, lr=2e-4, weight_decay=0.1)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.attention(self.norm_attention(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(mixed)
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """A byte-level GPT with a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class Training:
    """The model, its optimizer, and one training step at a time."""

    def __init__(self, seed: int, make: Callable[[Any], Optimizer] = adamw) -> None:
        torch.manual_seed(seed)
        self.model = Gpt().to(torch.bfloat16)
        self.optimizer = make(self.model.parameters())
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> None:
        """Forward, backward, optimizer."""
        tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=self.generator)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
