"""How often the agent's 95 % intervals hold the value of the whole tensors, on tensors of real training."""

from __future__ import annotations

from collections import Counter
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
from tests.agent.training import train

Rows = dict[str, Any]
_VOCABULARY = 50_000
INTERVALS = [name for name, entry in METRICS.items() if entry.interval is not None]


@dataclass
class Coverage:
    """Intervals by metric: how many were given, and how many held the truth."""

    given: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)

    def share(self, metric: str) -> float:
        return self.held[metric] / self.given[metric]

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(self.given + other.given, self.held + other.held)


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


def byte_gpt():
    torch.manual_seed(0)
    model = ByteGPT(layers=2, width=96).to(torch.bfloat16)
    return model, lambda own, step: loss_of(own, *batch(_text(), 4, 32, step))


def rare_rows():
    torch.manual_seed(0)
    model = RareRows().to(torch.bfloat16)
    shares = 1.0 / torch.arange(1, _VOCABULARY + 1, dtype=torch.float64)

    def loss(own, step):
        generator = torch.Generator().manual_seed(step)
        ids = torch.multinomial(shares, 256 * 16, replacement=True, generator=generator).view(256, 16)
        return nn.functional.cross_entropy(own(ids).float(), ids.sum(1) % 256)

    return model, loss


def study(training, optimizer, *, sample, draws, warm_up, measured, every=3) -> tuple[Coverage, Coverage]:
    """Coverage of single steps, and of all measured steps merged, over `draws` samples of every sampled tensor."""
    model, loss_of_step = training
    train(model, optimizer, warm_up, loss_of_step)
    options: dict[str, Any] = {"every": every, "oracle": True, "first_step": 1}
    whole: Any = watch(model, optimizer, sample="all", **options)
    handles: list[Any] = [
        watch(model, optimizer, sample=sample, seed=seed, budget=None, **options) for seed in range(draws)
    ]
    seen: list[list[Rows]] = [[] for _ in (whole, *handles)]
    for number in range(measured):
        train(model, optimizer, every, loss_of_step, start=warm_up + number * every)
        for rows, handle in zip(seen, (whole, *handles), strict=True):
            rows.append(dict(handle._last.table()))
    for handle in (whole, *handles):
        handle.remove()
    truths, *found = seen
    single = sum((_counted(truth, [rows[i] for rows in found]) for i, truth in enumerate(truths)), Coverage())
    return single, _counted(merge_steps(truths), [merge_steps(rows) for rows in found])


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
            coverage.held[metric] += int((given & (low <= true[metric]) & (true[metric] <= high)).sum())
    return coverage
