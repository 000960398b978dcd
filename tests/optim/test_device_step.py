"""One kernel for all tensors of a step: the eager step's bits, and the eager step where there is no kernel."""

import collections
import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from collage_optim import (
    CollageAdamW,
    FoundTotals,
    StateStorage,
    StepTotals,
    StorageStrategy,
    base,
    compiled,
    device_step,
    external_writes,
    strategies,
)
from collage_optim.device_code import CHUNK_ELEMENTS, Recorder, UnsupportedOperation
from collage_optim.random_numbers import Seeding
from collage_optim.tensor_step import step_tensors
from collage_optim.update_rules import AdamRule

from tests.optim.models import assert_same_bits, give_gradients, parameters, train, train_each
from tests.optim.triton_apart import only_where_published, run_with_triton

WITH_TRITON = "tests.optim.with_triton"


def by_day_and_night(part, day, night, night_share=1):
    """A seed by day, of one in so many pairs of a rule and a strategy; by night so many seeds."""
    return [(part, *day), *(pytest.param(part, seed, night_share, marks=pytest.mark.nightly) for seed in night)]


MORE_THAN = {"law": 80, "scaled": 40, "graphs": 30, "totals": 479}


@pytest.mark.slow
@only_where_published
@pytest.mark.parametrize(
    ("part", "seed", "share"),
    [
        *by_day_and_night("law", (0, 8), range(1, 11)),
        *by_day_and_night("scaled", (0, 5), range(3)),
        *by_day_and_night("graphs", (0, 5), range(2)),
        *by_day_and_night("totals", (1, 12), range(6), 6),
    ],
)
def test_rules_with_strategies_as_kernels(part, seed, share):
    """Each part's law is its docstring in `with_triton`. By night every pair of a rule and a strategy comes up."""
    found = int(run_with_triton(WITH_TRITON, part, str(seed), str(share), interpreted=True))
    assert found > MORE_THAN[part] / share


@pytest.mark.slow
@only_where_published
@pytest.mark.parametrize("part", ["first_in_a_graph", "operations", "not_finite", "levels"])
def test_kernels(part):
    """Each part's law is its docstring in `with_triton`."""
    run_with_triton(WITH_TRITON, part, interpreted=True)


class Rooted(AdamRule):
    """A rule whose numbers are made by Python's own functions."""

    def scalars(self, group, step):
        return {**super().scalars(group, step), "root": math.sqrt(step)}


@pytest.mark.usefixtures("as_on_a_device")
def test_what_cannot_be_counted_on_a_device_is_refused_at_once(monkeypatch):
    for options, words in (
        ({"arithmetic": "storage"}, "only on a CUDA device"),
        ({"compiled": False}, "only on a CUDA device"),
        ({"betas": (0.9, 1 - 1e-6)}, "a decay of 0.999999 is too near 1"),
    ):
        with pytest.raises(ValueError, match=words):
            CollageAdamW(parameters(), fused=True, **options)
    monkeypatch.setattr(CollageAdamW, "rule", Rooted(decoupled=True))
    with pytest.raises(ValueError, match="fused=True is not for Rooted"):
        CollageAdamW(parameters(), fused=True)


