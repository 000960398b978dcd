"""A guest's manners: optimizers of other makes, clones that talk, and steps that nobody counts."""

import collections
import copy
import logging
import sys
import warnings
from functools import partial

import optimi
import pytest
import pytorch_optimizer
import schedulefree
import torch
from accelerate import Accelerator
from collage_agent.handle import watch
from collage_agent.intent.probe_runs import ProbeRun

from collage_monitor.diagnosis import percent
from tests.agent.intent.optimizers import ByParameter, OwnAdamW
from tests.agent.intent.references import edq, rerun
from tests.agent.test_watch import Recorder
from tests.agent.training import adamw, backward, mlp, mlp_loss, train, watched


class PlainLookahead:
    """A wrapper that is no torch optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


class MasterWrapper(PlainLookahead):
    """As apex has it: groups and states are the inner optimizer's."""

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state


class BaseStepper(torch.optim.Optimizer):
    """A torch optimizer that steps through another one."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=1e-2)

    def step(self, closure=None):
        self.base_optimizer.step()


@pytest.mark.parametrize("kind", [pytorch_optimizer.Lookahead, PlainLookahead, MasterWrapper])
def test_a_wrapper_never_raises_and_names_the_optimizer_inside(kind, caplog):
    model, recorder = mlp(), Recorder()
    wrapper = kind(adamw(model.parameters()))
    caplog.clear()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    handle = watch(model, wrapper, every=1, budget=None, reporter=recorder)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "wraps AdamW: watch optimizer.optimizer in its place" in told
    assert "nothing is measured" in str(handle)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    mlp_loss(model, 0).backward()
    wrapper.step()
    assert recorder.measurements == []
    assert handle.summary() == {"step": None, "model": {}, "layers": {}}
    handle.remove()
    assert handle.removed


def test_a_wrapper_that_only_passes_on_is_watched_inside():
    model, recorder = mlp(), Recorder()
    inner = adamw(model.parameters())
    prepared = Accelerator(cpu=True).prepare_optimizer(inner)
    assert prepared is not inner
    handle = watch(model, prepared, every=1, budget=None, reporter=recorder)
    train(model, inner, 2)
    assert recorder.steps == [1, 2]
    assert handle.info.intent == "shadow"


def test_no_clone_steps_what_leads_to_the_live_weights():
    model = mlp()
    optimizer = BaseStepper(model.parameters())
    mlp_loss(model, 0).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    handle = watch(model, optimizer, every=1, budget=None)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert handle.info.intent == "before-after"
    assert "watch optimizer.base_optimizer" in handle.info.intent_reason


@pytest.mark.parametrize("nothing", ["adam", None, 3, [], torch.optim.AdamW, torch.nn.Linear(2, 2), [None]])
def test_what_cannot_step_is_refused(nothing):
    with pytest.raises(TypeError, match="pass the torch"):
        watch(mlp(), nothing)


class Noisy(torch.optim.SGD):
    """Talks in every way that there is."""

    def step(self, closure=None):
        sys.stdout.write("stepping")
        sys.stderr.write("stepping")
        warnings.warn("stepping", stacklevel=1)
        logging.getLogger("noisy").warning("stepping")
        return super().step(closure)


def test_nothing_is_heard_of_the_clones_and_a_step_as_often_as_without_the_agent(capfd, caplog, recwarn):
    model, optimizer, handle = watched(partial(Noisy, lr=0.1), oracle=True, windows=(2,))
    for steps in (0, 3):
        train(model, optimizer, steps)
        assert capfd.readouterr() == ("stepping" * steps, "stepping" * steps)
        assert [record.getMessage() for record in caplog.records] == ["stepping"] * steps
        assert any("stepping" in str(told.message) for told in recwarn) == bool(steps)
    assert handle.summary()["model"]["edq_ratio"] > 0


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("shown", "first_steps"), [(0, [1]), (7, [8]), (None, [])])
def test_an_optimizer_that_keeps_no_count_asks_for_the_first_step(shown, first_steps, caplog):
    """None: the run may show steps of other processes, which an attempt from step 1 would hide."""
    model, recorder = mlp(), Recorder()
    optimizer = sgd(model.parameters())
    train(model, optimizer, 3)
    handle = watch(model, optimizer, every=1, budget=None, reporter=recorder, last_step_shown=lambda: shown)
    train(model, optimizer, 2)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "SGD keeps no step count; pass first_step=" in told
    assert recorder.first_steps == first_steps
    assert len(recorder.measurements) == (0 if shown is None else 2)
    assert handle.summary()["model"]["edq_ratio"] > 0


def test_first_step_answers_and_a_fresh_optimizer_is_not_asked(caplog):
    model, recorder = mlp(), Recorder()
    for taken, first_step in ((3, 501), (0, None)):
        optimizer = sgd(model.parameters())
        train(model, optimizer, taken)
        watch(model, optimizer, reporter=recorder, first_step=first_step, last_step_shown=lambda: None)
        train(model, optimizer, 1)
    assert recorder.first_steps == [501, 1]
    assert caplog.records == []


@pytest.mark.parametrize(
    ("kind", "first_step"),
    [
        (pytorch_optimizer.Ranger, 1),
        (optimi.Ranger, 1),
        (schedulefree.SGDScheduleFree, 6),
        (pytorch_optimizer.DAdaptSGD, 6),
        (pytorch_optimizer.Lion, 6),
    ],
)
def test_counts_in_groups_are_believed_and_not_a_k_that_is_a_period(kind, first_step):
    """A fresh Ranger's look-ahead period is 6; two others count their steps in a group's k, Lion as `step`."""
    model, recorder = mlp(dtype=torch.float32), Recorder()
    optimizer = kind(model.parameters(), lr=1e-3)
    getattr(optimizer, "train", bool)()
    train(model, optimizer, first_step - 1)
    watch(model, optimizer, budget=None, reporter=recorder)
    train(model, optimizer, 1)
    assert recorder.first_steps == [first_step]


class FunctionalAdamW:
    """An AdamW of one's own, in torch's form but outside of torch's classes."""

    step, step_one = ByParameter.step, OwnAdamW.step_one

    def __init__(self, parameters, lr):
        options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        self.param_groups = [{"params": list(parameters), **options}]
        self.state: dict = collections.defaultdict(dict)


