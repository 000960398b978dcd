"""A bf16 byte-level GPT of about 10 million parameters, and the usual ways of looking at its training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from collage_demo.models import compute_products_in_fp32
from torch import nn
from torch.optim import Optimizer

__all__ = ["BATCH", "Block", "CONTEXT", "HistogramLoop", "ItemLoop", "Method", "Training", "adamw", "hooks_timed"]

CONTEXT, BATCH, VOCABULARY = 128, 8, 256
WIDTH, LAYERS, HEADS = 384, 6, 6


def adamw(parameters: Any) -> Optimizer:
    """Torch's AdamW with its default implementation."""
    return torch.optim.AdamW(parameters, lr=2e-4, weight_decay=0.1)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
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
        compute_products_in_fp32(self)

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

    def step(self, before_optimizer: Callable[[], None] = lambda: None) -> None:
        """Forward, backward, optimizer; `before_optimizer` is called where people clip gradients."""
        tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=self.generator)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        before_optimizer()
        self.optimizer.step()


class Method(Protocol):
    """Something that looks at every optimizer step while it is attached."""

    def remove(self) -> None:
        """Take the hooks off."""


class ItemLoop:
    """As people do today: norms and changed elements of each whole tensor, read back one by one."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._named = list(model.named_parameters())
        self._before: dict[str, torch.Tensor] = {}
        self.seen: dict[str, float] = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        self._before = {name: parameter.detach().clone() for name, parameter in self._named}

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for name, parameter in self._named:
            if parameter.grad is not None:
                self.seen[f"{name}.grad_norm"] = parameter.grad.norm().item()
            self.seen[f"{name}.norm"] = parameter.norm().item()
            self.seen[f"{name}.change"] = (parameter - self._before[name]).float().norm().item()
            self.seen[f"{name}.unchanged"] = (parameter == self._before[name]).sum().item()


class HistogramLoop:
    """As experiment trackers do: a histogram of each weight and each gradient tensor."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._named = list(model.named_parameters())
        self.seen: dict[str, list[float]] = {}
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        self._handle.remove()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for name, parameter in self._named:
            self.seen[name] = torch.histc(parameter.float(), 64).tolist()
            if parameter.grad is not None:
                self.seen[f"{name}.grad"] = torch.histc(parameter.grad.float(), 64).tolist()


@contextmanager
def hooks_timed(optimizer: Optimizer) -> Iterator[list[float]]:
    """Add up the CPU seconds that the optimizer's step hooks take; the list's one entry is the sum."""
    spent = [0.0]
    hooks: Any = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    originals = [dict(table) for table in hooks]

    def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = time.thread_time()
            result = hook(*arguments)
            spent[0] += time.thread_time() - started
            return result

        return run

    for table in hooks:
        for key, hook in list(table.items()):
            table[key] = timed(hook)
    try:
        yield spent
    finally:
        for table, original in zip(hooks, originals, strict=True):
            table.clear()
            table.update(original)