@pytest.mark.usefixtures("as_on_a_device")
def test_counters_follow_the_choice_of_the_optimizer_and_not_of_a_checkpoint(monkeypatch):
    """A step that finds no kernel, as while a CUDA graph is captured, changes nothing."""
    members = parameters()
    saved = CollageAdamW(members, compiled=False)
    train(saved, members, 1)
    fused = CollageAdamW(members, fused=True)
    assert fused._step_supports_amp_scaling
    assert not saved._step_supports_amp_scaling
    fused.load_state_dict(saved.state_dict())
    assert fused.param_groups[0]["fused"]
    saved.load_state_dict(fused.state_dict())
    assert "fused" not in saved.param_groups[0]
    monkeypatch.setattr(base, "launches", lambda device: False)
    with pytest.raises(RuntimeError, match="has no kernel here"):
        fused.step()
    assert all(fused.state[member]["step"] == 1 for member in members)


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Steps are kernels by default, as on a CUDA device."""
    monkeypatch.setattr(base, "launches", lambda device: True)
    compiled.device_step.cache_clear()
    compiled.adds_totals.cache_clear()
    yield
    compiled.device_step.cache_clear()
    compiled.adds_totals.cache_clear()


def no_triton(form):
    raise ModuleNotFoundError("No module named 'triton'")


def errs(step, members):
    members[-1].state["exp_avg_sq"][0].mul_(1.5)


def errs_in_sums(step, members):
    if step.asked is not None:
        (first, *_), sums = members, torch.ones(1, 1, dtype=torch.float64)
        step.asked.found.append(FoundTotals([first.parameter], ("parameter_squared_sum",), sums))


def errs_where_it_adds_up(step, members):
    if step.asked is not None:
        members[-1].parameter[0].add_(1.0)


def right_but(change):
    """What makes a step that is the eager one, but for this."""

    def made(form):
        def launch(step, members):
            step_tensors(dataclasses.replace(step, launch=None, asked=None), members)
            change(step, members)

        return launch

    return made


class Exponential(AdamRule):
    """A rule with an operation that no kernel is written for."""

    def displacement(self, arithmetic, parameter, gradient, state, scalars):
        return super().displacement(arithmetic, parameter, gradient, state, scalars).exp_()


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize(
    ("made", "rule", "reason"),
    [
        (no_triton, AdamRule, "No module named 'triton'"),
        (right_but(errs), AdamRule, "exp_avg_sq differs from the eager step"),
        (device_step.DeviceStep, Exponential, "torch's exp of torch.float32"),
    ],
    ids=["Triton is absent", "a wrong state", "an operation that no kernel has"],
)
def test_without_a_kernel_that_is_right_steps_are_eager_after_one_warning(monkeypatch, made, rule, reason):
    monkeypatch.setattr(CollageAdamW, "rule", rule(decoupled=True))
    monkeypatch.setattr(compiled, "DeviceStep", made)
    optimizers = [CollageAdamW(parameters(), strategy="plus", compiled=form) for form in (None, False)]
    asked = optimizers[0].step_totals = StepTotals()
    with pytest.warns(RuntimeWarning, match=f"{reason}; stepping eagerly") as caught:
        train_each(optimizers, 2)
    assert len(caught) == 1
    assert asked.found == []
    assert_same_bits(*optimizers)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (errs_in_sums, "parameter_squared_sum differs"),
        (errs_where_it_adds_up, "parameter differs from the eager step"),
    ],
)
def test_totals_that_are_not_right_are_not_asked_for(monkeypatch, caplog, change, reason):
    """One line is logged, training goes on with the kernel that adds nothing, and no warning can end it."""
    monkeypatch.setattr(compiled, "DeviceStep", right_but(change))
    members = parameters()
    optimizer = CollageAdamW(members, strategy="plus")
    for step in range(2):
        asked = optimizer.step_totals = StepTotals()
        train(optimizer, members, 1, first=step)
        assert asked.found == []
        assert optimizer.step_totals is None
    (said,) = caplog.messages
    assert said == f"the totals of steps of strategy 'plus' are not added up in their kernel: {reason}"


def test_sums_that_no_kernel_has_and_parts_of_tensors_are_refused():
    """What a kernel would not do as torch does: in a part, elements mix."""
    vector = torch.empty(CHUNK_ELEMENTS, device="meta")
    with Recorder({"parameter": vector}, {}):
        with pytest.raises(UnsupportedOperation, match=r"sum over \[\] of torch.float32"):
            vector.sum()
        with pytest.raises(UnsupportedOperation, match=r"sum over \[0\] of torch.float64"):
            vector.double().view(32, 32).sum(0)
        with pytest.raises(UnsupportedOperation, match=r"sum over \[\] of \(32, 32\)"):
            vector.double().view(32, 32).sum()
        with pytest.raises(UnsupportedOperation, match="a part of a tensor"):
            vector[1:].add_(1.0)


def given_to_kernels(monkeypatch, optimizer, members=(), steps=1):
    """The tables of steps: what each kernel is given, in the order of its arguments."""
    found = []
    compiled.device_step.cache_clear()
    kernel: dict[Any, Any] = collections.defaultdict(lambda: lambda *given, **options: found.append(given))
    monkeypatch.setattr(device_step, "built", lambda name, source: kernel)
    monkeypatch.setattr(compiled, "_difference_from_eager", lambda *given: None)
    for step in range(steps):
        give_gradients(members, step=step)
        optimizer.step()
    return found


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("strategy", ["stochastic", "split-master-8bit"])
@pytest.mark.parametrize("strided", [False, True])
def test_random_bits_follow_the_place_of_a_parameter_and_its_neighbours(monkeypatch, strategy, strided):
    """The same tensors at other places of another optimizer, and tensors that eager steps join, or do not."""
    members = parameters(shapes=((8,), (40,), (16_400,), (16, 24)))
    if strided:
        members[3].data = members[3].data.t()
    joined = strategy == "stochastic"
    for begin in (1, 0):
        give_gradients(members[1:], step=0)
        given = given_to_kernels(monkeypatch, CollageAdamW(members[begin:], strategy=strategy, seed=3))
        sizes, sources = (given[0][len(given[0]) - place].tolist() for place in (5, 4))
        at = Seeding(3, 1).at
        expected = {40: at(1 - begin), 16_400: at(2 - begin), 384: at(3 - begin)}
        if joined and not strided:
            expected[384] = at(1 - begin).from_element(40)
        assert sorted(sizes) == sorted(expected)
        assert sources == [[expected[size].start, expected[size].flipped] for size in sizes]


@pytest.mark.usefixtures("as_on_a_device")
def test_the_host_does_little_for_each_tensor(monkeypatch):
    """A device takes less than a millisecond for a step of 150 tensors. Calls are counted, as times are noisy."""
    monkeypatch.setattr(external_writes, "reads_at_once", lambda device: False)
    called = {}
    for count in (10, 60):
        members = parameters(shapes=((8, 8),) * count)
        optimizer = CollageAdamW(members, strategy="split-master", seed=1)
        given_to_kernels(monkeypatch, optimizer, members, steps=4)
        give_gradients(members, step=5)
        calls: list[str] = []
        noted: Any = lambda frame, event, argument, calls=calls: calls.append(event)  # noqa: E731
        sys.setprofile(noted)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        called[count] = sum(event in ("call", "c_call") for event in calls)
    assert (called[60] - called[10]) / 50 < 4, "of which the counters' values are one"


def test_a_table_is_sent_once_while_it_stays_the_same():
    made: list[int] = []

    def noted(number):
        made.append(number)
        return torch.tensor(number)

    for number in (1, 2, 1, *range(device_step._MOST_KEPT + 1)):
        assert device_step._kept(("a test", number), noted, number) == number
    assert made == [1, 2, 0, *range(3, device_step._MOST_KEPT + 1)]
    assert len(device_step._KEPT) == device_step._MOST_KEPT


def test_tensors_in_blocks_are_not_stepped_together_without_random_bits_either(monkeypatch):
    """Their blocks would not be those of one vector."""
    blocks = StorageStrategy("blocks", StateStorage.SINGLE, StateStorage.BLOCKS, StateStorage.BLOCKS)
    monkeypatch.setitem(strategies._ADDED, "blocks", blocks)
    together, alone = parameters(), parameters()
    give_gradients(together, alone, step=0)
    for members in (together, *([member] for member in alone)):
        CollageAdamW(members, strategy="blocks").step()
    assert all(map(torch.equal, together, alone))
