"""One kernel for all tensors of a step: the eager step's bits, and the eager step where there is no kernel."""

import collections
import dataclasses
from typing import Any

import numpy
import pytest
import torch
from collage_optim import CollageAdamW, StateStorage, StorageStrategy, base, compiled, device_step, strategies
from collage_optim.device_code import CHUNK_ELEMENTS, Recorder, UnsupportedOperation
from collage_optim.random_numbers import Seeding
from collage_optim.tensor_step import step_tensors
from collage_optim.update_rules import AdamRule

from tests.optim.models import assert_same_bits, give_gradients, parameters
from tests.optim.triton_apart import only_where_published, run_with_triton

WITH_TRITON = "tests.optim.with_triton"


@pytest.mark.slow
@only_where_published
@pytest.mark.parametrize(
    ("seed", "part"), [(0, 3), *(pytest.param(seed, 1, marks=pytest.mark.nightly) for seed in range(1, 11))]
)
def test_every_rule_with_every_strategy_has_the_eager_steps_bits(seed, part):
    """Shapes, alignments, dtypes of weights and gradients, and options are drawn. By day, a third of the pairs."""
    assert int(run_with_triton(WITH_TRITON, "law", str(seed), str(part), interpreted=True)) > 80 / part


@pytest.mark.slow
@only_where_published
def test_each_operation_has_torchs_bits():
    run_with_triton(WITH_TRITON, "operations", interpreted=True)


@pytest.mark.slow
@only_where_published
def test_numbers_that_are_not_finite_stay_where_they_are():
    run_with_triton(WITH_TRITON, "not_finite", interpreted=True)


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Steps are kernels by default, as on a CUDA device."""
    monkeypatch.setattr(base, "launches", lambda device: True)
    compiled.device_step.cache_clear()
    yield
    compiled.device_step.cache_clear()


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


def given_to_kernels(monkeypatch, optimizer):
    """The tables of a step: what each kernel is given, in the order of its arguments."""
    found = []
    compiled.device_step.cache_clear()
    kernel: dict[Any, Any] = collections.defaultdict(lambda: lambda *given, **options: found.append(given))
    monkeypatch.setattr(device_step, "built", lambda name, source: kernel)
    monkeypatch.setattr(compiled, "_difference_from_eager", lambda *given: None)
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
