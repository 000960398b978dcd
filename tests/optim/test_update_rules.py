"""AdamW, Adam, SGD and Lion: parity with torch where torch has the rule, with their papers in fp64 otherwise."""

import copy
from typing import Any

import pytest
import torch
from collage_optim import CollageAdam, CollageAdamW, CollageLion, CollageSGD

from tests.optim.models import copies_of, parameters, tensors_of, train, train_each, walk
from tests.reference.adamw import ReferenceAdamW
from tests.reference.rules import lion_weights, sgd_weights
from tests.reference.streams import noisy_gradients

SGD_OPTIONS: list[dict[str, Any]] = [
    {"lr": 1e-2},
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": 1e-2, "momentum": 0.9},
    {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
    {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    {"lr": torch.tensor(3e-3), "momentum": 0.8},
]
PAIRS: list[tuple[Any, Any, dict[str, Any]]] = [
    *((CollageSGD, torch.optim.SGD, options) for options in SGD_OPTIONS),
    (CollageAdam, torch.optim.Adam, {}),
    (CollageAdam, torch.optim.Adam, {"weight_decay": 0.1}),
    (CollageAdam, torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (CollageAdam, torch.optim.Adam, {"maximize": True, "betas": (0.8, 0.99)}),
    (CollageAdamW, torch.optim.AdamW, {}),
    (CollageAdamW, torch.optim.AdamW, {"weight_decay": 0.3, "lr": 3e-3}),
    (CollageAdamW, torch.optim.AdamW, {"amsgrad": True}),
    (CollageAdamW, torch.optim.AdamW, {"maximize": True}),
    (CollageAdamW, torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6}),
    (CollageAdamW, torch.optim.AdamW, {"lr": torch.tensor(2e-3)}),
]
NAMES = [f"{ours.__name__}-{options}" for ours, _, options in PAIRS]


@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS, ids=NAMES)
@pytest.mark.parametrize(
    ("dtype", "arithmetic", "rtol"),
    [
        *((dtype, "storage", 0.0) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        (torch.float32, "fp32", 5e-6),
        (torch.float64, "fp32", 1e-12),
    ],
    ids=str,
)
def test_plain_is_torch(ours, theirs, options, dtype, arithmetic, rtol):
    """In storage arithmetic to the bit. Else after 25 steps: fp32 rounds weights of 0.02 to 2**-30, and an update
    to 2**-24 of itself.
    """
    if dtype == torch.float16 and ours is not CollageSGD:
        options = {**options, "eps": 1e-4}
    if dtype == torch.float64 and isinstance(options.get("lr"), torch.Tensor):
        # Of a tensor torch makes an fp32 number.
        options = {**options, "lr": float(options["lr"])}
    optimizer = ours(parameters(dtype), strategy="plain", arithmetic=arithmetic, **options)
    reference = theirs(parameters(dtype), foreach=False, **options)
    train_each((optimizer, reference), 25, first=0)
    found = tensors_of(optimizer)
    for key, tensor in tensors_of(reference).items():
        if tensor is not None:
            torch.testing.assert_close(found[key], tensor, rtol=rtol, atol=rtol * 0.018)


def exact_path(optimizer, member, gradients):
    """The path of the exact rule alone."""
    weight, weights = member.detach().double(), []
    averages: dict[str, torch.Tensor] = {}
    exact, (group,) = optimizer.exact_rule(), optimizer.param_groups
    for step, gradient in enumerate(gradients, start=1):
        displacement, averages = exact(group, averages, weight, gradient, step)
        weight = weight + displacement
        weights.append(weight)
    return weights


@pytest.mark.parametrize("arithmetic", ["storage", "fp32"])
@pytest.mark.parametrize("strategy", ["plain", "light", "plus", "full", "kahan"])
def test_maximising_is_minimising_against_the_gradient(strategy, arithmetic):
    weights = []
    for maximize in (False, True):
        (member,) = parameters(shapes=((64,),))
        optimizer = CollageAdamW([member], lr=1e-2, strategy=strategy, arithmetic=arithmetic, maximize=maximize)
        gradients = [-gradient if maximize else gradient for gradient in noisy_gradients(64, 5)]
        weights.append(walk(optimizer, *gradients))
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], parameters(shapes=((64,),))[0].detach())


@pytest.mark.parametrize("arithmetic", ["storage", "fp32"])
@pytest.mark.parametrize("strategy", ["light", "kahan"])
def test_steps_too_small_for_the_weight_add_up_beside_it(strategy, arithmetic):
    member = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = CollageSGD([member], lr=1.0, strategy=strategy, arithmetic=arithmetic)
    for step in range(1, 41):
        assert walk(optimizer, -(2.0**-12)).tolist() == [1 + step * 2.0**-12] * 3


