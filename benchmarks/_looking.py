"""What people do today to look at weights and gradients in training."""

from __future__ import annotations

import os
import tempfile
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["HistogramLoop", "ItemLoop", "Method", "WandbWatch"]


class Method(Protocol):
    """Something that looks at every optimizer step while it is attached."""

    def remove(self) -> None:
        """Stop looking."""


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


class WandbWatch:
    """`wandb.watch` of gradients and weights at every step, its run kept on this machine.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        os.environ.setdefault("WANDB_SILENT", "true")
        self._wandb: Any = wandb
        self._folder = tempfile.TemporaryDirectory()
        self._run: Any = wandb.init(project="benchmark", mode="offline", dir=self._folder.name)
        self._model = model
        wandb.watch(model, log="all", log_freq=1)
        # The histograms leave with the next logged step.
        self._handle = optimizer.register_step_post_hook(lambda *_: self._run.log({"step": 1}))

    def remove(self) -> None:
        """End the run and take the hooks off."""
        self._handle.remove()
        self._wandb.unwatch(self._model)
        self._run.finish()
        self._folder.cleanup()
