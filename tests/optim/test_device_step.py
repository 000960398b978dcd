"""One kernel for all tensors of a step: the eager step's bits, and the eager step where there is no kernel."""

import collections
import dataclasses
import math
import sys
from typing import Any

import numpy
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
from collage_optim.arithmetic import WideArithmetic
from collage_optim.device_code import CHUNK_ELEMENTS, Recorder, UnsupportedOperation
from collage_optim.random_numbers import Seeding
from collage_optim.step_totals import GROUP_ROWS, advance_and_add, groups_of
from collage_optim.tensor_step import step_tensors
from collage_optim.update_rules import AdamRule

from tests.optim.models import assert_same_bits, give_gradients, parameters
from tests.optim.triton_apart import only_where_published, run_with_triton

WITH_TRITON = "tests.optim.with_triton"


@pytest.mark.slow
@only_where_published
@pytest.mark.parametrize(
    ("seed", "part"), [(0, 8), *(pytest.param(seed, 1, marks=pytest.mark.nightly) for seed in range(1, 11))]
)
def test_every_rule_with_every_strategy_has_the_eager_steps_bits(seed, part):
    """Shapes, alignments, dtypes of weights and gradients, and options are drawn. By day an eighth of the pairs."""
    assert int(run_with_triton(WITH_TRITON, "law", str(seed), str(part), interpreted=True)) > 80 / part


@pytest.mark.slow
@only_where_published
@pytest.mark.parametrize(
    ("seed", "part"), [(0, 5), *(pytest.param(seed, 1, marks=pytest.mark.nightly) for seed in range(3))]
)
def test_steps_counted_on_a_device_have_the_bits_of_unscaled_gradients(seed, part):
    assert int(run_with_triton(WITH_TRITON, "scaled", str(seed), str(part), interpreted=True)) > 40 / part


@pytest.mark.slow
@only_where_published
@pytest.mark.parametrize(
    ("seed", "part"), [(0, 5), *(pytest.param(seed, 1, marks=pytest.mark.nightly) for seed in range(2))]
)
def test_replays_of_a_graph_have_the_bits_of_eager_steps(seed, part):
    assert int(run_with_triton(WITH_TRITON, "graphs", str(seed), str(part), interpreted=True)) > 30 / part


@pytest.mark.slow
@only_where_published
def test_a_graph_takes_no_first_step():
    run_with_triton(WITH_TRITON, "first_in_a_graph", interpreted=True)


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
    give_gradients(members, step=0)
    saved.step()
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


@pytest.mark.slow
@only_where_published
def test_each_operation_has_torchs_bits():
    run_with_triton(WITH_TRITON, "operations", interpreted=True)


@pytest.mark.slow
@only_where_published
def test_numbers_that_are_not_finite_stay_where_they_are():
    run_with_triton(WITH_TRITON, "not_finite", interpreted=True)


@pytest.mark.slow
@only_where_published
@pytest.mark.parametrize(
    ("seed", "part"), [(1, 12), *(pytest.param(seed, 6, marks=pytest.mark.nightly) for seed in range(6))]
)
def test_kernels_add_up_what_the_agent_measures_of_whole_tensors(seed, part):
    """Counts to the last, sums within fp64's rounding, and the bits of the step: tails, several chunks, NaN.

    By night every pair of a rule and a strategy comes up.
    """
    assert int(run_with_triton(WITH_TRITON, "totals", str(seed), str(part), interpreted=True)) >= 480 / part


