"""One kernel for all tensors of a step: the eager step's bits, and the eager step where there is no kernel."""

import dataclasses

import numpy
import pytest
import torch
from collage_optim import CollageAdamW, StateStorage, StorageStrategy, base, compiled, device_step, strategies
from collage_optim.device_code import CHUNK_ELEMENTS, Recorder, UnsupportedOperation
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


def test_each_chunk_of_the_chosen_tensors_is_listed_once():
    elements = numpy.array([1, CHUNK_ELEMENTS, 0, 5, 2 * CHUNK_ELEMENTS + 1])
    chosen = numpy.array([True, True, True, False, True])
    assert device_step._chunks(elements, chosen).tolist() == [[0, 0], [1, 0], [4, 0], [4, 1], [4, 2]]
    many = numpy.full(300_000, 40)
    assert len(device_step._chunks(many, many > 0)) == 300_000


def test_a_table_is_sent_once_while_it_stays_the_same():
    here, table = torch.device("cpu"), numpy.arange(5)
    first = device_step._on_device(table, here)
    assert device_step._on_device(table.copy(), here) is first
    assert torch.equal(device_step._on_device(table + 1, here), torch.arange(1, 6))
    for number in range(device_step._MOST_SENT):
        device_step._on_device(table + number + 2, here)
    assert len(device_step._SENT) == device_step._MOST_SENT


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