@pytest.mark.parametrize("options", [options for options in SGD_OPTIONS if "maximize" not in options], ids=str)
def test_sgd_follows_its_definition(options):
    (member,) = parameters(shapes=((64,),))
    options = {**options, "lr": float(options["lr"])}
    optimizer = CollageSGD([member], strategy="light", **options)
    gradients = list(noisy_gradients(64, 40))
    expected = sgd_weights(member.detach(), gradients, **options)
    for found, wanted in zip(exact_path(optimizer, member, gradients), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-16)
    start = member.detach().double()
    error = walk(optimizer, *gradients) - expected[-1]
    assert error.norm() <= 2e-2 * (expected[-1] - start).norm()


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("strategy", ["light", "full", "kahan", "master-weights"])
def test_lion_follows_its_paper(strategy, weight_decay):
    (member,) = parameters(shapes=((256,),))
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": weight_decay}
    optimizer = CollageLion([member], strategy=strategy, **options)
    gradients = list(noisy_gradients(256, 40))
    expected = lion_weights(member.detach(), gradients, **options)
    for found, wanted in zip(exact_path(optimizer, member, gradients), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-16)
    found = walk(optimizer, *gradients)
    # The sign of a sum near zero may turn on one rounding of the average: few elements, and by 2 lr each time.
    close = (found - expected[-1]).abs() <= 1e-5
    assert close.double().mean() > 0.97


def test_lion_has_larger_steps_from_no_gradient():
    member = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = CollageLion([member], lr=0.25, strategy="light")
    assert walk(optimizer, [1.0, -1e-20, 0.0, 3.0]).tolist() == [0.75, 1.25, 1.0, 0.75]


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (CollageSGD, {"strategy": "plus", "momentum": 0.9}, "CollageSGD has none: use 'light'"),
        (CollageLion, {"strategy": "plus"}, "CollageLion has none: use 'light'"),
        (CollageSGD, {"strategy": "full"}, "CollageSGD has none: use 'light'"),
        (CollageSGD, {"strategy": "fp32-states"}, "CollageSGD has none: use 'plain'"),
        (CollageSGD, {"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        (CollageSGD, {"momentum": -1.0}, "Invalid momentum value: -1.0"),
        (CollageSGD, {"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        (CollageLion, {"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        (CollageLion, {"lr": -1.0}, "Invalid learning rate: -1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(optimizer, options, message):
    with pytest.raises(ValueError, match=message):
        optimizer(parameters(), **options)


def test_checkpoints_of_torch_sgd_load():
    """torch's SGD keeps no counter; the first step is over all the same."""
    members = parameters()
    options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2}
    reference = torch.optim.SGD(members, foreach=False, **options)
    train(reference, members, 1)
    others = copies_of(members)
    optimizer = CollageSGD(others, strategy="plain", arithmetic="storage", lr=1.0, momentum=0.5)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    optimizer.load_state_dict(optimizer.state_dict())
    train_each((reference, optimizer), 4, first=2)
    assert all(map(torch.equal, others, members))


@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.2, "betas": (0.8, 0.95)}, {"weight_decay": 0}],
    ids=str,
)
def test_the_exact_rule_follows_the_textbook(options):
    """What the agent's shadow step calls."""
    (member,) = parameters(shapes=((64,),))
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, **options}
    reference, gradients = ReferenceAdamW(member, **settings), list(noisy_gradients(64, 50))
    for found, gradient in zip(
        exact_path(CollageAdamW([member], **settings), member, gradients), gradients, strict=True
    ):
        reference.step(gradient)
        torch.testing.assert_close(found, reference.parameter, rtol=1e-13, atol=1e-16)


def test_the_exact_displacement_changes_nothing_that_it_is_given_and_keeps_the_averages_alone():
    group = CollageAdamW(parameters()).param_groups[0]
    state = {name: torch.ones(5, dtype=torch.float64) for name in ("exp_avg", "exp_avg_sq", "parameter_low")}
    weight, gradient = torch.ones(5, dtype=torch.float64), torch.full((5,), 0.5, dtype=torch.float64)
    given = (*state.values(), weight, gradient)
    before = copy.deepcopy(given)
    displacement, after = CollageAdamW.exact_displacement(group, state, weight, gradient, 3)
    assert all(map(torch.equal, given, before))
    assert set(after) == {"exp_avg", "exp_avg_sq"}
    assert displacement.dtype == after["exp_avg"].dtype == torch.float64
    assert after["exp_avg"].data_ptr() != state["exp_avg"].data_ptr()


@pytest.mark.parametrize("shape", [(40,), (3, 4), (0,), ()])
def test_the_exact_displacement_of_a_sample_is_a_sample_of_any_shape(shape):
    group = CollageAdamW(parameters()).param_groups[0]
    weight, gradient = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    whole, after = CollageAdamW.exact_displacement(group, {}, weight, gradient, 1)
    assert whole.shape == after["exp_avg"].shape == shape
    chosen = gradient > 0
    part, _ = CollageAdamW.exact_displacement(group, {}, weight[chosen], gradient[chosen], 1)
    assert torch.equal(whole[chosen], part)
