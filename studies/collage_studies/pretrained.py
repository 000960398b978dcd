"""Checkpoints to go on from: trained here in fp32, once for each recipe, and kept in a folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from collage_demo.corpus import Corpus, batch
from collage_demo.models import loss_of
from collage_demo.recipe import Plan, Recipe
from collage_demo.training import Build, new_model, new_model_and_optimizer, new_optimizer
from collage_optim import MASTER_PARAMETER
from torch import Tensor, nn

from collage_studies.low_rank_adapters import adapt

__all__ = ["build_from_weights", "checkpoint"]


def checkpoint(recipe: Recipe, corpus: Corpus, folder: Path) -> Mapping[str, Tensor]:
    """The weights after the recipe in fp32, by name; trained unless the folder has them.

    The same recipe, text and torch give the same weights.
    """
    said = json.dumps([asdict(recipe), corpus.training.numel(), torch.__version__], sort_keys=True)
    kept = folder / f"{hashlib.sha256(said.encode()).hexdigest()[:16]}.pt"
    if not kept.exists():
        model, (optimizer,) = new_model_and_optimizer(Plan("plain", "float32"), recipe)
        for step in range(1, recipe.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * recipe.rate_factor(step - 1)
            passages = batch(corpus.training, recipe.batch_size, recipe.length, recipe.seed + step)
            loss_of(model, *passages).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        folder.mkdir(parents=True, exist_ok=True)
        # Another trial may be at the same: either finds a whole file, and both are equal.
        own = kept.with_suffix(f".{os.getpid()}")
        torch.save(model.state_dict(), own)
        own.replace(kept)
    weights: Mapping[str, Tensor] = torch.load(kept, weights_only=True)
    return weights


def build_from_weights(
    weights: Mapping[str, Tensor], *, exact: bool = False, rank: int = 0, scale: float = 1.0
) -> Build:
    """Begin with the weights rounded to bfloat16, or, if exact, with all of their bits that a strategy can hold.

    rank: above 0, the model is frozen, and adapters of that rank and scale are trained.
    """

    def build(plan: Plan, recipe: Recipe) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = new_model(plan, recipe)
        rounded = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        model.load_state_dict(weights if exact else rounded)
        if rank:
            adapt(model, rank, scale, recipe.seed)
        optimizer = new_optimizer(model, plan, recipe)
        if exact:
            said = optimizer.state_dict()
            said["state"] = {
                number: {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(weights[name]),
                    "exp_avg_sq": torch.zeros_like(weights[name]),
                    MASTER_PARAMETER: weights[name],
                }
                for number, (name, _) in enumerate(model.named_parameters())
            }
            optimizer.load_state_dict(said)
        return model, [optimizer]

    return build
