"""Several optimizers under one watch: iterations are counted, and one report holds the layers of all."""

import collage_agent as collage
import numpy as np
import pytest
import torch
from collage_agent.handle import watch
from collage_agent.intent import intent_choice
from collage_agent.transport import MemoryTransport
from collage_agent.watching.hooks import OptimizerHooks
from collage_agent.watching.iterations import Iterations
from collage_optim import CollageAdamW
from torch import nn

from collage_monitor.wire import StreamCreate
from tests.agent.test_watch import Recorder
from tests.agent.training import mlp, mlp_loss, train

pytestmark = pytest.mark.slow


def totals_by_layer(measurement):
    block = measurement.table().array
    statistics = measurement.layout.statistics
    return {
        layer.name: dict(zip(statistics, block[:, column], strict=True))
        for column, layer in enumerate(measurement.layout.layers)
    }


def assert_same_totals(found, expected):
    """Layer by layer and bit by bit; the agent's own buckets differ, which no total shows."""
    found, expected = totals_by_layer(found), totals_by_layer(expected)
    assert found.keys() == expected.keys()
    for name, totals in expected.items():
        for key, value in totals.items():
            if not np.isnan(value):
                assert found[name][key] == pytest.approx(value, rel=1e-13, abs=0), (name, key)
            else:
                assert np.isnan(found[name].get(key, np.nan)), (name, key)


