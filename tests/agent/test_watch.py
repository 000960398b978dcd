"""Hooks in awkward company: schedulers, subclasses, global hooks, scalers, closures, failures, checkpoints."""

import gc
import inspect
import weakref
from functools import partial

import collage_agent
import pytest
import torch
from collage_agent import error_guard, stats
from collage_agent.handle import watch
from collage_agent.step.measurer import StepMeasurer
from collage_agent.watch_options import Exclude, WatchArguments, WatchOptions
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from collage_monitor.metrics import statistic
from tests.agent.training import adamw, backward, mlp, mlp_loss, train, watched
from tests.reference.intended import full_precision_update


class Recorder:
    """A reporter that keeps what it gets."""

    def __init__(self):
        self.first_steps: list[int] = []
        self.measurements: list = []

    def started(self, first_step):
        self.first_steps.append(first_step)

    def measured(self, measurement):
        self.measurements.append(measurement)

    @property
    def steps(self):
        return [measurement.step for measurement in self.measurements]


def test_measured_steps_are_those_divisible_and_the_first_is_told_once():
    recorder = Recorder()
    model, optimizer, handle = watched(every=3, oracle=True, reporter=recorder)
    assert repr(handle).endswith("not started>")
    assert handle.summary() == {"step": None, "model": {}, "layers": {}}
    train(model, optimizer, 10)
    assert recorder.first_steps == [1]
    assert recorder.steps == [1, 3, 6, 9]
    assert handle.step == 10
    last = recorder.measurements[-1]
    assert last.totals.shape == (len(last.layout.statistics), len(last.layout.layers))
    assert last.totals.dtype == torch.float64
    assert last.scalars["bytes_per_parameter"] == pytest.approx(8.0)
    assert last.scalars["agent_cpu_seconds"] > 0
    assert last.scalars["agent_wall_seconds"] > 0
    # The first step has no averages before it, and so fewer statistics.
    assert last.layout is recorder.measurements[1].layout
    assert len(set(last.layout.statistics)) == len(last.layout.statistics)
    assert all(statistic(key) for key in last.layout.statistics), "each is in the catalogue"


def test_the_signature_of_watch_shows_each_option_with_its_default():
    shown = inspect.signature(collage_agent.watch).parameters
    options = {name: entry.default for name, entry in shown.items() if entry.kind is entry.KEYWORD_ONLY}
    assert options == {name: getattr(WatchOptions(), name) for name in WatchArguments.__annotations__}
    assert options["every"] == 10


def test_the_step_number_goes_on_from_the_optimizer_s_state_or_from_what_is_said():
    model = mlp()
    optimizer = adamw(model.parameters())
    train(model, optimizer, 7)
    recorder, told = Recorder(), Recorder()
    handle = watch(model, optimizer, every=1, reporter=recorder)
    other = watch(model, optimizer, every=1, reporter=told, first_step=101)
    train(model, optimizer, 2)
    assert recorder.first_steps == [8]
    assert told.first_steps == [101]
    assert (handle.step, other.step) == (9, 102)


def test_a_scheduler_that_patches_step_is_followed():
    model, optimizer, handle = watched(partial(adamw, lr=1e-2), sample="all")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(4):
        backward(model, step)
        expected = sum(float(u.square().sum()) for u in full_precision_update(optimizer).values())
        optimizer.step()
        scheduler.step()
        assert handle.summary()["model"]["intended_norm"] ** 2 == pytest.approx(expected, rel=1e-9)


def test_a_subclass_that_calls_super_is_one_step_and_foreign_hooks_see_no_shadow():
    class Careful(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    model, calls = mlp(), []
    optimizer = Careful(model.parameters(), lr=1e-3)
    foreign = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post")),
        optimizer.register_step_post_hook(lambda *_: calls.append("own")),
    ]
    try:
        train(model, optimizer, 2)
        before = calls.copy()
        calls.clear()
        handle = watch(model, optimizer, every=1, oracle=True)
        train(model, optimizer, 2, start=2)
    finally:
        for hook in foreign:
            hook.remove()
    assert handle.step == 4
    assert calls == before
    assert handle.summary()["model"]["edq_ratio"] is not None


