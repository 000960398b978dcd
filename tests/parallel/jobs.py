"""The jobs that parallel tests run in several processes; each returns what one rank saw."""

from __future__ import annotations

import functools
from typing import Any

import collage_agent as collage
import torch
from collage_agent.handle import watch
from collage_agent.training.ddp import stepping_optimizer
from collage_optim import CollageAdamW
from torch import distributed, nn

from tests.agent.training import Block
from tests.parallel.launch import among_asked
from tests.parallel.models import MIXED, SPREAD, adamw, injected, replicated
from tests.parallel.optimizers import stepped_shards as stepped_shards

STEPS = 3
IDENTITY_STEPS = 6
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Recorder:
    """A reporter that keeps what it gets."""

    def __init__(self):
        self.measurements: list[Any] = []

    def started(self, first_step):
        pass

    def measured(self, measurement):
        self.measurements.append(measurement)


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def measured(model, optimizer, sample="all", steps=STEPS, **options):
    recorder = Recorder()
    handle = watch(model, optimizer, every=1, sample=sample, oracle=True, budget=None, reporter=recorder, **options)
    train(model, optimizer, steps)
    return {
        "layers": [measurement.layout.layers for measurement in recorder.measurements],
        "statistics": [measurement.layout.statistics for measurement in recorder.measurements],
        "totals": [measurement.table().array for measurement in recorder.measurements],
        "info": handle.info,
        "summary": handle.summary(),
        "text": str(handle),
    }


def alone(dtype):
    model = injected(dtype)
    return measured(model, adamw(model.parameters()))


def totals(folder):
    """Every way to spread the model, whole tensors, in bfloat16 and in what other dtypes are asked for."""
    seen = {}
    for dtype_name, dtype in ({"bfloat16": torch.bfloat16} | among_asked(DTYPES)).items():
        for name, spread in SPREAD.items():
            if name == "fsdp2 hybrid" and distributed.get_world_size() < 4:
                continue
            seen[name, dtype_name] = measured(*spread(dtype))
    for name, spread in MIXED.items():
        seen[f"mixed {name}", "float32"] = measured(*spread(torch.float32))
    return seen


class Attention(nn.Module):
    """Transformer blocks between two projections, with dropout: real gradients, and random numbers drawn."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(16, 24), Block(24), Block(24), nn.Linear(24, 3)])
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        for part in self.parts[:-1]:
            x = self.dropout(part(x))
        return self.parts[-1](x)


def identity(folder):
    """Some steps with and without the agent: losses, weights, states and random states of this rank."""
    seen = {}
    for name in ("ddp", "fsdp2", "fsdp1 original", "fsdp1 flat", "zero"):
        for watched in (False, True):
            torch.manual_seed(5)
            model, optimizer = SPREAD[name](torch.bfloat16, Attention().to(torch.bfloat16))
            seen[name, watched] = _steps(model, optimizer, watched)
    return seen


def _steps(model, optimizer, watched):
    torch.manual_seed(7 + distributed.get_rank())
    recorder = Recorder()
    if watched:
        watch(model, optimizer, every=1, sample=256, budget=None, oracle=True, reporter=recorder)
    losses = []
    for _ in range(IDENTITY_STEPS):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 6, 16, dtype=torch.bfloat16)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    stepping = stepping_optimizer(optimizer)
    states = {
        (index, key): own(value)
        for index, parameter in enumerate(model.parameters())
        for key, value in stepping.state.get(parameter, {}).items()
    }
    return {
        "losses": losses,
        "weights": {name: own(parameter) for name, parameter in model.named_parameters()},
        "states": states,
        "random": torch.get_rng_state().tolist(),
        "measured": len(recorder.measurements),
    }


def own(tensor):
    """This rank's part of a tensor, as bytes are compared."""
    tensor = tensor.detach()
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.contiguous().view(torch.uint8) if local.dim() else local


def reported(folder):
    """One run for each way of spreading, reported to the server that the environment names; their ids."""
    runs = {}
    for name in ("ddp", "fsdp2", "zero"):
        runs[name] = _report(name, *SPREAD[name](torch.bfloat16))
    return runs


def reported_alone(folder):
    """The same run by one process."""
    model = injected(torch.bfloat16)
    return _report("alone", model, adamw(model.parameters()))


def _report(name, model, optimizer):
    run = collage.init("parallel", name)
    collage.watch(model, optimizer, every=1, sample="all", oracle=True)
    train(model, optimizer, STEPS)
    collage.finish()
    distributed.barrier()
    assert (run.reports_sent, run.reports_dropped) == (STEPS, {})
    return run.run_id


STOCHASTIC = functools.partial(CollageAdamW, lr=2**-9, strategy="stochastic")
FLIPPED = "parts.3.weight"
"""The tensor of which one rank loses a bit after the step before FLIPPED_STEP."""
FLIPPED_STEP = 3


def replicas(folder):
    """Replicated runs that stay in step, and last one in which rank 1 suffers a flipped bit; their ids."""
    ways = {
        "ddp": replicated(torch.bfloat16),
        "ddp fp32": replicated(torch.float32),
        "stochastic": replicated(torch.bfloat16, None, STOCHASTIC),
        "unsharded": SPREAD["fsdp1 unsharded"](torch.bfloat16),
        "flipped": replicated(torch.bfloat16),
    }
    return {name: _replicated_run(name, model, optimizer) for name, (model, optimizer) in ways.items()}


def _replicated_run(name, model, optimizer):
    run = collage.init("parallel", name)
    collage.watch(model, optimizer, every=1, sample="all" if name == "flipped" else 64, budget=None)
    train(model, optimizer, FLIPPED_STEP - 1)
    if name == "flipped" and distributed.get_rank() == 1:
        with torch.no_grad():
            model.module.get_parameter(FLIPPED).view(torch.int16)[0, 0, 0] ^= 1
    train(model, optimizer, STEPS)
    collage.finish()
    distributed.barrier()
    return run.run_id