@pytest.mark.parametrize("kind", [FunctionalAdamW, torch.optim.AdamW])
def test_steps_announced_by_hand_are_measured_against_fp64_and_once_where_hooks_speak(kind):
    recorder = Recorder()
    model, optimizer, handle = watched(partial(kind, lr=1e-3), sample="all", reporter=recorder)
    assert handle.info.intent == "shadow"
    assert handle.info.optimizer == kind.__name__
    for step in range(4):
        backward(model, step)
        intended, before = rerun(optimizer), [p.detach().double() for p in model.parameters()]
        handle.before()
        optimizer.step()
        handle.after()
        found = handle.summary()["model"]["edq_ratio"]
        assert found == pytest.approx(edq(intended, before, model.parameters()), rel=1e-9)
    assert recorder.steps == [1, 2, 3, 4]
    handle.remove()
    handle.before()
    optimizer.step()
    handle.after()
    assert handle.step == 4


def test_a_step_function_has_what_changed():
    model, recorder = mlp(), Recorder()

    @torch.no_grad()
    def descend(rate):
        for parameter in model.parameters():
            parameter.sub_(rate * parameter.grad)

    for step_of in (descend, partial(descend, 0.1)):
        handle = watch(model, step_of, every=1, budget=None, reporter=recorder)
        mlp_loss(model, 0).backward()
        handle.before()
        descend(0.1)
        handle.after()
        assert handle.info.intent == "before-after"
        assert "is not known" in handle.info.intent_reason
        assert handle.summary()["model"]["edq_ratio"] is None
        handle.remove()
    assert recorder.steps == [1, 1]


