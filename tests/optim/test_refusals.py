"""What is refused by name: checkpoints of something else, changes that states cannot follow; what is adopted."""

import copy
from typing import Any

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdam, CollageAdamW, CollageLion, CollageSGD

from tests.optim.models import (
    assert_same_bits,
    copies_of,
    give_gradients,
    parameters,
    train,
)
from tests.optim.test_state import refusal

MOMENTUM = {"momentum": 0.9}
OURS = {
    "AdamW": (CollageAdamW, {}),
    "Adam": (CollageAdam, {}),
    "Lion": (CollageLion, {}),
    "SGD": (CollageSGD, MOMENTUM),
    "SGD, no momentum": (CollageSGD, {}),
}
TORCH: dict[str, Any] = {
    name: (getattr(torch.optim, name), {}) for name in ("AdamW", "Adam", "NAdam", "Adamax", "RMSprop")
}
TORCH |= {"SGD": (torch.optim.SGD, MOMENTUM), "SGD, no momentum": (torch.optim.SGD, {})}


def stepped(made, members, steps=3):
    maker, options = made
    optimizer = maker(members, lr=1e-3, **options)
    train(optimizer, members, steps)
    return optimizer


@pytest.mark.drawn
@pytest.mark.parametrize("target", OURS)
@pytest.mark.parametrize(
    "source", [*((name, OURS) for name in OURS), *((name, TORCH) for name in TORCH)], ids=lambda of: str(of[0])
)
def test_a_state_of_another_rule_is_refused(source, target):
    name, known = source
    members = parameters()
    saved = copy.deepcopy(stepped(known[name], members).state_dict())
    optimizer = stepped(OURS[target], members)
    before = copy.deepcopy(optimizer)
    if name.partition(",")[0] == target.partition(",")[0]:
        # The same rule; SGD's momentum is an option of the checkpoint.
        optimizer.load_state_dict(saved)
        train(optimizer, members, 1)
        return
    with pytest.raises(ValueError, match=r"it is of another update rule|has decoupled_weight_decay="):
        optimizer.load_state_dict(saved)
    assert_same_bits(optimizer, before)
    assert optimizer.param_groups[0].keys() == before.param_groups[0].keys()


def test_a_refusal_says_what_was_found_and_what_is_needed():
    members = parameters()
    saved = copy.deepcopy(stepped(OURS["AdamW"], members).state_dict())
    saved["param_groups"][0].update(momentum=0.0, dampening=0.0, nesterov=False)
    with pytest.raises(ValueError, match=r"parameter 0 holds exp_avg, .*exp_avg_sq.*CollageSGD keeps no average"):
        CollageSGD(members).load_state_dict(saved)
    del saved["param_groups"][0]["betas"]
    with pytest.raises(ValueError, match="groups have no betas, which CollageAdamW needs"):
        CollageAdamW(members).load_state_dict(saved)


@pytest.mark.parametrize(
    ("size", "more", "words"),
    [
        (2, [], "doesn't match the size"),
        (4, [{"params": parameters(seed=2)}], "different number of parameter groups"),
    ],
)
def test_other_counts_are_refused_as_torch_does(size, more, words):
    members = parameters()
    saved = stepped(OURS["AdamW"], members).state_dict()
    optimizer = CollageAdamW([{"params": members[:size]}, *more])
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable", "differentiable"])
def test_torch_forms_in_a_group_are_answered_as_in_the_constructor(option):
    with pytest.raises(ValueError, match=f"{option}=True is not supported"):
        CollageAdamW([{"params": parameters(), option: True}])
    members = parameters()
    optimizer = CollageAdamW([{"params": members, option: None}])
    optimizer.param_groups[0][option] = True
    assert_nothing_moves(optimizer, members, ValueError, f"{option}=True is not supported")


def assert_nothing_moves(optimizer, members, kind, words):
    give_gradients(members, step=50)
    before = copy.deepcopy(optimizer)
    with pytest.raises(kind, match=words):
        optimizer.step()
    assert_same_bits(before, optimizer)


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_dtype_after_construction(strategy, dtype):
    """Before the first step the group's own refusals hold; afterwards states stand in the way, by name."""
    first, second = parameters(shapes=((6, 4),)), parameters(shapes=((9,),), seed=2)
    optimizer = CollageAdamW([{"params": first}, {"params": second}], strategy=strategy)
    train(optimizer, first + second, 2)
    second[0].data = second[0].data.to(dtype)
    words = rf"parameter 0 of group 1 of shape \(9,\) has become {dtype}; its states were made for torch.bfloat16"
    assert_nothing_moves(optimizer, first + second, RuntimeError, words)

    fresh = parameters(shapes=((6, 4),))
    unstepped = CollageAdamW(fresh, strategy=strategy)
    fresh[0].data = fresh[0].data.to(dtype)
    give_gradients(fresh, step=1)
    if refusal("AdamW", strategy, dtype, "fp32") is None:
        unstepped.step()
        return
    for refused in (lambda: CollageAdamW(fresh, strategy=strategy), unstepped.step):
        with pytest.raises(ValueError, match=refusal("AdamW", strategy, dtype, "fp32")):
            refused()
    assert not unstepped.state


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_half_precision_model_goes_on_through_a_checkpoint(strategy):
    """What the refusal advises: a new optimizer, built after the change, takes the old states."""
    members = parameters()
    optimizer = CollageAdamW(members, strategy=strategy)
    train(optimizer, members, 3)
    halves = copies_of(members, torch.float16)
    target = "light" if strategy in ("plus", "full") or STRATEGIES[strategy].is_coded else strategy
    resumed = CollageAdamW(halves, strategy=target)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if target == "light":
        # What completed a weight of another format is left.
        assert all(torch.equal(resumed.stored_parameter(half), half.double()) for half in halves)
    train(resumed, halves, 2)
    for member in halves:
        torch.testing.assert_close(resumed.stored_parameter(member).half(), member.detach(), rtol=2**-9, atol=1e-6)


def test_a_strategy_that_does_not_exist_moves_nothing():
    first, second = parameters(), parameters(seed=2)
    optimizer = CollageAdamW([{"params": first}, {"params": second}])
    train(optimizer, first + second, 1)
    optimizer.param_groups[1]["strategy"] = "pluss"
    assert_nothing_moves(optimizer, first + second, ValueError, "Invalid strategy: 'pluss'")


@pytest.mark.parametrize(
    ("strategy", "arithmetic"),
    [(name, "fp32") for name in STRATEGIES]
    + [(name, "storage") for name in STRATEGIES if not STRATEGIES[name].is_coded],
)
def test_a_gradient_whose_square_overflows_is_survived(strategy, arithmetic):
    """1e21 is finite, its square is not: weights and what is kept as pairs stay numbers, and training goes on."""
    (member,) = parameters(shapes=((8,),))
    optimizer = CollageAdamW([member], strategy=strategy, arithmetic=arithmetic)
    member.grad = torch.full_like(member, 1e-2)
    member.grad[3], member.grad[5] = 1e21, -3e38
    optimizer.step()
    give_gradients([member], step=2)
    optimizer.step()
    assert optimizer.stored_parameter(member).isfinite().all()
    for key, value in optimizer.state[member].items():
        assert not value.isnan().any(), key
        if f"{key}_low" in optimizer.state[member] or key.endswith("_scale"):
            assert value.isfinite().all(), key
