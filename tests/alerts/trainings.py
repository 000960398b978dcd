"""Small real trainings, healthy and sick, and what the server's evaluation says of them, in virtual time.

A training runs first and keeps its messages; they are then sent to a server whose clock moves with them. Each seed
draws its own data and weights, and of a healthy training the width, the batch, the rate and the pace too: no trace
is a resampled one.
"""

import contextlib
import copy
import io
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import collage_agent as collage
import torch
from collage_agent.transport import MemoryTransport
from collage_optim import CollageAdamW
from collage_server.alerts import AlertEvaluator
from collage_server.settings import FixedLimits, Settings
from torch import distributed

from collage_monitor import wire
from collage_monitor.alerts import ALERTS
from tests.parallel.launch import launch
from tests.server.conftest import NOW, Clock, running
from tests.server.reads import current_samples, evaluate_due
from tests.waiting import PATIENCE_SECONDS

STEPS = 1000
EVERY = 10
ROUND_SECONDS = 150.0
ONSET = 700
"""Step at which what goes wrong in the middle of a training begins."""


@dataclass(frozen=True)
class Training:
    """One training: `optimizer` of the model's parameters, and what happens at a step before it is taken."""

    optimizer: Callable[[Any], torch.optim.Optimizer]
    width: int = 24
    batch: int = 64
    seconds_a_step: float = 6.0
    ranks: int = 1
    steps: int = STEPS
    dtype: torch.dtype = torch.bfloat16
    rate: Callable[[int], float] = field(default=lambda step: 1.0)
    scale: Callable[[int], float] = field(default=lambda step: 1.0)
    clip: float | None = None
    resume_at: int | None = None
    on_resume: Callable[[dict[str, Any]], None] = field(default=lambda state: None)
    before_step: Callable[[int, torch.nn.Module], None] = field(default=lambda step, model: None)
    first_loss: int = 0


def varied(training, seed):
    """A training of another size, batch, rate and pace, drawn by the seed."""
    draw = random.Random(seed)
    factor, rate = 2 ** draw.uniform(-1, 1), training.rate
    return replace(
        training,
        width=draw.choice((16, 24, 40)),
        batch=draw.choice((32, 64, 128)),
        seconds_a_step=draw.choice((4.0, 6.0, 9.0)),
        rate=lambda step: factor * rate(step),
    )


def cosine(step):
    """Warm-up over 50 steps, then a cosine to zero."""
    return min(step / 50, 0.5 * (1 + math.cos(math.pi * step / STEPS)))


def ours(strategy, lr=1e-3, **more):
    return lambda parameters: CollageAdamW(parameters, lr=lr, betas=(0.9, 0.95), strategy=strategy, **more)


def torchs(lr, betas=(0.9, 0.95), decay=0.0):
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=decay)


def drop_residuals(state):
    """A checkpoint that kept everything but the residuals."""
    for kept in state["state"].values():
        for name, value in kept.items():
            if "residual" in name or "low" in name:
                value.zero_()


def write_weights(step, model):
    if step >= ONSET and step % 100 == 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)


HEALTHY = {
    "light, warm-up and cosine to zero": Training(ours("light"), rate=cosine),
    "plus, clipped": Training(ours("plus"), clip=1.0),
    "full": Training(ours("full")),
    "fp32, decay": Training(torchs(1e-3, decay=0.1), dtype=torch.float32),
    "master weights, cosine to zero": Training(ours("master-weights"), rate=cosine),
    "light-stochastic": Training(ours("light-stochastic")),
    "plus, resumed": Training(ours("plus"), resume_at=600),
    "light, fine-tuned": Training(ours("light", lr=1e-4), first_loss=300),
}


def flip_a_bit(step, model):
    """The lowest bit of one weight of rank 1, before the step after ONSET."""
    if step == ONSET and distributed.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters()).view(torch.int16)[0, 0] ^= 1


FLIPPED_BIT = Training(ours("plus"), before_step=flip_a_bit, ranks=2)
SICK = {
    "rate too low for bf16": ("CollageEdqLow", 0, Training(torchs(1e-5))),
    "β₂ 0.999 in plain bf16": ("CollageSecondMomentStuck", 0, Training(torchs(1e-2, betas=(0.9, 0.999)))),
    "residual dropped at a resume": (
        "CollageResidualsOff",
        604,
        # No interval divides the first step after the resume, which alone shows it: the next ones fill them again.
        Training(ours("light"), resume_at=604, on_resume=drop_residuals),
    ),
    "exploding gradients": (
        "CollageGradientExploding",
        ONSET,
        Training(ours("plus"), scale=lambda step: min(1.05 ** max(step - ONSET, 0), 1e6)),
    ),
    "decay lost": ("CollageDecayLost", 0, Training(torchs(1e-3, decay=0.1))),
    "external write": ("CollageExternalWrites", ONSET, Training(ours("light"), before_step=write_weights)),
    "a replica's flipped bit": ("CollageReplicaMismatch", ONSET, FLIPPED_BIT),
    # EDQ is 0.97, and a third of the updates is lost.
    "plain bf16 at a high rate": ("CollageUpdatesLost", 0, Training(torchs(3e-3))),
}