def in_backward(model, make):
    """An optimizer for each parameter, stepped as soon as its gradient is there; gradients are freed at once."""
    optimizers = {parameter: make([parameter]) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return optimizers


MAKERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "ours": lambda p: CollageAdamW(p, lr=1e-3, strategy="plus"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_steps_within_the_backward_pass_report_what_the_plain_loop_does(name):
    plain, model = mlp(), mlp()
    expected, found = Recorder(), Recorder()
    optimizer = MAKERS[name](plain.parameters())
    watch(plain, optimizer, every=2, sample=512, budget=None, oracle=True, reporter=expected)
    train(plain, optimizer, 6)
    optimizers = in_backward(model, MAKERS[name])
    handle = watch(model, optimizers, every=2, sample=512, budget=None, oracle=True, reporter=found)
    for step in range(6):
        mlp_loss(model, step).backward()
        assert handle.step == step + 1
    assert [measurement.step for measurement in found.measurements] == [1, 2, 4, 6]
    for mine, theirs in zip(found.measurements, expected.measurements, strict=True):
        assert_same_totals(mine, theirs)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    assert handle.info.optimizer == type(optimizer).__name__
    assert handle.info.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_call_that_is_not_measured_looks_at_nothing(monkeypatch):
    model = mlp()
    optimizers = in_backward(model, MAKERS["AdamW"])
    watch(model, list(optimizers.values()), every=5)
    looks = []
    monkeypatch.setattr(OptimizerHooks, "_gather_before", lambda *arguments, **_: looks.append(arguments))
    mlp_loss(model, 0).backward()
    assert len(looks) == len(optimizers)
    looks.clear()
    for step in range(1, 4):
        mlp_loss(model, step).backward()
    assert looks == []
    mlp_loss(model, 4).backward()
    assert len(looks) == len(optimizers)


def test_optimizers_with_equal_settings_share_one_self_test(monkeypatch):
    tests = []
    original = intent_choice._intent_of_group

    def counted(*arguments):
        tests.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(intent_choice, "_intent_of_group", counted)
    model = mlp()
    rates = iter((1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-4))
    watch(model, in_backward(model, lambda p: torch.optim.AdamW(p, lr=next(rates))))
    assert len(tests) == 2


def test_two_kinds_of_optimizers_share_one_watch(tmp_path):
    """Muon for matrices, AdamW for the rest, each stepped every iteration."""
    transport = MemoryTransport()
    model = mlp()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]
    with collage.init("loops", transport=transport, dir=tmp_path):
        handle = collage.watch(model, optimizers, every=2, budget=None)
        for step in range(6):
            model.zero_grad()
            mlp_loss(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            collage.log({"loss": float(step)})
    assert handle.step == 6
    assert handle.info.optimizer == "Muon + AdamW"
    seen = handle.info.fingerprint
    assert seen is not None
    assert seen.parameters == {"bfloat16": sum(parameter.numel() for parameter in model.parameters())}
    assert {"momentum_buffer", "exp_avg"} <= seen.states.keys()
    reports = [report for report in transport.reports if report.statistics is not None]
    assert [report.step for report in reports] == [1, 2, 4, 6]
    stream = [message for message in transport.messages if isinstance(message, StreamCreate)][-1]
    assert {layer.name for layer in stream.layers} == {name for name, _ in model.named_parameters()}
    layers = handle.summary()["layers"]
    assert all(values["effective_norm"] > 0 for values in layers.values())
    assert layers["0.bias"]["edq_ratio"] is not None
    assert repr(handle) == "<Watch of Muon + AdamW, 6 layers, at step 6>"


def test_an_optimizer_that_has_no_gradient_ends_the_iteration_late():
    model, recorder = mlp(), Recorder()
    optimizers = [torch.optim.AdamW(model[index].parameters(), lr=1e-3) for index in (0, 2, 4)]
    handle = watch(model, optimizers, every=2, budget=None, reporter=recorder)
    for step in range(6):
        model.zero_grad()
        mlp_loss(model, step).backward()
        for optimizer in optimizers if step % 2 else optimizers[:2]:
            optimizer.step()
        assert handle.step == step + 1
    assert [measurement.step for measurement in recorder.measurements] == [1, 2, 4, 6]
    for optimizer in optimizers[:2]:
        optimizer.step()
    optimizers[0].step()
    optimizers[1].step()
    assert (handle.step, len(recorder.measurements)) == (8, 4)
    handle.remove()
    assert recorder.measurements[-1].step == 8
    assert np.isnan(totals_by_layer(recorder.measurements[-1])["4.weight"]["elements"])
    assert totals_by_layer(recorder.measurements[-1])["2.weight"]["elements"] == model[2].weight.numel()


def test_a_run_is_resumed_behind_the_longest_state():
    model = mlp()
    optimizers = [torch.optim.AdamW(model[index].parameters(), lr=1e-3) for index in (0, 2)]
    for _ in range(3):
        mlp_loss(model, 0).backward()
        optimizers[1].step()
    handle = watch(model, optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert handle.step == 4


def test_skipped_steps_of_several_are_counted_once():
    model = mlp(dtype=torch.float32)
    optimizers = [torch.optim.AdamW(model[index].parameters(), lr=1e-3) for index in (0, 2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    handle = watch(model, optimizers, every=1)
    for step in range(4):
        model.zero_grad()
        scaler.scale(mlp_loss(model, step)).backward()
        if step == 2:
            for index in (0, 2):
                model[index].weight.grad[0, 0] = torch.inf
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert handle.summary()["model"]["skipped_steps"] == 1
    assert handle.step == 3


def test_parameters_that_no_module_knows_keep_names_of_their_own():
    loose = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in loose]
    handle = watch(nn.Identity(), optimizers, every=1)
    for parameter, optimizer in zip(loose, optimizers, strict=True):
        parameter.grad = torch.ones(3)
        optimizer.step()
    assert set(handle.summary()["layers"]) == {"group0.0", "optimizer1.group0.0"}


def test_a_parameter_of_two_optimizers_is_refused():
    model = mlp()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=0.1)]
    with pytest.raises(ValueError, match="0 and 1 both step a parameter of shape"):
        watch(model, optimizers)


def test_iterations_are_counted_in_any_order():
    over: list[int] = []
    iterations = Iterations(3, lambda: 10, over.append)
    seen = []
    for member in (0, 1, 2, 2, 0, 1, 1, 1, 2):
        seen.append(iterations.begin_step(member))
        iterations.measured = True
        iterations.end_step(member)
    assert seen == [11, 11, 11, 12, 12, 12, 13, 14, 14]
    assert over == [11, 12, 13]
    iterations.end()
    assert (over, iterations.step) == ([11, 12, 13, 14], 14)
