"""Small models and training runs that the agent's tests share."""

from typing import Any

import torch
from collage_agent.handle import watch
from torch import nn


class Block(nn.Module):
    """A pre-norm transformer block without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.attention(self.norm_attention(x)).chunk(3, dim=-1)
        x = x + self.project(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm_mlp(x))


class SmallGpt(nn.Module):
    """A byte-level GPT with tied embedding, large enough that some tensors are sampled and some are not."""

    def __init__(self, width: int = 48, layers: int = 2, context: int = 32) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def small_gpt(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Any:
    torch.manual_seed(seed)
    return SmallGpt(**sizes).to(dtype)


def mlp(seed: int = 0, dtype: torch.dtype = torch.bfloat16, width: int = 70) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(30, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 5)
    ).to(dtype)


def gpt_loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 256, (2, 17), generator=generator)
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1))


def mlp_loss(model, step):
    generator = torch.Generator().manual_seed(2000 + step)
    x = torch.randn(16, 30, generator=generator).to(next(model.parameters()).dtype)
    return (model(x).float() - 1.0).square().mean()


def adamw(parameters, lr=1e-3, **options):
    return torch.optim.AdamW(parameters, lr=lr, **options)


def watched(make: Any = adamw, model: Any = None, steps=0, loss_of: Any = mlp_loss, **options) -> Any:
    """A model, the MLP in bf16 where none is given, its optimizer, and a watch that measures each of the steps."""
    model = mlp() if model is None else model
    optimizer = make(model.parameters())
    handle = watch(model, optimizer, **{"every": 1, "budget": None, **options})
    train(model, optimizer, steps, loss_of)
    return model, optimizer, handle


def backward(model, step, loss_of=mlp_loss, scale=1.0):
    """The gradients of a step, in the place of the last one's."""
    model.zero_grad()
    (loss_of(model, step) * scale).backward()


def mean_square(model, inputs):
    """A loss of whatever comes out, of inputs in the model's dtype."""
    return model(inputs.to(next(model.parameters()).dtype)).float().square().mean()


def train(model, optimizer, steps: int, loss_of: Any = mlp_loss, start: int = 0, scheduler=None) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses
