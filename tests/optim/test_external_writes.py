"""Somebody else writes to the weights between two steps: the write survives; an undone one leaves no trace."""

import copy
import logging

import pytest
import torch
from collage_agent.handle import watch
from collage_optim import STRATEGIES, CollageAdamW, external_writes
from collage_optim.range_guards import DeferredReads
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.agent.test_no_synchronisation import Listening
from tests.optim.models import assert_same_bits, copies_of, give_gradients, parameters, train

KEEPING = [name for name, strategy in STRATEGIES.items() if strategy.parameter_state is not None]
BY_STORAGE = pytest.mark.drawn(by=lambda strategy, **others: (STRATEGIES[strategy].parameter, *others.values()))
SHAPES = ((40, 410), (7,), (3, 5, 2, 4))


def other(member):
    return torch.randn(member.shape, generator=torch.Generator().manual_seed(7)).mul_(0.02).to(member.dtype)


def by_copy(member, value):
    with torch.no_grad():
        member.copy_(value)


def by_data(member, value):
    member.data.copy_(value)


def by_rebinding(member, value):
    member.data = value.detach().clone(memory_format=torch.preserve_format)


def by_swapping(member, value):
    gradient, member.grad = member.grad, None
    torch.utils.swap_tensors(member, torch.nn.Parameter(value.detach().clone()))
    member.grad = gradient


WRITES = {
    "zero_()": lambda member: member.zero_(),
    "mul_()": lambda member: member.mul_(0.75),
    "copy_()": lambda member: by_copy(member, other(member)),
    "normal_()": lambda member: torch.nn.init.normal_(member, std=0.02),
    "+=": lambda member: member.add_(other(member)),
    ".data.zero_()": lambda member: member.data.zero_(),
    ".data.mul_()": lambda member: member.data.mul_(0.75),
    ".data +=": lambda member: member.data.add_(other(member)),
    ".data =": lambda member: by_rebinding(member, other(member)),
    "swap_tensors": lambda member: by_swapping(member, other(member)),
}


def trained(strategy, steps=6, **options):
    members = parameters(shapes=SHAPES)
    members[2].data = members[2].data.to(memory_format=torch.channels_last)
    optimizer = CollageAdamW(members, lr=1e-3, strategy=strategy, **{"seed": 5, **options})
    train(optimizer, members, steps)
    return members, optimizer


def step_without_moving(optimizer, members):
    """A step of length zero: what is stored afterwards is what the optimizer takes for the weight."""
    optimizer.param_groups[0]["lr"] = 0.0
    # What a swap exchanges loses its gradient.
    train(optimizer, members, 1, first=99)


def written_to(members, write):
    """The weights before and after that each is written to."""
    before = copies_of(members)
    with torch.no_grad():
        for member in members:
            write(member)
    return before, copies_of(members)


@pytest.fixture(params=["at once", "as on a device"])
def reads(request, monkeypatch):
    """What a device would still have to hand to the host, which acts as one; None where all is read at once."""
    if request.param == "at once":
        return None
    coming: list = []
    monkeypatch.setattr(external_writes, "reads_at_once", lambda device: False)
    monkeypatch.setattr(DeferredReads, "add", lambda _, value, then: coming.append((value, then)))
    return coming


def arrive(reads):
    for value, then in reads or ():
        then(value)
    if reads:
        reads.clear()


def said(caplog):
    return [line for line in caplog.messages if "somebody else wrote" in line]


def assert_adopted(optimizer, members, before, written):
    """What is stored is what was written, to the bit; an element that by chance was as before may keep its rest."""
    for member, old, value in zip(members, before, written, strict=True):
        assert torch.equal(member, value)
        stored = optimizer.stored_parameter(member)
        assert torch.equal(stored.float().to(value.dtype), value)
        changed = old != value
        assert changed.double().mean() > 0.8
        assert torch.equal(stored[changed], value.double()[changed])


@pytest.mark.drawn(by=lambda strategy, write, reads: (strategy, (write, reads)))
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_write_survives_and_what_was_kept_beside_the_old_weight_goes(strategy, write, reads, caplog):
    """On a device nothing is read for that, and a write through .data is told too late."""
    members, optimizer = trained(strategy)
    arrive(reads)
    before, written = written_to(members, WRITES[write])
    keeps = strategy in KEEPING
    with caplog.at_level(logging.WARNING, logger="collage_optim"), Listening() as listening:
        step_without_moving(optimizer, members)
    if reads is not None:
        assert {tuple(tensor.shape) for tensor in listening.read} <= {()}
        assert {float(tensor) for tensor in listening.read} <= {7.0}
    if reads is not None and keeps and write.startswith((".data.", ".data +")):
        assert said(caplog) == []
        arrive(reads)
        assert ["through .data" in line for line in said(caplog)] == [True]
        return
    assert_adopted(optimizer, members, before, written)
    train(optimizer, members, 2)
    arrive(reads)
    assert optimizer.external_writes == (len(members) if keeps else 0)
    assert len(said(caplog)) == keeps


@BY_STORAGE
@pytest.mark.parametrize("strategy", KEEPING)
def test_the_same_memory_read_in_another_order_is_a_write(strategy):
    """Neither the version nor the address nor any bit in memory changes, but nearly all elements do."""
    members = parameters(shapes=((130, 130),))
    optimizer = CollageAdamW(members, lr=1e-3, strategy=strategy, seed=5)
    train(optimizer, members, 6)
    (before,) = copies_of(members)
    members[0].data = members[0].data.t()
    (written,) = copies_of(members)
    step_without_moving(optimizer, members)
    assert_adopted(optimizer, members, [before], [written])
    assert optimizer.external_writes == 1


def test_a_step_that_fails_is_followed_by_one_that_looks_again():
    members, optimizer = trained("plus")
    give_gradients(members, step=7)
    optimizer.param_groups[0]["lr"] = "none"
    with pytest.raises(ValueError, match="none"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-3
    with torch.no_grad():
        members[0].zero_()
    step_without_moving(optimizer, members)
    assert not members[0].any()
    assert optimizer.external_writes == 1


def exchanged(members, values, exchange=by_copy):
    for member, value in zip(members, values, strict=True):
        exchange(member, value)


@pytest.mark.parametrize(
    ("arithmetic", "exchange"),
    [("storage", by_copy), *(("fp32", exchange) for exchange in (by_copy, by_data, by_rebinding, by_swapping))],
)
@BY_STORAGE
@pytest.mark.parametrize("strategy", KEEPING)
def test_swapping_an_average_in_and_out_leaves_no_trace(strategy, arithmetic, exchange, reads, caplog):
    if arithmetic == "storage" and STRATEGIES[strategy].is_coded:
        arithmetic = "fp32"
    (members, optimizer), (others, undisturbed) = (trained(strategy, 0, arithmetic=arithmetic) for _ in range(2))
    model = torch.nn.ParameterList(members)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(1, 13):
        give_gradients(members, others, step=step)
        optimizer.step()
        undisturbed.step()
        average.update_parameters(model)
        if step % 3 == 0:
            backup = copies_of(members)
            exchanged(members, copies_of(average.module, torch.bfloat16), exchange)
            exchanged(members, backup, exchange)
    assert_same_bits(optimizer, undisturbed)
    arrive(reads)
    assert optimizer.external_writes == 0
    assert said(caplog) == []


@BY_STORAGE
@pytest.mark.parametrize("strategy", KEEPING)
def test_weights_that_are_masked_at_every_step_keep_the_residuals_of_the_others(strategy):
    """From the second mask on, elements are compared with what the step left."""
    members, optimizer = trained(strategy, 0)
    masks = [other(member) > 0.01 for member in members]
    for step in range(1, 7):
        train(optimizer, members, 1, first=step)
        before = [optimizer.stored_parameter(member) for member in members]
        for member, own in zip(members, masks, strict=True):
            member.detach().masked_fill_(own, 0)
    step_without_moving(optimizer, members)
    for member, own, stored in zip(members, masks, before, strict=True):
        expected = stored.masked_fill(own, 0)
        if STRATEGIES[strategy].stochastic:
            assert torch.equal(optimizer.stored_parameter(member)[own], expected[own])
        else:
            assert torch.equal(optimizer.stored_parameter(member), expected)


@BY_STORAGE
@pytest.mark.parametrize("strategy", KEEPING)
def test_one_row_that_is_set_to_zero_costs_the_others_nothing(strategy):
    members, optimizer = trained(strategy)
    stored = optimizer.stored_parameter(members[0])
    with torch.no_grad():
        members[0][0] = 0
    step_without_moving(optimizer, members)
    found = optimizer.stored_parameter(members[0])
    assert not found[0].any()
    if not STRATEGIES[strategy].stochastic:
        assert torch.equal(found[1:], stored[1:])
    assert optimizer.external_writes == 1


def test_after_two_writes_each_element_is_compared_with_what_the_step_left():
    """One unit in the last place of an element outside the samples is seen then, and a checkpoint is still none."""
    members, optimizer = trained("light")
    weight, low = members[0].detach(), optimizer.state[members[0]]["parameter_low"]
    for count in (1, 2):
        weight.neg_()
        step_without_moving(optimizer, members)
        assert optimizer.external_writes == count
    kept = weight.clone(), low.clone()
    weight.view(torch.int16)[0, 0] += 1
    step_without_moving(optimizer, members)
    assert optimizer.external_writes == 3
    weight.copy_(kept[0])
    low.copy_(kept[1])
    step_without_moving(optimizer, members)
    assert optimizer.external_writes == 3


def test_a_master_that_is_not_a_number_beside_such_a_weight_is_no_write():
    members, optimizer = trained("master-weights", 1)
    for step in (2, 3):
        give_gradients(members, step=step)
        members[1].grad.fill_(torch.nan)
        optimizer.step()
        members[1].detach().mul_(1)
    assert members[1].isnan().all()
    assert optimizer.external_writes == 0


def test_a_loaded_master_between_its_weight_and_a_neighbour_is_no_write():
    """It would round to the neighbour, which is even."""
    member = torch.nn.Parameter(torch.full((8,), 1 + 2.0**-7, dtype=torch.bfloat16))
    optimizer = CollageAdamW([member], strategy="master-weights")
    train(optimizer, [member], 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["master_parameter"].fill_(1 + 2.0**-8)
    member.data.fill_(1 + 2.0**-7)
    optimizer.load_state_dict(saved)
    step_without_moving(optimizer, [member])
    assert optimizer.external_writes == 0


@BY_STORAGE
@pytest.mark.parametrize("strategy", KEEPING)
def test_raise_names_the_weight_before_anything_moves(strategy):
    members, optimizer = trained(strategy, on_external_write="raise")
    before = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        members[1].mul_(0.5)
    with pytest.raises(RuntimeError, match=r"wrote to parameter 1 of group 0 of shape \(7,\) since the last step"):
        optimizer.step()
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before["state"][number][key]) for key, value in state.items())
    with pytest.raises(ValueError, match="Invalid on_external_write: 'ignore'; use one of adopt, raise"):
        CollageAdamW(parameters(), on_external_write="ignore")


