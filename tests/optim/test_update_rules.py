"""AdamW, Adam, SGD and Lion: parity with torch where torch has the rule, with their papers in fp64 otherwise."""

import copy
from typing import Any

import pytest
import torch
from collage_optim import CollageAdam, CollageAdamW, CollageLion, CollageSGD

from tests.optim.models import give_gradients, parameters, tensors_of
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
ADAM_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "amsgrad": True},
    {"maximize": True, "betas": (0.8, 0.99)},
]
ADAMW_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.3, "lr": 3e-3},
    {"amsgrad": True},
    {"maximize": True},
    {"weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6},
    {"lr": torch.tensor(2e-3)},
]
PAIRS: list[tuple[Any, Any, dict[str, Any]]] = [(CollageSGD, torch.optim.SGD, options) for options in SGD_OPTIONS]
PAIRS += [(CollageAdam, torch.optim.Adam, options) for options in ADAM_OPTIONS]
PAIRS += [(CollageAdamW, torch.optim.AdamW, options) for options in ADAMW_OPTIONS]
NAMES = [f"{ours.__name__}-{options}" for ours, _, options in PAIRS]


def both(ours, theirs, options, dtype, arithmetic, steps=25):
    members, others = parameters(dtype), parameters(dtype)
    optimizer = ours(members, strategy="plain", arithmetic=arithmetic, **options)
    reference = theirs(others, foreach=False, **options)
    for step in range(steps):
        give_gradients(members, others, step=step)
        optimizer.step()
        reference.step()
    return optimizer, reference


@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_plain_in_storage_arithmetic_is_torch_bit_for_bit(ours, theirs, options, dtype):
    if dtype == torch.float16:
        options = options if ours is CollageSGD else {**options, "eps": 1e-4}
    optimizer, reference = both(ours, theirs, options, dtype, "storage")
    found = tensors_of(optimizer)
    for key, tensor in tensors_of(reference).items():
        assert tensor is None or torch.equal(found[key], tensor), key


@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS, ids=NAMES)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 5e-6), (torch.float64, 1e-12)], ids=str)
def test_plain_agrees_with_torch(ours, theirs, options, dtype, rtol):
    """25 steps: fp32 rounds weights of 0.02 to 2**-30, and an update to 2**-24 of itself."""
    if dtype == torch.float64 and isinstance(options.get("lr"), torch.Tensor):
        # Of a tensor torch makes an fp32 number.
        options = {**options, "lr": float(options["lr"])}
    optimizer, reference = both(ours, theirs, options, dtype, "fp32")
    found = tensors_of(optimizer)
    for key, tensor in tensors_of(reference).items():
        if tensor is not None:
            torch.testing.assert_close(found[key], tensor, rtol=rtol, atol=rtol * 0.018)


def path(optimizer, member, gradients):
    weights = []
    for gradient in gradients:
        member.grad = gradient
        optimizer.step()
        weights.append(optimizer.stored_parameter(member))
    return weights


def exact_path(optimizer, member, gradients):
    """The path of the exact rule alone."""
    weight, weights = member.detach().double(), []
    averages: dict[str, torch.Tensor] = {}
    for step, gradient in enumerate(gradients, start=1):
        displacement, averages = optimizer.exact_displacement(
            optimizer.param_groups[0], averages, weight, gradient, step
        )
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
        for gradient in noisy_gradients(64, 5):
            member.grad = (-gradient if maximize else gradient).to(member.dtype)
            optimizer.step()
        weights.append(optimizer.stored_parameter(member).clone())
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], parameters(shapes=((64,),))[0].detach())


@pytest.mark.parametrize("arithmetic", ["storage", "fp32"])
@pytest.mark.parametrize("strategy", ["light", "kahan"])
def test_steps_too_small_for_the_weight_add_up_beside_it(strategy, arithmetic):
    member = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = CollageSGD([member], lr=1.0, strategy=strategy, arithmetic=arithmetic)
    for step in range(1, 41):
        member.grad = torch.full_like(member, -(2.0**-12))
        optimizer.step()
        assert optimizer.stored_parameter(member).tolist() == [1 + step * 2.0**-12] * 3


@pytest.mark.parametrize(
    ("strategy", "arithmetic"),
    [
        ("plus", "storage"),
        ("full", "storage"),
        ("plus", "fp32"),
        ("split-master", "fp32"),
        ("split-master-8bit", "fp32"),
    ],
)
def test_a_gradient_whose_square_overflows_leaves_states_of_several_parts_finite(strategy, arithmetic):
    (member,) = parameters(shapes=((64,),))
    optimizer = CollageAdamW([member], lr=1e-2, strategy=strategy, arithmetic=arithmetic)
    for _ in range(2):
        member.grad = torch.full_like(member, 1e25)
        optimizer.step()
    for state in optimizer.state[member].values():
        assert torch.isfinite(torch.as_tensor(state)).all()


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
    error = path(optimizer, member, gradients)[-1] - expected[-1]
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
    found = path(optimizer, member, gradients)[-1]
    # The sign of a sum near zero may turn on one rounding of the average: few elements, and by 2 lr each time.
    close = (found - expected[-1]).abs() <= 1e-5
    assert close.double().mean() > 0.97


def test_lion_has_larger_steps_from_no_gradient():
    member = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = CollageLion([member], lr=0.25, strategy="light")
    member.grad = torch.tensor([1.0, -1e-20, 0.0, 3.0]).bfloat16()
    optimizer.step()
    assert optimizer.stored_parameter(member).tolist() == [0.75, 1.25, 1.0, 0.75]


REFUSED = [
    (CollageSGD, {"strategy": "plus", "momentum": 0.9}, "CollageSGD has none: use 'light'"),
    (CollageLion, {"strategy": "plus"}, "CollageLion has none: use 'light'"),
    (CollageSGD, {"strategy": "full"}, "CollageSGD has none: use 'light'"),
    (CollageSGD, {"strategy": "fp32-states"}, "CollageSGD has none: use 'plain'"),
    (CollageSGD, {"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
    (CollageSGD, {"momentum": -1.0}, "Invalid momentum value: -1.0"),
    (CollageSGD, {"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
    (CollageLion, {"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
    (CollageLion, {"lr": -1.0}, "Invalid learning rate: -1.0"),
]


@pytest.mark.parametrize(("optimizer", "options", "message"), REFUSED)
def test_what_makes_no_sense_is_refused(optimizer, options, message):
    with pytest.raises(ValueError, match=message):
        optimizer(parameters(), **options)


def test_checkpoints_of_torch_sgd_load():
    """torch's SGD keeps no counter; the first step is over all the same."""
    members, others = parameters(), parameters()
    options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2}
    reference = torch.optim.SGD(members, foreach=False, **options)
    give_gradients(members, others, step=0)
    reference.step()
    for other, member in zip(others, members, strict=True):
        other.data.copy_(member.data)
    optimizer = CollageSGD(others, strategy="plain", arithmetic="storage", lr=1.0, momentum=0.5)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    optimizer.load_state_dict(optimizer.state_dict())
    for step in range(1, 5):
        give_gradients(members, others, step=step)
        reference.step()
        optimizer.step()
    for other, member in zip(others, members, strict=True):
        assert torch.equal(other, member)
