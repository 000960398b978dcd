"""Trials that are trainings: run as any user's, their losses and metrics read back from the server."""

from __future__ import annotations

import copy
import math
from functools import partial

import torch
from collage_agent.watch_options import WatchArguments
from collage_demo.corpus import Corpus, batch, standard_library
from collage_demo.models import loss_of
from collage_demo.recipe import Recipe
from collage_demo.training import Build, train
from collage_optim import CollageAdamW
from torch import Tensor, nn

from collage_studies.study import Record, ReportTarget, Trial

__all__ = ["SampledRewards", "run_training", "stored_loss", "validation_loss"]

_BATCHES, _FIRST_SEED = 64, 10**9


def run_training(
    trial: Trial,
    reporting: ReportTarget,
    *,
    corpus: Corpus | None = None,
    build: Build | None = None,
    options: WatchArguments | None = None,
) -> Record:
    """Train the trial's recipe under its plan; the record names the run, and holds the speed.

    corpus: other text than the standard library's sources; build, options: see `train`.
    """
    assert trial.plan is not None
    assert trial.recipe is not None
    outcome = train(
        trial.plan,
        trial.recipe,
        corpus or standard_library(),
        lambda *_: None,
        project="studies",
        name=trial.name,
        group=reporting.group,
        server_url=reporting.server_url,
        folder=reporting.folder,
        build=build,
        settings=trial.settings,
        options=options,
    )
    values: dict[str, float | None] = {"tokens_per_cpu_second": outcome.tokens_per_cpu_second}
    return Record(trial=trial, versions={}, cpu_seconds=0.0, run_id=outcome.run_id, values=values)


class SampledRewards(nn.Module):
    """A model whose gradient is REINFORCE's: it samples a byte, and its reward is 1 if that is the text's, else 0.

    Cross-entropy's gradient at the logits, (p − target) / N, becomes (reward − mean reward) (p − sampled) / N. The
    uniform numbers behind the samples follow from the seed alone, so they are the same for all strategies.
    """

    def __init__(self, inner: nn.Module, seed: int) -> None:
        super().__init__()
        self.inner = inner
        self._generator = torch.Generator().manual_seed(seed)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.inner(inputs)
        if logits.requires_grad:
            logits.register_hook(partial(self._policy_gradient, logits.detach()))  # type: ignore[no-untyped-call]
        return logits

    def _policy_gradient(self, logits: Tensor, gradient: Tensor) -> Tensor:
        chances = logits.float().softmax(-1)
        drawn = torch.rand(chances.shape[:-1], generator=self._generator).unsqueeze(-1)
        sampled = torch.searchsorted(chances.cumsum(-1), drawn).clamp_(max=chances.shape[-1] - 1)
        rewards = (sampled == gradient.argmin(-1, keepdim=True)).float()
        pushed = chances.scatter_add(-1, sampled, torch.full_like(drawn, -1.0))
        return ((rewards - rewards.mean()) * pushed / rewards.numel()).to(gradient.dtype)


@torch.no_grad()
def stored_loss(
    model: nn.Module, optimizer: CollageAdamW, recipe: Recipe, corpus: Corpus, *, rewards: bool = False
) -> float:
    """The loss on validation text with every stored bit of the weights, computed in fp32.

    It is cross-entropy in nats a byte, or with `rewards` the chance that a sampled byte is not the text's.
    """
    whole = copy.deepcopy(model).float()
    for mine, stored in zip(whole.parameters(), model.parameters(), strict=True):
        if stored.requires_grad:
            mine.copy_(optimizer.stored_parameter(stored))
    return validation_loss(whole, recipe, corpus, rewards=rewards)


@torch.no_grad()
def validation_loss(model: nn.Module, recipe: Recipe, corpus: Corpus, *, rewards: bool = False) -> float:
    """The mean over fixed passages of validation text, as `stored_loss`."""
    losses = []
    for seed in range(_FIRST_SEED, _FIRST_SEED + _BATCHES):
        inputs, targets = batch(corpus.validation, recipe.batch_size, recipe.length, seed)
        if rewards:
            right = model(inputs).softmax(-1).gather(-1, targets.unsqueeze(-1))
            losses.append(1 - right.mean().item())
        else:
            losses.append(loss_of(model, inputs, targets).item())
    return math.fsum(losses) / _BATCHES