def test_fused_loss_scaling_is_undone_and_a_skipped_step_is_not_reported():
    make = partial(adamw, fused=True)
    model, optimizer, handle = watched(make, mlp(dtype=torch.float32), sample="all", oracle=True)
    expected = watched(make, mlp(dtype=torch.float32), 3, sample="all")[2].summary()["model"]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number, spoilt=False):
        model.zero_grad()
        scaler.scale(mlp_loss(model, number)).backward()
        if spoilt:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()

    for number in range(3):
        step(number)
    scaled = handle.summary()["model"]
    assert scaled["intended_norm"] == pytest.approx(expected["intended_norm"], rel=1e-5)
    assert scaled["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert scaled["edq_oracle_ratio"] == pytest.approx(1.0, abs=1e-3)
    step(3, spoilt=True)
    assert handle.summary()["model"].get("edq_ratio") is None
    step(4)
    assert handle.summary()["model"]["oracle_displacement_ratio"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_removing_ends_it_and_frees_the_model():
    model, optimizer, handle = watched(steps=2)
    handle.remove()
    handle.remove()
    train(model, optimizer, 2)
    assert handle.step == 2
    assert handle.summary()["step"] == 2
    alive = weakref.ref(model)
    del handle, model, optimizer
    gc.collect()
    assert alive() is None


def test_nothing_raises_into_training_and_repeated_failure_disables(monkeypatch, caplog):
    error_guard.raise_in_tests(False)
    model, optimizer, handle = watched()

    def broken(*_, **__):
        raise RuntimeError("no luck")

    monkeypatch.setattr(StepMeasurer, "after", broken)
    train(model, optimizer, 6)
    assert handle.step == 6
    assert caplog.text.count("no luck") >= 1
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    monkeypatch.undo()
    train(model, optimizer, 2)
    assert handle.summary()["step"] is None
    assert "switched off" in handle.info.intent_reason


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (lambda step: 1 / 0, "division by zero"),
        (lambda step: {"residual_zero": torch.zeros(3)}, "'residual_zero' has shape (3,)"),
        (lambda step: {"lost": step.block_elements}, "'lost' is no statistic of its definition"),
    ],
)
def test_a_statistic_of_another_package_that_fails_is_switched_off_alone(measure, words, monkeypatch, caplog):
    error_guard.raise_in_tests(False)
    monkeypatch.setitem(stats.MEASURES, "added", stats.measures_of({}, {"residuals": measure})["residuals"])
    recorder = Recorder()
    _, _, handle = watched(reporter=recorder, steps=6)
    assert recorder.steps == [1, 2, 3, 4, 5, 6]
    assert handle.summary()["model"]["edq_ratio"] is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert words in caplog.text
    assert words in handle.info.intent_reason
    assert recorder.measurements[-1].layout.watch == handle.info


def test_a_reporter_that_raises_is_swallowed_too():
    error_guard.raise_in_tests(False)

    class Broken(Recorder):
        def measured(self, measurement):
            raise OSError("disk")

    model, optimizer, _ = watched(reporter=Broken())
    assert len(train(model, optimizer, 3)) == 3


def test_layers_are_chosen_by_name():
    model, optimizer, only = watched(layers=r"^2\.")
    without = watch(model, optimizer, every=1, layers=Exclude("bias"))
    train(model, optimizer, 1)
    assert set(only.summary()["layers"]) == {"2.weight", "2.bias"}
    assert set(without.summary()["layers"]) == {"0.weight", "2.weight", "4.weight"}
    with pytest.raises(ValueError, match="at least one regular expression"):
        Exclude()


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_wrappers_do_not_show_in_names_but_where_two_parts_would_be_confused():
    inner, both = torch.nn.Linear(4, 10, bias=False), Wrapper(torch.nn.Linear(4, 10, bias=False))
    both.weight = torch.nn.Parameter(torch.randn(40))
    for model, names in ((Wrapper(Wrapper(inner)), {"weight"}), (both, {"weight", "module.weight"})):
        _, optimizer, handle = watched(model=model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert set(handle.summary()["layers"]) == names


def test_float64_parameters_are_left_out_and_that_is_said():
    mixed = mlp(dtype=torch.float32)
    mixed[4].double()
    model, optimizer, handle = watched(model=mixed)
    assert "4.weight (float64 is not measurable)" in handle.info.intent_reason
    with pytest.raises(ValueError, match="float64 is not measurable"):
        watch(model, optimizer, layers="^4")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every=0; pass at least 1"),
        ({"every": 2.5}, TypeError, "every=2.5"),
        ({"sample": "some"}, TypeError, "or 'all'"),
        ({"sample": 3}, ValueError, "at least 64"),
        ({"windows": (8, 8)}, ValueError, "different lengths"),
        ({"windows": (1,)}, ValueError, "at least 2"),
        ({"windows": ("8",)}, TypeError, "windows"),
        ({"budget": 0.0}, ValueError, "budget=0.0"),
        ({"strategy": "magic"}, ValueError, "choose one of plain"),
        ({"layers": "("}, ValueError, "not a regular expression"),
        ({"layers": "nowhere"}, ValueError, "selects no parameter"),
        ({"first_step": 0}, ValueError, "first_step=0"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_value(options, error, message):
    with pytest.raises(error, match=message):
        watched(**options)


@pytest.mark.slow
def test_the_governor_s_choice_is_reported():
    recorder = Recorder()
    watched(budget=1e-6, reporter=recorder, steps=40)
    assert recorder.steps[:8] == [1, 2, 3, 4, 5, 6, 8, 10]
    assert recorder.measurements[-1].scalars["agent_interval"] > 2
    assert "agent_interval" not in recorder.measurements[0].scalars
