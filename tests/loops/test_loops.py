"""Training loops as people write them: each is measured right, and the step is counted right."""

import copy
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
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from collage_monitor.wire import AttemptCreate, StreamCreate
from tests.agent.training import gpt_loss, mlp, mlp_loss, small_gpt, train
from tests.integrations.trainings import assert_same_training, recorded
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


@pytest.mark.parametrize(("fused", "reported"), [(False, [None, 1, 1, 2]), (True, [0, 1, 1, 1, 2, 2])])
def test_steps_that_a_loss_scaler_skips_are_counted_and_travel_with_the_reports(tmp_path, fused, reported):
    model, other = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    optimizer = adamw(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    unscaled = watch(other, torch.optim.SGD(other.parameters(), lr=0.1))
    transport = MemoryTransport()
    with collage.init("loops", transport=transport, dir=tmp_path):
        handle = collage.watch(model, optimizer, every=1, sample="all", oracle=True, budget=None)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(mlp_loss(model, step)).backward()
            if step in (1, 4):
                model[0].weight.grad[0, 0] = torch.nan if step == 1 else torch.inf
            scaler.step(optimizer)
            scaler.update()
    measured = [report.scalars for report in transport.reports if report.statistics is not None]
    assert [scalars.get("skipped_steps") for scalars in measured] == reported
    values = handle.summary()["model"]
    assert values["skipped_steps"] == 2
    assert values["oracle_displacement_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert "skipped_steps" not in unscaled.summary()["model"]
    assert int(optimizer.state[model[0].weight]["step"]) == 4
    if not fused:
        assert handle.step == 4


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


def stepped(*, closure, watched, positional=False, make=adamw, dtype=torch.bfloat16):
    model = mlp(dtype=dtype)
    optimizer = make(model)
    handle = watch(model, optimizer, every=3, sample="all", oracle=True) if watched else None
    losses = []
    for step in range(12):

        def evaluate(step=step):
            optimizer.zero_grad()
            loss = mlp_loss(model, step)
            loss.backward()
            return loss

        if not closure:
            evaluate()
            optimizer.step()
            continue
        loss = optimizer.step(evaluate) if positional else optimizer.step(closure=evaluate)
        losses.append(float(loss.detach()))
    return handle, recorded(model, optimizer, losses)


@pytest.mark.parametrize("positional", [True, False])
def test_a_closure_changes_no_number_and_is_left_as_it_is(positional):
    """As Lightning's steps take one."""
    plain, _ = stepped(closure=False, watched=True)
    closed, with_agent = stepped(closure=True, watched=True, positional=positional)
    _, without = stepped(closure=True, watched=False, positional=positional)
    assert_same_training(without, with_agent)
    assert closed.info.intent == plain.info.intent == "shadow"
    assert closed.summary() == plain.summary()
    assert closed.summary()["model"]["edq_ratio"] is not None


def test_a_closure_that_is_evaluated_again_leaves_only_what_changed():
    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    _, without = stepped(closure=True, watched=False, make=lbfgs, dtype=torch.float32)
    handle, with_agent = stepped(closure=True, watched=True, make=lbfgs, dtype=torch.float32)
    assert_same_training(without, with_agent)
    assert handle.info.intent == "before-after"
    assert "repeatedly" in handle.info.intent_reason
    values = handle.summary()["model"]
    assert values["effective_norm"] > 0
    assert values["unchanged_ratio"] < 1
    for key in ("edq_ratio", "lost_update_ratio", "grad_norm", "intended_norm"):
        assert values.get(key) is None
    assert not any(key.startswith(("state_zero", "decay", "residual")) for key in values)
    assert "unknown" in str(handle)


def mlp_and_adamw(groups=1):
    model = mlp()
    members = list(model.parameters())
    return model, torch.optim.AdamW([{"params": members[first::groups]} for first in range(groups)], lr=1e-3)


def reported(tmp_path, model, optimizer, before_training):
    """The first step of the attempt, and the steps that are reported, of a watch that begins before."""
    transport = MemoryTransport()
    with collage.init("p", "r", dir=tmp_path, transport=transport):
        collage.watch(model, optimizer, every=1, budget=None)
        before_training()
        train(model, optimizer, 3)
    begun = [message.first_step for message in transport.messages if isinstance(message, AttemptCreate)]
    return begun, [report.step for report in transport.reports]


@pytest.mark.parametrize("groups", [1, 2])
def test_steps_go_on_where_states_are_loaded_after_the_watch_began(tmp_path, groups):
    """The attempt began at step 1, and hid all that the attempt before had shown."""
    model, optimizer = mlp_and_adamw(groups)
    train(model, optimizer, 50)
    kept = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    model, optimizer = mlp_and_adamw(groups)
    steps = reported(tmp_path, model, optimizer, lambda: set_optimizer_state_dict(model, optimizer, kept))
    assert steps == ([51], [51, 52, 53])


def test_a_training_that_is_saved_before_its_first_step_begins_with_step_1(tmp_path):
    model, optimizer = mlp_and_adamw()
    steps = reported(tmp_path, model, optimizer, lambda: get_optimizer_state_dict(model, optimizer))
    assert steps[0] in ([1], [2]), "torch's counter says 1 after its own step"
    assert len(steps[1]) == 3
