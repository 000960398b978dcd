"""Training loops as people write them: each is measured right, and the step is counted right."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import collage_agent as collage
import pytest
import torch
from collage_agent.handle import watch
from collage_agent.transport import MemoryTransport
from collage_optim import CollageAdamW
from torch import nn

from collage_monitor.wire import StreamCreate
from tests.agent.training import gpt_loss, mlp, mlp_loss, small_gpt, train
from tests.reference.intended import full_precision_update

pytestmark = pytest.mark.slow


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options})


def norm_of(updates):
    return sum(float(u.square().sum()) for u in updates.values()) ** 0.5


def test_accumulated_and_clipped_gradients_are_those_of_one_step():
    model = mlp()
    optimizer = adamw(model)
    handle = watch(model, optimizer, every=1, sample="all")
    for step in range(4):
        for part in range(3):
            (mlp_loss(model, 3 * step + part) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        expected = norm_of(full_precision_update(optimizer))
        clipped = sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5
        optimizer.step()
        optimizer.zero_grad()
        values = handle.summary()["model"]
        assert handle.step == step + 1
        assert values["intended_norm"] == pytest.approx(expected, rel=1e-9)
        assert values["grad_norm"] == pytest.approx(clipped, rel=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_loss_scaler_skips_are_counted(fused):
    model = mlp(dtype=torch.float32)
    optimizer = adamw(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    handle = watch(model, optimizer, every=1, sample="all", oracle=True)
    other = adamw(mlp(dtype=torch.float32))
    unscaled = watch(mlp(dtype=torch.float32), torch.optim.SGD(other.param_groups[0]["params"], lr=0.1))
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(mlp_loss(model, step)).backward()
        if step in (1, 4):
            model[0].weight.grad[0, 0] = torch.nan
        scaler.step(optimizer)
        scaler.update()
    values = handle.summary()["model"]
    assert values["skipped_steps"] == 2
    assert values["oracle_displacement_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert "skipped_steps" not in unscaled.summary()["model"]
    assert int(optimizer.state[model[0].weight]["step"]) == 4
    if not fused:
        assert handle.step == 4


def test_skipped_steps_travel_with_the_reports(tmp_path):
    transport = MemoryTransport()
    with collage.init("loops", transport=transport, dir=tmp_path):
        model = mlp(dtype=torch.float32)
        optimizer = adamw(model, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        collage.watch(model, optimizer, every=1)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(mlp_loss(model, step)).backward()
            if step == 1:
                model[0].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    counted = [report.scalars["skipped_steps"] for report in transport.reports if report.statistics is not None]
    assert counted == [0.0, 1.0, 1.0]


def test_several_optimizers_of_one_run_each_keep_their_layers_and_steps(tmp_path):
    transport = MemoryTransport()
    with collage.init("loops", transport=transport, dir=tmp_path):
        model = mlp()
        first = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
        second = torch.optim.SGD(model[2].parameters(), lr=1e-2)
        handles = [collage.watch(model, optimizer, every=2, budget=None) for optimizer in (first, second)]
        for step in range(8):
            mlp_loss(model, step).backward()
            first.step()
            if step % 2:
                second.step()
            model.zero_grad()
    assert [handle.step for handle in handles] == [8, 4]
    assert [set(handle.summary()["layers"]) for handle in handles] == [
        {"0.weight", "0.bias"},
        {"2.weight", "2.bias"},
    ]
    stream = [message for message in transport.messages if isinstance(message, StreamCreate)][-1]
    assert {layer.name for layer in stream.layers} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_frozen_tied_and_later_added_parameters():
    model = small_gpt()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad and p is not model.norm.weight]
    optimizer = torch.optim.AdamW([*trained, *model.blocks[0].parameters()], lr=1e-3)
    handle = watch(model, optimizer, every=1, sample="all", oracle=True)
    train(model, optimizer, 2, gpt_loss)
    layers = handle.summary()["layers"]
    frozen = [name for name in layers if name.startswith("blocks.0.")]
    assert len(frozen) == 12
    assert all(layers[name].get("edq_ratio") is None for name in frozen)
    assert "norm.weight" not in layers
    assert "head.weight" not in layers
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": [model.norm.weight], "lr": 1e-2})
    train(model, optimizer, 3, gpt_loss, start=2)
    values = handle.summary()
    assert all(values["layers"][name]["edq_ratio"] is not None for name in (*frozen, "norm.weight"))
    assert values["model"]["elements"] == sum(p.numel() for p in model.parameters())


def train_compiled(make, what, watched):
    """(model, handle or None) after three steps of a compiled model, or of a compiled step."""
    model = mlp()
    optimizer = make(model.parameters(), lr=1e-3)
    compiled: Any = torch.compile(model, backend="eager") if what == "model" else model
    handle = watch(compiled, optimizer, every=1, sample="all") if watched else None
    step = torch.compile(optimizer.step, backend="eager") if what == "step" else optimizer.step
    for index in range(3):
        optimizer.zero_grad()
        mlp_loss(compiled, index).backward()
        step()
    return model, handle


# The compiler warns about its own use of TorchScript.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("model", CollageAdamW),
        ("step", torch.optim.AdamW),
        pytest.param("model", torch.optim.AdamW, marks=pytest.mark.nightly),
        pytest.param("step", CollageAdamW, marks=pytest.mark.nightly),
    ],
)
def test_compiled_models_and_steps_are_measured_as_others(make, what):
    model, handle = train_compiled(make, what, True)
    alone, _ = train_compiled(make, what, False)
    plain_model = mlp()
    plain = make(plain_model.parameters(), lr=1e-3)
    expected = watch(plain_model, plain, every=1, sample="all")
    train(plain_model, plain, 3)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert handle.step == 3
    told, wanted = handle.summary(), expected.summary()
    assert list(told["layers"]) == list(wanted["layers"])
    # A compiled step may round its scalars otherwise, and the weights then part by a few units in the last place.
    for key in ("intended_norm", "effective_norm", "grad_norm", "param_norm", "edq_ratio"):
        assert told["model"][key] == pytest.approx(wanted["model"][key], rel=1e-2), key


def test_a_rate_schedule_is_no_reason_to_attach_anew():
    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
    handle = watch(model, optimizer, every=1, oracle=True, budget=None)
    train(model, optimizer, 8, scheduler=scheduler)
    assert handle.summary()["model"]["oracle_steps"] == 8


def test_an_allocation_that_fails_in_the_agent_switches_it_off_and_training_goes_on(monkeypatch):
    from collage_agent import error_guard
    from collage_agent.step.gather import Staging

    def full(*_):
        raise torch.OutOfMemoryError("no room for the sample")

    error_guard.raise_in_tests(False)
    expected_model, model = mlp(), mlp()
    expected, optimizer = adamw(expected_model), adamw(model)
    losses = train(expected_model, expected, 5)
    handle = watch(model, optimizer, every=1, oracle=True)
    monkeypatch.setattr(Staging, "__init__", full)
    assert train(model, optimizer, 5) == losses
    assert handle.step == 5
    assert "no room for the sample" in handle.info.intent_reason


def child_trains(connection, model, optimizer, handle):
    torch.set_num_threads(1)
    losses = train(model, optimizer, 3, start=2)
    connection.send((losses, handle.step, handle.summary()["step"], os.getpid()))


def test_a_forked_child_trains_and_is_measured_on_its_own():
    model = mlp()
    optimizer = adamw(model)
    handle = watch(model, optimizer, every=1)
    train(model, optimizer, 2)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=child_trains, args=(there, model, optimizer, handle))
    child.start()
    assert here.poll(60)
    losses, step, measured, process = here.recv()
    child.join()
    assert (step, measured) == (5, 5)
    assert process != os.getpid()
    assert handle.step == 2
    assert train(model, optimizer, 3, start=2) == losses
