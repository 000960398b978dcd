"""Totals from inside a measured step, against totals recomputed in fp64 from what can be seen outside."""

import copy
from typing import Any

import pytest
import torch
from collage_agent.optim import (
    STEP_TOTALS,
    STRATEGIES,
    CollageAdamW,
    CollageLion,
    CollageSGD,
    totals,
)

from tests.optim.models import assert_same_bits, give_gradients, parameters, train
from tests.optim.observed import COUNTS, check
from tests.reference.step_totals import step_totals

SHAPES = ((300, 70), (7,), (1,), (300, 50))

CASES: list[tuple[Any, dict[str, Any]]] = [(CollageAdamW, {"strategy": name}) for name in STRATEGIES]
CASES += [(CollageAdamW, {"strategy": name, "arithmetic": "storage"}) for name in STRATEGIES]
CASES += [
    (CollageSGD, {"strategy": "kahan", "momentum": 0.9, "lr": 1e-2}),
    (CollageSGD, {"strategy": "plain", "momentum": 0.9, "lr": 1e-2, "arithmetic": "storage"}),
    (CollageLion, {"strategy": "plain", "arithmetic": "storage"}),
    (CollageLion, {"strategy": "light", "maximize": True}),
]


@pytest.mark.parametrize(("optimizer_class", "options"), CASES, ids=str)
def test_totals_of_a_measured_step(optimizer_class, options, intentions):
    members = parameters(shapes=SHAPES)
    optimizer = optimizer_class(members, **options)
    train(optimizer, members, 4)
    give_gradients(members, step=5, scale=1e-3)
    before = [(optimizer.stored_parameter(member), member.detach().double()) for member in members]
    optimizer.measure_next_step()
    optimizer.step()
    found = optimizer.step_totals()
    assert list(found) == members
    for index, member in enumerate(members):
        stored, visible = before[index]
        effective = optimizer.stored_parameter(member) - stored
        change = member.detach().double() - visible
        check(found[member], step_totals(intentions[index], effective, change, member.grad))


@pytest.mark.parametrize("options", [{}, {"arithmetic": "storage"}, {"strategy": "plain", "arithmetic": "storage"}])
def test_measuring_changes_no_bit(options):
    first, second = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    plain, measured = CollageAdamW(first, **options), CollageAdamW(second, **options)
    for step in range(6):
        give_gradients(first, second, step=step)
        if step % 2:
            measured.measure_next_step()
        plain.step()
        measured.step()
    assert_same_bits(plain, measured)


def test_the_intended_update_is_the_exact_one():
    (member,) = parameters(shapes=((5000,),))
    optimizer = CollageAdamW([member], strategy="plus")
    train(optimizer, [member], 3)
    give_gradients([member], step=9)
    state = optimizer.state[member]
    joined = {"exp_avg": state["exp_avg"].double()}
    joined["exp_avg_sq"] = state["exp_avg_sq"].double() + state["exp_avg_sq_low"].double()
    exact, _ = optimizer.exact_displacement(
        optimizer.param_groups[0], joined, optimizer.stored_parameter(member), member.grad, 4
    )
    optimizer.measure_next_step()
    optimizer.step()
    found = dict(zip(STEP_TOTALS, optimizer.step_totals()[member].tolist(), strict=True))
    assert found["intended_squared_sum"] == pytest.approx(float((exact * exact).sum()), rel=1e-5)


def test_only_the_next_step_is_measured():
    members = parameters()
    optimizer = CollageAdamW(members)
    train(optimizer, members, 1)
    assert optimizer.step_totals() == {}
    optimizer.measure_next_step()
    train(optimizer, members, 1)
    first = optimizer.step_totals()
    train(optimizer, members, 1)
    second = optimizer.step_totals()
    assert all(torch.equal(first[member], second[member]) for member in members)
    assert copy.deepcopy(optimizer).step_totals() == {}


def test_empty_parameters_have_empty_totals():
    empty = torch.nn.Parameter(torch.zeros(0, 4, dtype=torch.bfloat16))
    optimizer = CollageAdamW([empty])
    optimizer.measure_next_step()
    train(optimizer, [empty], 1)
    assert optimizer.step_totals()[empty].tolist() == [0.0] * len(STEP_TOTALS)


def test_parameters_without_gradient_are_missing():
    members = parameters()
    optimizer = CollageAdamW(members)
    give_gradients(members[1:], step=1)
    optimizer.measure_next_step()
    optimizer.step()
    assert list(optimizer.step_totals()) == members[1:]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_counted_and_left_out(value):
    (member,) = parameters(shapes=((1000,),))
    optimizer = CollageAdamW([member], strategy="plus")
    give_gradients([member], step=1)
    member.grad[[3, 500]] = value
    optimizer.measure_next_step()
    optimizer.step()
    found = dict(zip(STEP_TOTALS, optimizer.step_totals()[member].tolist(), strict=True))
    assert found["nonfinite"] == 2
    assert found["faithful"] + found["idle"] + found["lost"] + found["distorted"] == 998
    assert found["intended_squared_sum"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_class_of_element(dtype):
    """One of each, tiny numbers among them whose products would underflow."""
    tiny = 1e-30 if dtype == torch.float32 else 1e-300
    u = torch.tensor([0, 0, 1, 1, 1, 1, 1, tiny, -tiny, tiny, float("nan"), 2], dtype=dtype)
    e = torch.tensor([0, 1, 0, 1, 0.5, 0.4, -1, tiny, tiny, 0, 1, 2], dtype=dtype)
    visible = torch.tensor([0, 1, 0, 0, 1, 1, 1, 0, tiny, 0, 1, 2], dtype=dtype)
    gradient = torch.ones(12, dtype=dtype)
    gradient[11] = float("inf")
    expected = step_totals(u, e, visible, gradient)
    assert [expected[name] for name in COUNTS[1:8]] == [2, 2, 1, 2, 3, 2, 3]
    check(totals.totals_of(totals.Observation(u.clone(), e.clone(), visible.clone(), gradient)), expected)
    same = step_totals(u, e, e, gradient)
    check(totals.totals_of(totals.Observation(u.clone(), e.clone(), None, gradient)), same)
    for shown, wanted in ((visible, expected), (None, same)):
        observation = totals.Observation(u, e, shown, gradient)
        check(totals.classified(totals.plain_raw_sums(observation)), wanted)
        first, second = totals.segmented_totals(observation, [5, 7])
        check(first + second, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_of_an_update_is_faithful_and_anything_less_is_not(dtype):
    """The next number below a half, whose distance from u rounds to a half."""
    half, two = torch.tensor([0.5, -0.5], dtype=dtype), torch.tensor([0.0, 0.0], dtype=dtype)
    e = torch.cat([half, torch.nextafter(half, two), 3 * half, torch.nextafter(3 * half, 4 * half)])
    u = torch.tensor([1.0, -1.0], dtype=dtype).repeat(4)
    observation = totals.Observation(u, e, None, u)
    for found in (
        totals.totals_of(observation),
        totals.classified(totals.plain_raw_sums(observation)),
        totals.segmented_totals(observation, [8])[0],
    ):
        assert dict(zip(STEP_TOTALS, found.tolist(), strict=True))["distorted"] == 4
