"""Steps that raise and optimizers that are copied: training goes on, and what follows is measured as ever."""

import copy
from typing import Any

import pytest
import torch
from collage_agent.handle import watch
from collage_optim import CollageAdamW

from tests.agent.step.test_measurer import totals_of
from tests.agent.test_watch import Recorder
from tests.agent.training import mlp, mlp_loss, train

MAKERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True),
    "plus": lambda p: CollageAdamW(p, lr=1e-3, weight_decay=0.1, strategy="plus"),
}
OPTIONS: Any = {"every": 1, "sample": "all", "oracle": True, "windows": (4,)}


class OutOfLuck(RuntimeError):
    """The step fails."""


def out_of_luck(*_):
    raise OutOfLuck


def assert_same_totals(found, expected, rel):
    for layer, totals in totals_of(expected).items():
        own = {key: totals_of(found)[layer][key] for key in totals}
        assert own == pytest.approx(totals, rel=rel, abs=0, nan_ok=True), layer


def fail(model, optimizer, step, written=0):
    """A step that raises when the first `written` parameters have moved already; the loop goes on."""

    def raising(*_):
        with torch.no_grad():
            for parameter in list(model.parameters())[:written]:
                parameter.sub_(parameter * 2**-5)
        raise OutOfLuck

    hook = optimizer.register_step_pre_hook(raising)
    with pytest.raises(OutOfLuck):
        train(model, optimizer, 1, start=step)
    hook.remove()


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("written", [0, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_the_step_after_one_that_raised_is_measured_as_if_it_had_not_been(name, written):
    watched, plain = mlp(), mlp()
    optimizer, other = MAKERS[name](watched.parameters()), MAKERS[name](plain.parameters())
    recorder = Recorder()
    handle = watch(watched, optimizer, reporter=recorder, **OPTIONS)
    for model, stepping in ((watched, optimizer), (plain, other)):
        train(model, stepping, 6)
        fail(model, stepping, 6, written)
    assert handle.step == 6
    fresh = watch(plain, other, first_step=7, **OPTIONS)
    train(watched, optimizer, 1, start=7)
    train(plain, other, 1, start=7)
    assert handle.step == fresh.step == 7
    assert_same_totals(handle, fresh, rel=1e-12)
    train(watched, optimizer, 9, start=8)
    train(plain, other, 9, start=8)
    assert recorder.steps == list(range(1, 17))
    assert handle.summary()["model"]["edq_window_ratio/4"] is not None
    for one, same in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, same)


@pytest.mark.slow
def test_of_several_optimizers_the_one_that_raised_starts_anew():
    model = mlp()
    parameters = list(model.parameters())
    optimizers = [MAKERS["AdamW"](parameters[:3]), MAKERS["AdamW"](parameters[3:])]
    recorder = Recorder()
    handle = watch(model, optimizers, reporter=recorder, **OPTIONS)

    for step in range(16):
        model.zero_grad()
        mlp_loss(model, step).backward()
        optimizers[0].step()
        if step == 13:
            hook = optimizers[1].register_step_pre_hook(out_of_luck)
            with pytest.raises(OutOfLuck):
                optimizers[1].step()
            hook.remove()
        else:
            optimizers[1].step()
    assert handle.step == 16
    assert recorder.steps == list(range(1, 17))
    layers = handle.summary()["layers"]
    names = [name for name, _ in model.named_parameters()]
    assert [layers[name]["oracle_steps"] for name in names] == 3 * [16] + 3 * [2]
    assert [layers[name].get("edq_window_ratio/4") is None for name in names] == 3 * [False] + 3 * [True]


@pytest.mark.slow
@pytest.mark.drawn(by=lambda name: (name == "plus",))
@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_in_mid_run_goes_its_own_way_and_the_watch_stays(name):
    """As for an evaluation by fine-tuning, or an average of weights: within a window, the oracle running."""
    model, untouched = mlp(), mlp()
    optimizer, same = MAKERS[name](model.parameters()), MAKERS[name](untouched.parameters())
    found, expected = Recorder(), Recorder()
    handle = watch(model, optimizer, reporter=found, **OPTIONS)
    alone = watch(untouched, same, reporter=expected, **OPTIONS)
    train(model, optimizer, 14)
    train(untouched, same, 14)
    average = copy.deepcopy(model)
    copied_model, copied = copy.deepcopy((model, optimizer))
    other = watch(copied_model, copied, **OPTIONS)
    train(copied_model, copied, 2, start=14)
    assert (handle.step, other.step) == (14, 16)
    train(model, optimizer, 2, start=14)
    train(untouched, same, 2, start=14)
    assert found.steps == expected.steps == list(range(1, 17))
    assert_same_totals(handle, alone, rel=0)
    assert handle.summary()["model"]["oracle_steps"] == 16
    assert other.summary()["model"]["oracle_steps"] == 2
    weights = zip(model.parameters(), copied_model.parameters(), average.parameters(), strict=True)
    for one, copied_one, start in weights:
        assert torch.equal(one, copied_one)
        assert not torch.equal(one, start) or one.numel() < 10