def test_a_step_function_without_gradients_has_what_changed():
    """Told was that no layer had a gradient, of an average in bf16 that hardly moves."""
    model = mlp()
    average = copy.deepcopy(model)
    starts = [parameter.clone() for parameter in average.parameters()]

    @torch.no_grad()
    def averaged():
        for own, parameter in zip(average.parameters(), model.parameters(), strict=True):
            own.mul_(0.999).add_(parameter + 0.1, alpha=0.001)

    handle = watch(average, averaged, every=1, sample="all")
    handle.before()
    averaged()
    handle.after()
    still = sum(int((a == b).sum()) for a, b in zip(average.parameters(), starts, strict=True))
    still /= sum(own.numel() for own in starts)
    assert still > 0.5
    assert handle.summary()["model"]["unchanged_ratio"] == pytest.approx(still)
    assert f"{percent(still)} of the elements did not move in a step" in handle.judgement().text


class BuiltWithStates(ByParameter):
    """All states are made by the constructor: a counter, master weights, an average and a number by place, as
    APOLLO's seeds are. With `whole` a tensor's step depends on all of its elements."""

    def __init__(self, params, lr=1e-4, *, whole=False, master=True):
        super().__init__(params, lr)
        self.whole, self.master = whole, master
        for place, parameter in enumerate(self.param_groups[0]["params"], 1):
            m = torch.zeros_like(parameter, dtype=torch.float32)
            self.state[parameter].update(step=torch.zeros(()), seed=place if whole else 1, m=m)
            if master:
                self.state[parameter]["master"] = parameter.detach().float().clone()

    def step_one(self, parameter, group):
        kept = self.state[parameter]
        kept["step"] += 1
        kept["m"].lerp_(parameter.grad.to(kept["m"].dtype), 0.1)
        length = kept["m"].norm() if self.whole else 1.0
        held = kept["master"] if self.master else parameter
        held.sub_((group["lr"] * kept["seed"] * kept["m"] / length).to(held.dtype))
        if self.master:
            parameter.copy_(held)


@pytest.mark.parametrize(("whole", "master"), [(False, True), (True, True), (True, False)])
def test_states_that_a_constructor_makes_are_made_for_probes_too(whole, master):
    """Told was "cannot step probe tensors: KeyError", so that nothing was known of most elements."""
    make = partial(BuiltWithStates, lr=1e-2 if whole else 1.0, whole=whole, master=master)
    model, optimizer, handle = watched(make, sample="all")
    held = [optimizer.state[own]["master"] if master else own for own in model.parameters()]
    for step in range(3):
        backward(model, step)
        intended, before = [], [own.detach().double() for own in held]
        for own in model.parameters():
            kept = optimizer.state[own]
            m = kept["m"].double().lerp(own.grad.double(), 0.1)
            intended.append(-optimizer.param_groups[0]["lr"] * kept["seed"] * m / (m.norm() if whole else 1.0))
        optimizer.step()
        found = handle.summary()["model"]["edq_ratio"]
        assert found == pytest.approx(edq(intended, before, held), rel=1e-9)
        assert handle.summary()["model"]["measured_ratio"] == 1.0
    assert handle.info.observed_strategy == ("master-weights" if master else "fp32-states")
    assert handle.info.intent == ("whole-tensor" if whole else "shadow")
    assert not handle.info.resume_losses


def test_states_that_steps_have_left_are_not_taken_for_a_constructors():
    """A clone that began with them would test other steps than a first one."""
    model = mlp()
    optimizer = BuiltWithStates(model.parameters())
    mlp_loss(model, 0).backward()
    optimizer.step()
    first, group = next(model.parameters()), optimizer.param_groups[0]
    assert not dict(ProbeRun(optimizer, group, [first.detach().double()]).optimizer.state)
    for kept in optimizer.state.values():
        kept["step"].zero_()
    assert not dict(ProbeRun(optimizer, group, [first.detach().double()]).optimizer.state)
