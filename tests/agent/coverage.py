"""How often the agent's 95 % intervals hold the value of the whole tensors, on tensors of real training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from collage_agent.handle import watch
from collage_demo.corpus import batch, standard_library
from collage_demo.models import ByteGPT, loss_of
from torch import nn

from collage_monitor.metrics import METRICS
from collage_monitor.statistics import finish_all, merge_steps

Rows = dict[str, Any]
Training = tuple[nn.Module, Callable[[int], torch.Tensor]]
_VOCABULARY = 50_000
INTERVALS = [name for name, entry in METRICS.items() if entry.interval is not None]


@dataclass
class Coverage:
    """Intervals by metric: how many were given, how many held the truth, how many were undefined."""

    given: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    undefined: Counter[str] = field(default_factory=Counter)

    def share(self, metric: str) -> float:
        return self.held[metric] / self.given[metric]

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(self.given + other.given, self.held + other.held, self.undefined + other.undefined)


class RareRows(nn.Module):
    """Token ids of a Zipf distribution through a table of 50,000 rows, of which a batch uses few."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(_VOCABULARY, 16), nn.Linear(16, 256)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, ids):
        return self.out(self.embedding(ids).mean(1))


@cache
def _text() -> torch.Tensor:
    return standard_library().training


def byte_gpt() -> Training:
    torch.manual_seed(0)
    model = ByteGPT(layers=2, width=96).to(torch.bfloat16)
    return model, lambda step: loss_of(model, *batch(_text(), 4, 32, step))


def rare_rows() -> Training:
    torch.manual_seed(0)
    model = RareRows().to(torch.bfloat16)
    shares = 1.0 / torch.arange(1, _VOCABULARY + 1, dtype=torch.float64)

    def loss(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        ids = torch.multinomial(shares, 256 * 16, replacement=True, generator=generator).view(256, 16)
        return nn.functional.cross_entropy(model(ids).float(), ids.sum(1) % 256)

    return model, loss


def study(training, optimizer, *, sample, draws, warm_up, measured, every=3) -> tuple[Coverage, Coverage]:
    """Coverage of single steps, and of all measured steps merged, over `draws` samples of every sampled tensor."""
    model, loss_of_step = training
    _train(optimizer, loss_of_step, range(warm_up))
    options: dict[str, Any] = {"every": every, "oracle": True, "first_step": 1}
    whole: Any = watch(model, optimizer, sample="all", **options)
    handles: list[Any] = [
        watch(model, optimizer, sample=sample, seed=seed, budget=None, **options) for seed in range(draws)
    ]
    seen: list[list[Rows]] = [[] for _ in (whole, *handles)]
    for number in range(measured):
        start = warm_up + number * every
        _train(optimizer, loss_of_step, range(start, start + every))
        for rows, handle in zip(seen, (whole, *handles), strict=True):
            rows.append(dict(handle._last.table()))
    for handle in (whole, *handles):
        handle.remove()
    truths, *found = seen
    single = sum((_counted(truth, [rows[i] for rows in found]) for i, truth in enumerate(truths)), Coverage())
    return single, _counted(merge_steps(truths), [merge_steps(rows) for rows in found])


def _train(optimizer, loss_of_step, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of_step(step).backward()
        optimizer.step()


def _counted(truth: Rows, found: list[Rows]) -> Coverage:
    coverage = Coverage()
    true = finish_all(truth)
    for rows in found:
        values = finish_all(rows)
        for metric in INTERVALS:
            prefix = "oracle_" if metric == "edq_oracle_ratio" else ""
            sampled = (rows[f"{prefix}sampled"] < rows[f"{prefix}elements"]) & ~np.isnan(true[metric])
            low, high = values[f"{metric}_low"], values[f"{metric}_high"]
            given = sampled & ~np.isnan(low)
            coverage.given[metric] += int(given.sum())
            coverage.undefined[metric] += int((sampled & np.isnan(low)).sum())
            coverage.held[metric] += int((given & (low <= true[metric]) & (true[metric] <= high)).sum())
    return coverage
