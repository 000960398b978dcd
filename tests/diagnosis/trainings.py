"""Short real trainings drawn by seed, run under the agent and under the exact truth, and judged blind."""

import copy
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from collage_agent.handle import watch
from collage_optim import CollageAdamW
from torch import nn

from collage_monitor.diagnosis import Evidence
from tests.agent.training import SmallGpt
from tests.diagnosis.truth import Truth, Whole

OURS = "plain kahan light light plus plus full fp32-states master-weights stochastic light-stochastic"
KINDS = ("gpt", "cnn", "embedding", "fine-tuning")


@dataclass(frozen=True)
class Training:
    """One drawn training: what is trained, how, and how it is watched."""

    seed: int
    model: str = "gpt"
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"
    strategy: str = "plain"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.1
    momentum: float = 0.0
    clip: float | None = 1.0
    schedule: str = "constant"
    frozen: bool = False
    resume: str = ""
    steps: int = 30
    every: int = 5
    sample: Any = "all"
    oracle: bool = False
    windows: tuple[int, ...] = ()
    fused: bool = False
    zeroed: bool = False


def draw(seed: int) -> Training:
    """The training of this seed."""
    random_ = random.Random(seed)
    pick = random_.choice
    model = KINDS[seed % len(KINDS)]
    optimizer = pick(["adamw", "adamw", "adam", "sgd", "sgd", *["collage"] * 5])
    dtype = pick([torch.bfloat16, torch.bfloat16, torch.float32])
    strategy = "plain"
    if optimizer == "collage":
        dtype = torch.bfloat16
        strategy = pick(OURS.split())
    low, high = (-3.0, 0.3) if optimizer == "sgd" else (-4.7, -2.0)
    if model == "fine-tuning":
        low, high = low - 0.5, high - 0.7
    every = pick([1, 2, 5])
    return Training(
        seed=seed,
        model=model,
        dtype=dtype,
        optimizer=optimizer,
        strategy=strategy,
        lr=10 ** random_.uniform(low, high),
        betas=(pick([0.9, 0.8]), pick([0.9, 0.95, 0.98, 0.99, 0.999])),
        decay=pick([0.0, 0.01, 0.1]),
        momentum=pick([0.0, 0.9]),
        clip=pick([None, 1.0, 0.1]),
        schedule=pick(["constant", "constant", "linear to 0", "cosine to 0", "warm-up from 0"]),
        frozen=random_.random() < 0.25,
        resume=pick(["", "", "", "kept", "without residuals"]),
        steps=pick([60, 100, 150]),
        every=every,
        sample=pick([512, 4096, "all"]),
        oracle=random_.random() < 0.3,
        windows=pick([(), (), (8,)]),
        fused=random_.random() < 0.15,
        zeroed=random_.random() < 0.15,
    )


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.second(torch.relu(self.first(x)))))
        return self.head(x.flatten(1))


class Recommender(nn.Module):
    """Nearly all of it is an embedding whose rows are used by Zipf's law."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3000, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 1)

    def forward(self, tokens):
        return self.head(self.norm(self.rows(tokens).mean(1))).squeeze(-1)


def model_of(training: Training) -> nn.Module:
    torch.manual_seed(training.seed)
    made: nn.Module
    if training.model == "cnn":
        made = Convolutions()
    elif training.model == "embedding":
        made = Recommender()
    else:
        made = SmallGpt(width=24, layers=1, context=24)
        for parameter in made.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
    if training.model == "fine-tuning":
        quick = torch.optim.AdamW(made.parameters(), lr=2e-3)
        for step in range(15):
            quick.zero_grad()
            loss_of(made, training, 10_000 + step).backward()
            quick.step()
    return made.to(training.dtype)


def loss_of(model: nn.Module, training: Training, step: int) -> Any:
    generator = torch.Generator().manual_seed(7919 * training.seed + step)
    dtype = next(model.parameters()).dtype
    if training.model == "cnn":
        labels = torch.randint(0, 10, (8,), generator=generator)
        images = torch.randn(8, 3, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1) / 5
        return nn.functional.cross_entropy(model(images.to(dtype)).float(), labels)
    if training.model == "embedding":
        ranks = torch.rand(16, 8, generator=generator)
        tokens = (3000**ranks - 1).long().clamp(0, 2999)
        wanted = (tokens.float().mean(1) / 1000).sin()
        return (model(tokens).float() - wanted).square().mean()
    # Text with structure: the next byte mostly follows from the last one.
    start = torch.randint(0, 256, (2, 1), generator=generator)
    tokens = (start + 7 * torch.arange(17)) % 256
    noise = torch.randint(0, 256, tokens.shape, generator=generator)
    tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.2, noise, tokens)
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1))


def rate_at(training: Training, step: int) -> float:
    """Factor on the learning rate at step 1, 2, …"""
    done = (step - 1) / training.steps
    if training.schedule == "linear to 0":
        return 1 - done
    if training.schedule == "cosine to 0":
        return 0.5 * (1 + math.cos(math.pi * done))
    if training.schedule == "warm-up from 0":
        return min(1.0, 5 * done)
    return 1.0


def optimizer_of(training: Training, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    common: dict[str, Any] = {"lr": training.lr, "weight_decay": training.decay}
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=training.momentum, **common)
    if training.optimizer == "collage":
        return CollageAdamW(parameters, betas=training.betas, strategy=training.strategy, **common)
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, betas=training.betas, fused=training.fused, **common)


def resumed(training: Training, optimizer: torch.optim.Optimizer) -> None:
    """As from a checkpoint; one that left the residuals behind takes them out."""
    saved = copy.deepcopy(optimizer.state_dict())
    if training.resume == "without residuals":
        for state in saved["state"].values():
            if "parameter_low" in state:
                state["parameter_low"].zero_()
    optimizer.load_state_dict(saved)


def run(training: Training) -> tuple[Evidence, Whole]:
    """Train. What the agent can judge the end by, and what really happened in the same steps."""
    model = model_of(training)
    if training.frozen:
        for name, parameter in model.named_parameters():
            if "norm" in name or "position" in name:
                parameter.requires_grad_(False)
    optimizer = optimizer_of(training, model)
    rule = {"collage": "adamw"}.get(training.optimizer, training.optimizer)
    truth = Truth(
        rule,
        {p: name for name, p in model.named_parameters()},
        decays_apart=training.optimizer == "adamw" and not training.fused,
        # "stochastic" keeps nothing that could be zeroed; without its residuals light-stochastic rounds to nearest.
        random=training.strategy == "stochastic" or ("stochastic" in training.strategy and not training.zeroed),
    )
    options = {name: getattr(training, name) for name in ("every", "sample", "oracle", "windows")}
    handle = watch(model, optimizer, budget=None, **options)
    for step in range(1, training.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = training.lr * rate_at(training, step)
        optimizer.zero_grad()
        loss_of(model, training, step).backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        truth.before(optimizer)
        optimizer.step()
        if training.zeroed:
            for state in optimizer.state.values():
                if "parameter_low" in state:
                    state["parameter_low"].zero_()
        truth.after(optimizer, step)
        if training.resume and step == training.steps // 2:
            resumed(training, optimizer)
    evidence = handle.evidence()
    handle.remove()
    assert evidence.first_step is not None
    assert evidence.last_step is not None
    return evidence, truth.over(evidence.first_step, evidence.last_step)
