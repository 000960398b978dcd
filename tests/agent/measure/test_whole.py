"""Our own optimizers' totals of whole tensors stand in place of the sample's, exactly, while the budget allows."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from collage_agent.measure import whole as module
from collage_agent.measure.whole import WHOLE_STATISTICS
from collage_agent.optim import STEP_TOTALS, STRATEGIES, CollageAdamW, CollageLion, CollageSGD
from collage_agent.watch import watch
from collage_agent.watching import governor
from torch import nn

from collage_monitor.statistics import INTERVAL_PAIRS
from tests.agent.training import mlp, train
from tests.optim.models import give_gradients
from tests.reference.step_totals import step_totals, taken_down

SHAPES = {"large": (300, 50), "row": (7,), "one": (1,)}
SAMPLE = 1024
COUNTS = STEP_TOTALS[:10]
MAKERS: dict[str, Any] = {
    **{name: functools.partial(CollageAdamW, strategy=name) for name in STRATEGIES},
    "plus, storage": lambda p: CollageAdamW(p, strategy="plus", arithmetic="storage"),
    "plain, storage": lambda p: CollageAdamW(p, strategy="plain", arithmetic="storage"),
    "SGD, kahan": lambda p: CollageSGD(p, strategy="kahan", momentum=0.9, lr=1e-2),
    "Lion, light": lambda p: CollageLion(p, strategy="light"),
}


class Bare(nn.Module):
    """Parameters whose gradients the test gives."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype)))


def stepped(optimizer, model, steps, first=1):
    for step in range(first, first + steps):
        give_gradients(list(model.parameters()), step=step, scale=1e-3)
        optimizer.step()


