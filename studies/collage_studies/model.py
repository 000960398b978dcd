"""A small byte-level GPT: learned positions, pre-norm blocks, an output matrix that is not tied."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["ByteGPT", "loss_of"]

_BYTES = 256


class ByteGPT(nn.Module):
    """Predicts the next byte: int64 [batch, length] to logits [batch, length, 256] in the weights' dtype."""

    def __init__(self, *, layers: int = 4, width: int = 128, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.length = length
        self.tokens = nn.Embedding(_BYTES, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, layers) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _BYTES, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class Block(nn.Module):
    """Causal attention and a perceptron, each after a norm of its own and added to the residual stream."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Linear(width, 4 * width)
        self.perceptron_out = nn.Linear(4 * width, width)
        for linear in (self.attention, self.perceptron):
            nn.init.normal_(linear.weight, std=0.02)
        for linear in (self.attention_out, self.perceptron_out):
            nn.init.normal_(linear.weight, std=0.02 / (2 * layers) ** 0.5)
        for linear in (self.attention, self.attention_out, self.perceptron, self.perceptron_out):
            nn.init.zeros_(linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention_out(self._attend(self.attention(self.attention_norm(hidden))))
        inner = functional.gelu(self.perceptron(self.perceptron_norm(hidden)))
        added: torch.Tensor = hidden + self.perceptron_out(inner)
        return added

    def _attend(self, projected: torch.Tensor) -> torch.Tensor:
        size, length, triple = projected.shape
        split = projected.view(size, length, 3, self.heads, triple // 3 // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: torch.Tensor = mixed.transpose(1, 2).reshape(size, length, triple // 3)
        return joined


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte, taken in fp32 from the model's logits. Does not synchronise."""
    logits = model(inputs).float()
    loss: torch.Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss
