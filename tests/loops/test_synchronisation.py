"""The agent's frames on the training thread read no tensor back: nothing of theirs can wait for a device."""

from __future__ import annotations

import collage_agent as collage
import pytest
import pytorch_optimizer
import torch
from collage_agent.handle import watch
from collage_agent.step.measurer import StepMeasurer
from collage_agent.transport import MemoryTransport
from collage_optim import CollageAdamW, CollageSGD

from tests.agent.training import gpt_loss, mlp, mlp_loss, small_gpt
from tests.loops.readers import AGENT, ReadBack, reading_is_forbidden

pytestmark = pytest.mark.slow

MAKERS = {
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "whole tensors": lambda p: pytorch_optimizer.CAME(p, lr=1e-3),
    "CollageAdamW": lambda p: CollageAdamW(p, lr=1e-3, strategy="plus"),
    "CollageSGD": lambda p: CollageSGD(p, lr=1e-3, momentum=0.9, strategy="light"),
}
STEPS = 8
COUNTERS = frozenset(range(STEPS + 2)) | {1e-3, float(torch.tensor(1e-3))}
"""Numbers of steps, and the learning rate where it is a tensor on the host."""


def train(model, optimizer, steps=STEPS, scaler=None, loss_of=gpt_loss):
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.drawn(by=lambda name: ("Collage" in name, name in ("whole tensors", "AdamW tensor rate") and name))
@pytest.mark.parametrize("name", MAKERS)
def test_measured_steps_read_nothing_back(name):
    model = small_gpt(layers=1)
    optimizer = MAKERS[name](model.parameters())
    handle = watch(model, optimizer, every=2, sample=512, oracle=True, windows=(2,), budget=None)
    with reading_is_forbidden(COUNTERS):
        train(model, optimizer)
    summary = handle.summary()
    assert summary["step"] == STEPS
    assert name in ("Adafactor", "whole tensors") or summary["model"]["edq_window_ratio/2"] is not None
    whole = summary["model"]["sampled"] == summary["model"]["elements"]
    assert whole == (name == "whole tensors")


def test_steps_within_the_backward_pass_read_nothing_back():
    model = small_gpt(layers=1)
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: optimizers[own].step())
    handle = watch(model, optimizers, every=2, sample=512, oracle=True, windows=(2,), budget=None)
    with reading_is_forbidden(COUNTERS):
        for step in range(STEPS):
            model.zero_grad()
            gpt_loss(model, step).backward()
    assert handle.summary()["step"] == STEPS


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler_s_verdict_is_not_read(fused):
    model = small_gpt(dtype=torch.float32, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    handle = watch(model, optimizer, every=1, oracle=True, budget=None)
    with reading_is_forbidden(COUNTERS):
        train(model, optimizer, scaler=scaler)
    assert handle.summary()["step"] == STEPS


def test_logging_and_reporting_read_nothing_back_here(tmp_path):
    transport = MemoryTransport()
    with collage.init("loops", transport=transport, dir=tmp_path):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        collage.watch(model, optimizer, every=1, oracle=True)
        with reading_is_forbidden(COUNTERS):
            for step in range(STEPS):
                loss = mlp_loss(model, step)
                loss.backward()
                optimizer.step()
                collage.log({"loss": loss})
    assert {report.step for report in transport.reports} == set(range(1, STEPS + 1))
    assert all("loss" in report.scalars for report in transport.reports)


@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "__bool__", "__float__"])
def test_a_reader_would_be_caught(read, monkeypatch):
    """A watch whose look reads the sum of a gradient raises under the rule, so the rule can fail."""
    model = mlp(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch(model, optimizer, every=1)
    source = f"def peek(tensor):\n    return tensor.sum().{read}()\n"
    scope: dict = {}
    exec(compile(source, f"{AGENT}/peek.py", "exec"), scope)
    original = StepMeasurer.before

    def curious(measurer, stepping, **options):
        scope["peek"](measurer.watched[0].parameter.grad)
        return original(measurer, stepping, **options)

    monkeypatch.setattr(StepMeasurer, "before", curious)
    with reading_is_forbidden(COUNTERS), pytest.raises(ReadBack):
        train(model, optimizer, 1, loss_of=mlp_loss)