def totals_of(handle, name):
    """{key: total} that the last measured step reported for one layer."""
    measurement = handle._last
    names = [layer.name for layer in measurement.layout.layers]
    return dict(zip(measurement.layout.statistics, measurement.to_numpy()[:, names.index(name)], strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_counts_are_exact_and_sums_within_a_hundred_thousandth(name, monkeypatch):
    model = Bare()
    optimizer = MAKERS[name](model.parameters())
    handle = watch(model, optimizer, every=4, sample=SAMPLE, budget=None)
    stepped(optimizer, model, 3)
    intentions = taken_down(monkeypatch)
    before = {key: (optimizer.stored_parameter(p), p.detach().double()) for key, p in model.named_parameters()}
    stepped(optimizer, model, 1, first=4)
    for index, (key, parameter) in enumerate(model.named_parameters()):
        stored, visible = before[key]
        effective = optimizer.stored_parameter(parameter) - stored
        expected = step_totals(intentions[index], effective, parameter.detach().double() - visible, parameter.grad)
        found = totals_of(handle, key)
        assert {count: found[count] for count in COUNTS} == {count: expected[count] for count in COUNTS}
        for total in STEP_TOTALS[10:]:
            assert found[total] == pytest.approx(expected[total], rel=1e-5, abs=1e-30), total
        assert found["sampled"] == parameter.numel()


def test_the_sample_of_the_same_step_agrees_with_the_whole():
    """Measured whole by the agent's own sums, in fp64, and by the optimizer's: the same step, two ways."""
    models = Bare(), Bare()
    optimizers = [CollageAdamW(model.parameters(), strategy="plus") for model in models]
    handles = [
        watch(models[0], optimizers[0], every=1, sample=SAMPLE, budget=None),
        watch(models[1], optimizers[1], every=1, sample="all"),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        stepped(optimizer, model, 5)
    for name in SHAPES:
        inside, outside = (totals_of(handle, name) for handle in handles)
        for total in STEP_TOTALS:
            assert inside[total] == pytest.approx(outside[total], rel=1e-5, abs=2), total


def test_intervals_have_no_width():
    model = Bare()
    optimizer = CollageAdamW(model.parameters(), strategy="plain")
    handle = watch(model, optimizer, every=1, sample=SAMPLE, budget=None)
    stepped(optimizer, model, 3)
    summary = handle.summary()
    for values in (summary["model"], *summary["layers"].values()):
        for name in set(INTERVAL_PAIRS) - {"edq_oracle_ratio"}:
            assert values[f"{name}_low"] == values[name] == values[f"{name}_high"]
            assert values[name] is not None
    assert 0 < summary["layers"]["large"]["lost_update_ratio"] < 1


def test_what_the_sample_alone_knows_stays_the_sample_s():
    models = Bare(), Bare()
    optimizers = [CollageAdamW(model.parameters(), strategy="plus") for model in models]
    handles = [
        watch(model, optimizer, every=1, sample=SAMPLE, budget=None, oracle=True)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    handles[1]._governor.whole = False
    for model, optimizer in zip(models, optimizers, strict=True):
        stepped(optimizer, model, 3)
    inside, sampled = (totals_of(handle, "large") for handle in handles)
    assert inside.keys() == sampled.keys()
    assert sampled["sampled"] == SAMPLE
    for key in inside.keys() - set(WHOLE_STATISTICS):
        assert inside[key] == sampled[key] or (math.isnan(inside[key]) and math.isnan(sampled[key])), key


def test_layers_left_out_and_parameters_without_gradient_stay_out():
    model = Bare()
    optimizer = CollageAdamW(model.parameters(), strategy="plus")
    handle = watch(model, optimizer, every=1, sample=SAMPLE, budget=None, layers=["large", "one"])
    for step in range(3):
        give_gradients(list(model.parameters()), step=step, scale=1e-3)
        model.one.grad = None
        optimizer.step()
    assert set(handle.summary()["layers"]) == {"large", "one"}
    assert totals_of(handle, "large")["sampled"] == 15_000
    assert math.isnan(totals_of(handle, "one")["elements"])


def test_a_smaller_sample_changes_nothing_about_whole_tensors():
    model = Bare()
    optimizer = CollageAdamW(model.parameters(), strategy="plus")
    handle = watch(model, optimizer, every=1, sample=4096, budget=None)
    stepped(optimizer, model, 2)
    handle._attached[0].meter.shrink_sample(SAMPLE)
    stepped(optimizer, model, 1, first=3)
    assert totals_of(handle, "large")["sampled"] == 15_000


def test_a_scaler_that_skips_leaves_the_last_totals_alone():
    model = mlp(dtype=torch.float32)
    optimizer = CollageAdamW(model.parameters(), strategy="plain")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    handle = watch(model, optimizer, every=1, sample=SAMPLE, budget=None)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 30)).square().mean()).backward()
        if step == 1:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    summary = handle.summary()
    assert (summary["step"], summary["model"]["skipped_steps"]) == (2, 1.0)
    assert summary["model"]["sampled"] == summary["model"]["elements"]
    assert summary["model"]["edq_ratio"] == pytest.approx(1.0, abs=1e-3)


def test_a_closure_is_measured_whole_and_not_timed_with_the_step(monkeypatch):
    clock = Clock(monkeypatch)
    model = mlp()
    optimizer = CollageAdamW(model.parameters(), strategy="plus")
    handle = watch(model, optimizer, every=2, sample=SAMPLE, budget=None)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 30, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        clock.now += 100.0
        return loss

    for _ in range(4):
        optimizer.step(closure)
    assert handle.summary()["model"]["sampled"] == handle.summary()["model"]["elements"]
    assert handle._governor.agent_cpu_seconds < 50


class Clock:
    """The process's CPU clock as the whole totals read it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(module, "time", self)

    def process_time(self):
        return self.now

    perf_counter = thread_time = process_time


def costly(optimizer, clock, plain, measured):
    """Let the clock go on by `plain` seconds in each step, by `measured` where totals are made."""
    original = optimizer._runtime.begin_step

    def begin_step():
        clock.now += measured if optimizer._runtime.measure_next else plain
        original()

    optimizer._runtime.begin_step = begin_step


@pytest.mark.parametrize(("every", "expected"), [(2, 5.0), (1, 3.5)])
def test_what_the_totals_add_to_a_step_is_the_agent_s_cost(every, expected, monkeypatch):
    """Beside the step before; where every step is measured, half a step."""
    clock = Clock(monkeypatch)
    model = Bare()
    optimizer = CollageAdamW(model.parameters(), strategy="plus")
    costly(optimizer, clock, plain=2.0, measured=7.0)
    handle = watch(model, optimizer, every=every, sample=SAMPLE, budget=None)
    stepped(optimizer, model, every)
    assert handle._governor.agent_cpu_seconds == pytest.approx(expected, abs=1.0)


def test_beyond_the_budget_the_sample_takes_over_and_the_run_says_so(monkeypatch):
    clock = Clock(monkeypatch)
    model = Bare()
    optimizer = CollageAdamW(model.parameters(), strategy="plus")
    costly(optimizer, clock, plain=1.0, measured=1.2)
    monkeypatch.setattr(governor, "time", clock)
    handle = watch(model, optimizer, every=2, sample=SAMPLE, budget=0.05)
    stepped(optimizer, model, 11)
    assert "over whole tensors, inside the step" in handle.info.intent_reason
    assert totals_of(handle, "large")["sampled"] == 15_000
    stepped(optimizer, model, 3, first=12)
    assert totals_of(handle, "large")["sampled"] == SAMPLE
    assert handle._governor.interval == 2
    assert handle._last is not None
    assert "would cost more than the budget" in handle._last.layout.watch.intent_reason


@pytest.mark.parametrize(
    ("options", "settings", "possible"),
    [
        ({}, {}, True),
        ({}, {"sample": "all"}, False),
        ({"compiled": "bit-identical"}, {"budget": None}, True),
        ({"compiled": "bit-identical"}, {}, False),
        ({"compiled": "fast"}, {"budget": None}, False),
    ],
)
def test_who_is_asked(options, settings, possible):
    model = Bare()
    handle = watch(model, CollageAdamW(model.parameters(), **options), every=1, **settings)
    assert handle._attached[0].whole.possible == handle._governor.whole == possible


def test_totals_of_a_compiled_step():
    model = Bare()
    optimizer = CollageAdamW(model.parameters(), strategy="plus", compiled="bit-identical")
    handle = watch(model, optimizer, every=2, sample=SAMPLE, budget=None)
    stepped(optimizer, model, 2)
    assert totals_of(handle, "large")["sampled"] == 15_000
    assert totals_of(handle, "large")["faithful"] > 14_000


def test_a_step_that_failed_leaves_no_totals_behind():
    model = Bare()
    optimizer = CollageAdamW(model.parameters(), strategy="plus")
    handle = watch(model, optimizer, every=2, sample=SAMPLE, budget=None)
    stepped(optimizer, model, 1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    stepped(optimizer, model, 3, first=2)
    assert handle.summary()["step"] == 4
    assert totals_of(handle, "large")["sampled"] == 15_000


def test_a_copied_optimizer_and_another_library_s_are_not_asked():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = watch(model, optimizer, every=1, sample=SAMPLE, budget=None)
    train(model, optimizer, 2)
    assert not handle._attached[0].whole.possible
    ours = CollageAdamW(model.parameters())
    watch(model, ours, every=1, budget=None)
    train(model, ours, 1)
    assert copy.deepcopy(ours).step_totals() == {}