@pytest.mark.slow
@only_where_published
def test_rows_of_sums_are_added_by_tensor_in_two_levels():
    run_with_triton(WITH_TRITON, "levels", interpreted=True)


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Steps are kernels by default, as on a CUDA device."""
    monkeypatch.setattr(base, "launches", lambda device: True)
    compiled.device_step.cache_clear()
    compiled.adds_totals.cache_clear()
    yield
    compiled.device_step.cache_clear()
    compiled.adds_totals.cache_clear()


def stepped(monkeypatch, made, **options):
    """An optimizer whose steps are what `made` makes of their form, and one that steps eagerly, after the same."""
    monkeypatch.setattr(compiled, "DeviceStep", made)
    pairs = []
    for form in (None, False):
        members = parameters()
        pairs.append((members, CollageAdamW(members, strategy="plus", compiled=form, **options)))
    for step in range(2):
        for members, optimizer in pairs:
            give_gradients(members, step=step)
            optimizer.step()
    return [optimizer for _, optimizer in pairs]


def no_triton(form):
    raise ModuleNotFoundError("No module named 'triton'")


def wrong(form):
    def launch(step, members):
        step_tensors(dataclasses.replace(step, launch=None), members)
        members[-1].state["exp_avg_sq"][0].mul_(1.5)

    return launch


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize(
    ("made", "reason"),
    [(no_triton, "No module named 'triton'"), (wrong, "exp_avg_sq differs from the eager step")],
    ids=["Triton is absent", "a wrong state"],
)
def test_without_a_kernel_that_is_right_steps_are_eager_after_one_warning(monkeypatch, made, reason):
    with pytest.warns(RuntimeWarning, match=f"{reason}; stepping eagerly") as caught:
        optimizers = stepped(monkeypatch, made)
    assert len(caught) == 1
    assert_same_bits(*optimizers)


def adds_wrongly(form):
    """A step whose kernel is right until it adds up totals: then they are those of another step."""

    def launch(step, members):
        eager = dataclasses.replace(step, launch=None, asked=None)
        step_tensors(eager, members)
        if step.asked is not None:
            chunk = {name: own.flatten()[:CHUNK_ELEMENTS] for name, own in members[0].state.items() if own.dim()}
            chunk |= {"parameter": members[0].parameter.detach().flatten()[:CHUNK_ELEMENTS]}
            chunk |= {"gradient": members[0].gradient.flatten()[:CHUNK_ELEMENTS]}
            chunk = {name: own.clone() for name, own in chunk.items()}
            sums = advance_and_add(eager, WideArithmetic(), chunk, step.scalars, step.asked.exact)
            step.asked.found.append(
                FoundTotals([members[0].parameter], tuple(sums), torch.stack([*sums.values()])[None])
            )

    return launch


def steps_wrongly(form):
    """A kernel whose bits are others once it adds up totals."""

    def launch(step, members):
        step_tensors(dataclasses.replace(step, launch=None, asked=None), members)
        if step.asked is not None:
            members[-1].parameter[0].add_(1.0)

    return launch


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize(
    ("made", "reason"),
    [(adds_wrongly, "parameter_squared_sum differs"), (steps_wrongly, "parameter differs from the eager step")],
    ids=["wrong sums", "wrong bits"],
)
def test_totals_that_are_not_right_are_not_asked_for(monkeypatch, caplog, made, reason):
    """One line is logged, training goes on with the kernel that adds nothing, and no warning can end it."""
    monkeypatch.setattr(compiled, "DeviceStep", made)
    members = parameters()
    optimizer = CollageAdamW(members, strategy="plus")
    for step in range(2):
        asked = optimizer.step_totals = StepTotals()
        give_gradients(members, step=step)
        optimizer.step()
        assert asked.found == []
        assert optimizer.step_totals is None
    (record,) = caplog.records
    assert (
        record.getMessage() == f"the totals of steps of strategy 'plus' are not added up in their kernel: {reason}"
    )


@pytest.mark.usefixtures("as_on_a_device")
def test_without_triton_totals_are_not_added_up(monkeypatch):
    monkeypatch.setattr(compiled, "DeviceStep", no_triton)
    members = parameters()
    optimizer = CollageAdamW(members, strategy="plus")
    asked = optimizer.step_totals = StepTotals()
    give_gradients(members, step=0)
    with pytest.warns(RuntimeWarning, match="stepping eagerly"):
        optimizer.step()
    assert asked.found == []


def test_a_sum_that_no_kernel_has_is_refused():
    vector = torch.empty(CHUNK_ELEMENTS, device="meta")
    with Recorder({"parameter": vector}, {}):
        with pytest.raises(UnsupportedOperation, match=r"sum over \[\] of torch.float32"):
            vector.sum()
        with pytest.raises(UnsupportedOperation, match=r"sum over \[0\] of torch.float64"):
            vector.double().view(32, 32).sum(0)
        with pytest.raises(UnsupportedOperation, match=r"sum over \[\] of \(32, 32\)"):
            vector.double().view(32, 32).sum()


def test_each_row_of_sums_is_added_once():
    counts = numpy.array([1, GROUP_ROWS + 1, 0, 2 * GROUP_ROWS])
    by_group, by_tensor = groups_of(counts)
    assert by_group.tolist() == [
        [0, 1],
        [1, GROUP_ROWS],
        [1 + GROUP_ROWS, 1],
        [2 + GROUP_ROWS, GROUP_ROWS],
        [2 + 2 * GROUP_ROWS, GROUP_ROWS],
    ]
    assert by_tensor.tolist() == [[0, 1], [1, 2], [3, 0], [3, 2]]


class Exponential(AdamRule):
    """A rule with an operation that no kernel is written for."""

    def displacement(self, arithmetic, parameter, gradient, state, scalars):
        return super().displacement(arithmetic, parameter, gradient, state, scalars).exp_()


@pytest.mark.usefixtures("as_on_a_device")
def test_an_operation_that_is_not_in_the_tables_is_named(monkeypatch):
    monkeypatch.setattr(CollageAdamW, "rule", Exponential(decoupled=True))
    with pytest.warns(RuntimeWarning, match="torch's exp of torch.float32; stepping eagerly") as caught:
        optimizers = stepped(monkeypatch, device_step.DeviceStep)
    assert len(caught) == 1
    assert_same_bits(*optimizers)


def test_part_of_a_tensor_is_refused():
    """What a kernel would not do as torch does: elements mix in it."""
    whole = torch.empty(CHUNK_ELEMENTS, device="meta")
    with Recorder({"parameter": whole}, {}), pytest.raises(UnsupportedOperation, match="a part of a tensor"):
        whole[1:].add_(1.0)


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

        def noted(frame, event, argument, calls=calls):
            calls.append(event)

        sys.setprofile(noted)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        called[count] = sum(event in ("call", "c_call") for event in calls)
    assert (called[60] - called[10]) / 50 < 4, "of which the counters' values are one"


def test_each_chunk_of_the_chosen_tensors_is_listed_once():
    elements = numpy.array([1, CHUNK_ELEMENTS, 0, 5, 2 * CHUNK_ELEMENTS + 1])
    chosen = numpy.array([True, True, True, False, True])
    assert device_step._chunks(elements, chosen).tolist() == [[0, 0], [1, 0], [4, 0], [4, 1], [4, 2]]
    many = numpy.full(300_000, 40)
    assert len(device_step._chunks(many, many > 0)) == 300_000


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
    optimizers = [CollageAdamW(together, strategy="blocks")]
    optimizers += [CollageAdamW([member], strategy="blocks") for member in alone]
    give_gradients(together, alone, step=0)
    for optimizer in optimizers:
        optimizer.step()
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)