def train(training, seed):
    """(stream, message) of one training, in the order of the steps."""
    if training.ranks == 1:
        return train_rank(training, seed)
    with tempfile.TemporaryDirectory() as folder:
        told = launch("flips.flipped", training.ranks, Path(folder), STUDY_SEED=str(seed))
    return sorted(chain(*told), key=lambda entry: getattr(entry[1], "step", 0))


def train_rank(training, seed, wrapped=lambda model: model):
    """What one rank told, attempt after attempt. wrapped: the model as several ranks train it."""
    torch.manual_seed(seed)
    width = training.width
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))
    teacher = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    if distributed.is_initialized():
        torch.manual_seed(1000 * seed + distributed.get_rank())
    model, trace = wrapped(model.to(training.dtype)), []
    state, first = None, 1
    if training.first_loss:
        _steps(training, model, teacher, training.optimizer(model.parameters()), range(1, training.first_loss))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for last in filter(None, (training.resume_at, training.steps)):
            optimizer = training.optimizer(model.parameters())
            if state is not None:
                training.on_resume(state)
                optimizer.load_state_dict(state)
            transport = MemoryTransport()
            with collage.init("p", "r", run_id=f"r{seed}", dir=folder, transport=transport):
                collage.watch(model, optimizer, every=EVERY, budget=None, sample="all", first_step=first)
                _steps(training, model, teacher, optimizer, range(first, last + 1), collage.log)
            trace += _told(transport.messages)
            state, first = copy.deepcopy(optimizer.state_dict()), last + 1
    return trace


def _told(messages):
    stream_id = ""
    for message in messages:
        if isinstance(message, wire.StreamCreate):
            stream_id = message.stream_id
        if isinstance(message, wire.ReportBatch):
            yield from ((stream_id, report) for report in message.reports)
        elif not isinstance(message, wire.RunUpdate):
            yield stream_id, message


def _steps(training, model, teacher, optimizer, steps, log=lambda values: None):
    base = [group["lr"] for group in optimizer.param_groups]
    for step in steps:
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * training.rate(step)
        inputs = torch.randn(training.batch, training.width)
        wanted = teacher(inputs) + 0.1 * torch.randn(training.batch, training.width)
        loss = (model(inputs.to(training.dtype)).float() - wanted).square().mean() * training.scale(step)
        loss.backward()
        values = {"loss": loss.detach()}
        if training.clip is not None:
            values["grad_norm_unclipped"] = torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        training.before_step(step, model)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            log(values)


def evaluate(trace, seconds_a_step):
    """What fires of one training: (alert, severity, step at which it fired), in their order."""
    return [(entry.alert, entry.severity, entry.step) for entry in incidents_of(trace, seconds_a_step)]


def incidents_of(
    trace, seconds_a_step, *, began=NOW, round_seconds=ROUND_SECONDS, looked_at=lambda now, samples: None
):
    """The server's own incidents of one training, in their order.

    looked_at: is told when each round of the evaluation was, and what it read.
    """
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(began)
        settings = Settings(folder=Path(folder), no_auth=True, alerts="off")
        with running(settings, clock=clock, limits=FixedLimits(seal_interval_seconds=3600)) as server:
            server.app.state.collage.summariser.stop(PATIENCE_SECONDS)
            _replay(server, trace, seconds_a_step, round_seconds, looked_at)
            return server.get("/events?limit=1000", wire.IncidentPage).events[::-1]


def _replay(server, trace, seconds_a_step, round_seconds, looked_at):
    """Send what was told, on a clock that moves with the steps; seal and judge once a round."""
    app_state = server.app.state.collage

    def read():
        samples = list(current_samples(app_state))
        looked_at(server.clock.now, samples)
        return samples

    work = AlertEvaluator(
        app_state.store, read, ALERTS.values(), clock=server.clock, interval_seconds=round_seconds
    )
    began, due, run_id = server.clock.now, server.clock.now + round_seconds, ""
    held: dict[str, list[wire.Report]] = defaultdict(list)
    for stream_id, message in trace:
        if isinstance(message, wire.Report):
            moment = began + message.step * seconds_a_step
            while moment >= due:
                server.clock.now = due
                _send(server, held)
                app_state.sealer.do_due_work()
                evaluate_due(app_state.store, 1)
                work.do_due_work()
                due += round_seconds
            server.clock.now = moment
            held[stream_id].append(message)
            continue
        _send(server, held)
        if isinstance(message, wire.RunCreate):
            server.post("/projects/p/runs", message, status=200 if run_id else 201)
            run_id = message.run_id
        else:
            kind = "attempts" if isinstance(message, wire.AttemptCreate) else "streams"
            server.post(f"/runs/{run_id}/{kind}", message)


def _send(server, held):
    for stream_id, reports in held.items():
        server.reports(reports, stream_id)
    held.clear()
