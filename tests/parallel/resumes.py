"""Resumes on several ranks: two write, four go on; whole, or without what one rank had kept beside its weights."""

from __future__ import annotations

import copy
import functools
import os
from itertools import product
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from collage_agent.handle import watch
from collage_optim import (
    PARAMETER_LOW,
    STRATEGIES,
    CollageAdam,
    CollageAdamW,
    CollageLion,
    CollageOptimizer,
    CollageSGD,
    load_distributed,
)
from collage_optim.tensor_step import local_part
from torch import distributed
from torch.distributed.checkpoint import state_dict as views

from tests.parallel.checkpoints import SOURCES
from tests.parallel.jobs import Recorder
from tests.parallel.launch import among_asked
from tests.parallel.models import fsdp2, replicated
from tests.parallel.optimizers import stepped

STEPS = 6
RULES: dict[str, Any] = {
    "AdamW": functools.partial(CollageAdamW, lr=2**-9),
    "Adam": functools.partial(CollageAdam, lr=2**-9),
    "SGD": functools.partial(CollageSGD, lr=2**-9, momentum=0.9),
    "Lion": functools.partial(CollageLion, lr=1e-3),
}


def _has(rule, strategy):
    """Whether the rule can be kept so, on shards."""
    try:
        RULES[rule]([torch.zeros(1, dtype=torch.bfloat16)], strategy=strategy)
    except ValueError:
        return False
    return not STRATEGIES[strategy].first_moment.has_scales


KEPT = {rule: [strategy for strategy in STRATEGIES if _has(rule, strategy)] for rule in RULES}
CONVERSIONS = [
    (rule, source, target)
    for rule, kept in KEPT.items()
    for source, target in product(kept, kept)
    if STRATEGIES[target].parameter_state == PARAMETER_LOW
]


def _dtype(source):
    return torch.float32 if source == "torch fp32" else torch.bfloat16


def _words(model, optimizer, first, **options):
    """What is known after one watched step."""
    handle = watch(model, optimizer, every=1, sample="all", budget=None, casts=(), first_step=first, **options)
    stepped(model, optimizer, 1, first=first)
    judged = handle.judgement()
    handle.remove()
    return {"losses": handle.info.resume_losses, "findings": judged.findings, "health": judged.health}


def written(folder):
    """Checkpoints of each source: of shards, and of replicas."""
    for source, make in among_asked(SOURCES).items():
        model, optimizer = fsdp2(_dtype(source), make=make)
        stepped(model, optimizer, STEPS)
        content = {
            "model": views.get_model_state_dict(model),
            "optim": views.get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(content, checkpoint_id=folder / source)
        model, optimizer = replicated(_dtype(source), make=make)
        stepped(model, optimizer, STEPS)
        if distributed.get_rank() == 0:
            torch.save((model.state_dict(), optimizer.state_dict()), folder / f"{source}.pt")


def gone_on(folder):
    """What each rank says of each source."""
    seen = {}
    for source, make in among_asked(SOURCES).items():
        model, optimizer = fsdp2(_dtype(source), make=make)
        if isinstance(optimizer, CollageOptimizer):
            load_distributed(folder / source, model, optimizer)
        else:
            request: Any = {
                "model": views.get_model_state_dict(model),
                "optim": views.get_optimizer_state_dict(model, optimizer),
            }
            dcp.load(request, checkpoint_id=folder / source)
            views.set_model_state_dict(model, request["model"])
            views.set_optimizer_state_dict(model, optimizer, request["optim"])
        seen[source, "shards"] = _words(model, optimizer, STEPS + 1)
        model, optimizer = replicated(_dtype(source), make=make)
        weights, states = torch.load(folder / f"{source}.pt", weights_only=False)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        seen[source, "replicas"] = _words(model, optimizer, STEPS + 1)
    return seen


def dropped_by_one(folder):
    """Of each conversion of the rule RULE: what is said of it, and once the last rank's residuals were dropped."""
    seen = {}
    last = distributed.get_rank() == distributed.get_world_size() - 1
    for rule, source, target in (cell for cell in CONVERSIONS if cell[0] == os.environ["RULE"]):
        model, optimizer = fsdp2(torch.bfloat16, make=functools.partial(RULES[rule], strategy=source))
        stepped(model, optimizer, STEPS)
        model, optimizer = _loaded(rule, target, model, optimizer)
        whole = _words(model, optimizer, STEPS + 1)
        stepped(model, optimizer, STEPS, first=STEPS + 2)
        model, optimizer = _loaded(rule, target, model, optimizer)
        for state in optimizer.state.values() if last else ():
            local_part(state[PARAMETER_LOW]).zero_()
        recorder = Recorder()
        spoilt = _words(model, optimizer, 2 * STEPS + 2, reporter=recorder)
        [measured] = recorder.measurements
        table = measured.table().array
        totals = {"layers": [measured.layout.layers], "statistics": [measured.layout.statistics], "totals": [table]}
        seen[rule, source, target] = whole, {**spoilt, **totals}
    return seen


def _loaded(rule, strategy, model, optimizer):
    """The same model and states under a strategy."""
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = fsdp2(torch.bfloat16, make=functools.partial(RULES[rule], strategy=strategy))
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    return model, optimizer
