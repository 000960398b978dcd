"""The oracle against an fp64 optimizer that trains beside on the same gradients, whole tensors."""

from functools import partial

import pytest
import torch
from collage_agent import error_guard
from collage_agent.step.bucket import Bucket
from collage_optim import STRATEGIES, CollageAdamW

from tests.agent.test_watch import Recorder
from tests.agent.training import backward, mlp, train, watched


def flat(tensors):
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        partial(torch.optim.NAdam, lr=1e-3),
    ],
    ids=["AdamW", "SGD", "NAdam"],
)
def test_the_oracle_is_an_fp64_optimizer_fed_the_same_gradients(make):
    """fp64 copies of all weights are stepped by an optimizer of their own with the live gradients."""
    model, optimizer, handle = watched(make, mlp(width=30), oracle=True)
    live = list(model.parameters())
    start, twins = flat(live), [torch.nn.Parameter(own.detach().double()) for own in live]
    companion = make(twins)
    for step in range(12):
        backward(model, step)
        for twin, own in zip(twins, live, strict=True):
            twin.grad = own.grad.double()
        before = flat(twins), flat(live)
        companion.step()
        optimizer.step()
        o, e = flat(twins) - before[0], flat(live) - before[1]
    values = handle.summary()["model"]
    ours, theirs = flat(twins) - start, flat(live) - start
    assert values["oracle_steps"] == 12
    assert values["edq_oracle_ratio"] == pytest.approx(float(o @ e / (o @ o)), rel=1e-8)
    assert values["oracle_displacement_ratio"] == pytest.approx(float(ours @ theirs / (ours @ ours)), rel=1e-8)
    assert values["oracle_drift_ratio"] == pytest.approx(float((theirs - ours).norm() / ours.norm()), rel=1e-8)


def test_the_oracle_follows_a_sample_of_large_tensors_and_its_interval_is_open():
    _, _, handle = watched(model=mlp(width=90), every=2, oracle=True, steps=6)
    layers = handle.summary()["layers"]
    low, high = (layers["2.weight"][f"edq_oracle_ratio_{end}"] for end in ("low", "high"))
    assert low < layers["2.weight"]["edq_oracle_ratio"] < high
    assert layers["2.bias"]["edq_oracle_ratio_low"] == layers["2.bias"]["edq_oracle_ratio_high"]


@pytest.mark.parametrize("before", [2, 0])
def test_tensors_that_skip_steps_are_stepped_by_the_oracle_only_when_they_are_live(before):
    """A layer that was frozen at first was left out for good, and the rest's number was called the model's."""
    model, optimizer, handle = watched(model=mlp(width=30), sample="all", oracle=True, steps=before)
    model[2:].requires_grad_(False)
    train(model, optimizer, 3, start=before)
    model[2:].requires_grad_(True)
    train(model, optimizer, 4, start=before + 3)
    layers = handle.summary()["layers"]
    assert {name: values["oracle_steps"] for name, values in layers.items()} == {
        name: before + 4 + 3 * name.startswith("0.") for name in layers
    }
    assert layers["2.weight"]["oracle_displacement_ratio"] == pytest.approx(1.0, abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("write", ["data", "counted"])
def test_weights_written_between_steps_restart_the_oracle_and_are_counted(write):
    model, optimizer, handle = watched(every=2, oracle=True, steps=4)
    assert handle.summary()["model"]["oracle_steps"] == 4
    weight = next(model.parameters())
    if write == "data":
        weight.data.mul_(0.5)
    else:
        # As a checkpoint that is loaded: torch counts it, whatever the sample shows.
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    train(model, optimizer, 2, start=4)
    assert handle.summary()["model"]["oracle_steps"] == 2
    assert handle._last.scalars["oracle_restarts"] == 1


@pytest.mark.slow
@pytest.mark.drawn(by=lambda strategy: (STRATEGIES[strategy].parameter,))
@pytest.mark.parametrize(
    "strategy", ["plain", "stochastic", "light", "plus", "master-weights", "split-master", "split-24bit-8bit"]
)
def test_no_restart_without_a_write(strategy):
    _, _, handle = watched(partial(CollageAdamW, lr=1e-2, strategy=strategy), oracle=True, steps=12)
    assert handle.summary()["model"]["oracle_steps"] == 12
    assert "oracle_restarts" not in handle._last.scalars


def test_oracles_attach_anew_after_a_failure_before_the_step(monkeypatch):
    """A step that they may have missed, because looking at the optimizer failed, is never counted as taken."""
    recorder = Recorder()
    model, optimizer, _ = watched(sample=64, oracle=True, reporter=recorder, steps=3)

    def fails(*arguments, **options):
        raise ValueError("no look at this step")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "gather_before", fails)
        error_guard.raise_in_tests(False)
        train(model, optimizer, 1, start=3)
    error_guard.raise_in_tests(True)
    train(model, optimizer, 2, start=4)
    last = recorder.measurements[-1]
    assert recorder.steps == [1, 2, 3, 5, 6]
    assert last.scalars["oracle_restarts"] == 1
    assert last.table()["oracle_steps"].max() == 2
