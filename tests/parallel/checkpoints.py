"""Distributed checkpoints: written by some ranks under one strategy, read by others under another."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from collage_optim import STRATEGIES, CollageAdamW, load_distributed
from torch.distributed.checkpoint import state_dict as views

from tests.parallel.launch import among_asked
from tests.parallel.models import fsdp2, injected
from tests.parallel.optimizers import held, stepped, whole

OPTIONS: dict[str, Any] = {"lr": 2**-9, "weight_decay": 2**-4}
SHARDED = [name for name, strategy in STRATEGIES.items() if not strategy.first_moment.has_scales]
"""Blocks of 8-bit states are not for shards: one process reads into them, no rank writes them."""
SOURCES: dict[str, Any] = {
    **{name: functools.partial(CollageAdamW, strategy=name, **OPTIONS) for name in SHARDED},
    "torch": functools.partial(torch.optim.AdamW, **OPTIONS),
    "torch fp32": functools.partial(torch.optim.AdamW, **OPTIONS),
}
FORMS = ("nested", "flattened", "its own")
"""How the optimizer's part of a checkpoint is laid out: torch's two ways, and `optimizer.state_dict()` itself."""


def form_of(source):
    return FORMS[list(SOURCES).index(source) % len(FORMS)]


def kind_of(source, **_):
    """How a source is read: its form, what stands beside its weights, and what beside those of its target."""
    beside = STRATEGIES[source].parameter_state if source in STRATEGIES else source
    return [form_of(source), beside, STRATEGIES[targets_of(source)].parameter_state]


def targets_of(source):
    """One target each on four ranks, so that every strategy is read once."""
    return SHARDED[(list(SOURCES).index(source) + 1) % len(SHARDED)]


def layout(model, optimizer, form):
    if form == "its own":
        return optimizer.state_dict()
    options = views.StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    return views.get_optimizer_state_dict(model, optimizer, options=options)


def written(folder):
    """Of each source what two ranks hold together, and checkpoints of it in `folder`."""
    seen = {}
    for source, make in among_asked(SOURCES).items():
        model, optimizer = fsdp2(torch.float32 if source == "torch fp32" else torch.bfloat16, make=make)
        stepped(model, optimizer, 3)
        content = {"model": views.get_model_state_dict(model), "optim": layout(model, optimizer, form_of(source))}
        dcp.save(content, checkpoint_id=folder / source)
        weights = {name: whole(value) for name, value in model.state_dict().items()}
        states = {
            name: {key: whole(value) for key, value in optimizer.state[parameter].items()}
            for name, parameter in model.named_parameters()
        }
        seen[source] = weights, states
    return seen


def resharded(folder):
    """What four ranks hold together after reading each source under another strategy; written anew from there."""
    seen = {}
    for source in among_asked(SOURCES):
        target = targets_of(source)
        model, optimizer = fsdp2(torch.bfloat16, make=functools.partial(CollageAdamW, lr=1.0, strategy=target))
        load_distributed(folder / source, model, optimizer)
        seen[source] = held(model, optimizer), optimizer.param_groups[0]["lr"]
        dcp.save(
            {"model": model.state_dict(), "optim": layout(model, optimizer, "nested")},
            checkpoint_id=folder / f"{source} again",
        )
    return seen


def read_alone(folder, target):
    """One process reads a folder under a strategy."""
    model = injected(torch.bfloat16)
    optimizer = CollageAdamW(model.parameters(), lr=1.0, strategy=target)
    load_distributed(folder, model, optimizer)
    return held(model, optimizer), optimizer.param_groups[0]["lr"]


def expected(seen, target):
    """The same by `load_state_dict` in one process, which other tests hold to be right."""
    weights, states = copy.deepcopy(seen)
    model = injected(torch.bfloat16)
    model.load_state_dict(weights)
    optimizer = CollageAdamW(model.parameters(), lr=1.0, strategy=target)
    saved = optimizer.state_dict()
    for number, name in enumerate(weights):
        saved["state"][number] = states[name]
        if weights[name].dtype == torch.float32:
            saved["state"][number]["master_parameter"] = weights[name]
    optimizer.load_state_dict(saved)
    return held(model, optimizer)
