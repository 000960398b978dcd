"""Short trainings drawn by seed, each reported to a server: sick, healthy, cured, resumed, scheduled or faulty."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import collage_agent as collage
import torch
from collage_agent import init
from collage_agent.session import _SESSION
from collage_optim import CollageAdamW

from tests.agent.training import mlp, train
from tests.waiting import PATIENCE_SECONDS

KINDS = [
    "plain",
    "healthy",
    "converted",
    "resumed",
    "to zero",
    "warm-up",
    "one step",
    "standing layer",
    "not finite",
    "long",
]
CHANGES = {"converted": "split-master", "long": "plain"}
"""The strategy from the middle on: a cure, or an illness of a run whose older steps are merged."""
HEALTHY = ("split-master", "kahan", "master-weights", "float32")


@dataclass(frozen=True)
class Training:
    """One drawn training."""

    kind: str
    strategy: str
    lr: float
    beta2: float
    steps: int
    every: int
    oracle: bool
    cosine: bool

    def rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, …"""
        done = step / self.steps
        if self.kind == "warm-up":
            return self.lr * min(1.0, 2 * done)
        if self.kind == "to zero":
            return self.lr * (0.5 * (1 + math.cos(math.pi * done)) if self.cosine else 1 - done)
        return self.lr


def draw(seed: int) -> Training:
    """The training of this seed; each kind comes once in ten."""
    random_, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    drawn = Training(
        kind=kind,
        strategy={"healthy": random_.choice(HEALTHY), "long": "split-master"}.get(kind, "plain"),
        lr=10 ** random_.uniform(-4.5, -2.5),
        beta2=random_.choice([0.95, 0.999]),
        steps=random_.randint(150, 330) if kind == "long" else random_.randint(30, 100),
        every=random_.choice([1, 1, 2, 5]),
        oracle=random_.random() < 0.5,
        cosine=random_.random() < 0.5,
    )
    changes: dict[str, dict[str, Any]] = {
        "one step": {"steps": 3, "every": 1000},
        "long": {"every": 1},
        "standing layer": {"lr": 3e-3},
    }
    return replace(drawn, **changes.get(kind, {}))


def optimizer_of(training, model):
    standing = list(model[2].parameters()) if training.kind == "standing layer" else []
    moving = [own for own in model.parameters() if not any(own is other for other in standing)]
    # In the standing layer no update reaches half a gap.
    groups: list[dict[str, Any]] = [{"params": moving}, *([{"params": standing, "lr": 1e-6}] if standing else [])]
    options: dict[str, Any] = {"lr": training.lr, "betas": (0.9, training.beta2)}
    if training.strategy == "float32":
        return torch.optim.AdamW(groups, **options)
    return CollageAdamW(groups, strategy=training.strategy, **options)


def trained(training, application):
    """The open run of the training with all its reports sent, and its watch."""
    run = init("p", training.kind, run_id="drawn", transport=application)
    model = mlp(dtype=torch.float32 if training.strategy == "float32" else torch.bfloat16)
    optimizer = optimizer_of(training, model)

    def watched():
        options = {"every": training.every, "oracle": training.oracle, "sample": "all"}
        return collage.watch(model, optimizer, budget=None, **options)

    handle, middle = watched(), training.steps // 2
    for step in range(training.steps):
        optimizer.param_groups[0]["lr"] = training.rate_at(step)
        if training.kind in CHANGES and step == middle:
            optimizer.param_groups[0]["strategy"] = CHANGES[training.kind]
        if training.kind == "resumed" and step == middle:
            handle.remove()
            run.stop(PATIENCE_SECONDS)
            _SESSION.run = None
            run, handle = init("p", training.kind, run_id="drawn", transport=application), watched()
        if training.kind == "not finite" and step == middle:
            model[2].weight.data[0, 0] = math.nan
        train(model, optimizer, 1, start=step)
    run.stop(PATIENCE_SECONDS)
    return handle