@pytest.mark.parametrize("order", ["weights first", "states first", "in place"])
@BY_STORAGE
@pytest.mark.parametrize("strategy", KEEPING)
def test_a_checkpoint_is_no_write(strategy, order, caplog):
    """Loaded in either order, or into the tensors themselves, as torch.distributed.checkpoint does."""
    members, optimizer = trained(strategy, 4)
    weights, states = copies_of(members), copy.deepcopy(optimizer.state_dict())
    train(optimizer, members, 3, first=5)
    expected = copies_of(members)
    if order == "states first":
        optimizer.load_state_dict(states)
    exchanged(members, weights)
    if order == "weights first":
        optimizer.load_state_dict(states)
    if order == "in place":
        for own, saved in zip(optimizer.state.values(), states["state"].values(), strict=True):
            for key, value in saved.items():
                own[key].copy_(value)
    train(optimizer, members, 3, first=5)
    assert optimizer.external_writes == 0
    assert said(caplog) == []
    assert all(map(torch.equal, members, expected))


def test_a_resumed_head_made_anew_before_the_first_step_is_adopted():
    members, optimizer = trained("master-weights")
    resumed = CollageAdamW(members, strategy="master-weights")
    resumed.load_state_dict(optimizer.state_dict())
    torch.nn.init.zeros_(members[0])
    step_without_moving(resumed, members)
    assert not resumed.stored_parameter(members[0]).any()
    assert resumed.external_writes == 1


@BY_STORAGE
@pytest.mark.parametrize("strategy", KEEPING)
def test_copies_and_frozen_weights(strategy):
    """A weight without a gradient is looked at when it steps again; a copy of the optimizer looks anew."""
    members, optimizer = trained(strategy)
    members[0].grad = None
    with torch.no_grad():
        members[0].zero_()
    train(optimizer, members[1:], 2, first=7)
    assert optimizer.external_writes == 0
    duplicate = copy.deepcopy(optimizer)
    for own in (optimizer, duplicate):
        step_without_moving(own, own.param_groups[0]["params"])
        assert not own.stored_parameter(own.param_groups[0]["params"][0]).any()


@BY_STORAGE
@pytest.mark.parametrize("strategy", KEEPING)
def test_memory_that_a_weight_leaves_is_freed_between_steps(strategy, reads):
    """Whoever moves weights elsewhere between two steps does so for their memory."""
    members, optimizer = trained(strategy)
    held = [member.data.untyped_storage()._weak_ref() for member in members]
    for member in members:
        member.data = member.data.clone()
    assert all(map(torch.UntypedStorage._expired, held))
    train(optimizer, members, 2)
    arrive(reads)
    assert optimizer.external_writes == 0


def test_the_monitor_counts_them():
    members, optimizer = trained("plus", 0)
    model = torch.nn.ParameterList(members)
    handle = watch(model, optimizer, every=1, budget=None)
    train(optimizer, members, 2)
    assert "external_writes" not in handle.summary()["model"]
    with torch.no_grad():
        members[0].zero_()
    train(optimizer, members, 1, first=3)
    assert handle.summary()["model"]["external_writes"] == 1
    assert handle._last is not None
    assert handle._last.scalars["external_writes"] == 1


@pytest.mark.parametrize("reads", ["as on a device"], indirect=True)
@pytest.mark.parametrize("by_address", [True, False])
def test_views_by_address_are_made_where_they_can_be_had(monkeypatch, reads, by_address):
    """Where torch has another way, they are made for each step."""
    external_writes._views_by_address.cache_clear()
    if not by_address:
        monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    members, optimizer = trained("plus")
    external_writes._views_by_address.cache_clear()
    kept = [len(sample.views) for sample in optimizer._external_writes._samples]
    assert sum(kept) == (len(members) if by_address else 0)
    members[0].data.mul_(0.5)
    train(optimizer, members, 1)
    told = [value for value, then in reads if then == optimizer._external_writes._tell_too_late]
    assert any(map(bool, told[-len(kept) :]))
    assert not any(map(bool, told[: -len(kept)]))
