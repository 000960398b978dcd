"""Chunks, layouts and the two arithmetics: what a step does to each element, derived another way."""

from typing import Any

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW, tensor_step
from collage_optim.numerics import grow, multiply_expansions, split

from tests.optim.models import assert_same_bits, give_gradients, parameters, train
from tests.reference.stored import reference_value

NEAREST = [name for name, strategy in STRATEGIES.items() if not strategy.stochastic]


def stepped(members, steps=3, **options):
    optimizer = CollageAdamW(members, lr=1e-2, **options)
    train(optimizer, members, steps)
    return optimizer


@pytest.mark.parametrize("strategy", NEAREST)
def test_memory_layout_does_not_show(strategy):
    """Channels-last parameters with contiguous gradients end with the same values."""
    (plain,) = parameters(shapes=((4, 3, 5, 5),))
    strided = torch.nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    first, second = CollageAdamW([plain], strategy=strategy), CollageAdamW([strided], strategy=strategy)
    for step in range(3):
        give_gradients([plain], [strided], step=step)
        first.step()
        second.step()
    assert strided.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(first.stored_parameter(plain), second.stored_parameter(strided))


def test_stored_parameter_of_each_strategy():
    for strategy in STRATEGIES:
        (member,) = parameters(shapes=((6, 4),))
        optimizer = CollageAdamW([member], strategy=strategy)
        assert torch.equal(optimizer.stored_parameter(member), member.detach().double())
        train(optimizer, [member], 3)
        state = optimizer.state[member]
        expected = (
            state["master_parameter"].double()
            if "master_parameter" in state
            else reference_value(state, "parameter", member)
        )
        stored = optimizer.stored_parameter(member)
        assert stored.dtype == torch.float64
        assert stored.shape == member.shape
        assert torch.equal(stored, expected)
        if strategy == "light-stochastic":
            continue
        # Bits below a weight are split at a tie away from zero, pairs and masters at the even neighbour.
        if not STRATEGIES[strategy].is_coded:
            assert torch.equal(stored.to(torch.float32).bfloat16(), member.detach())


def one_published_step(reference_value, gradient, step, options):
    """The published algorithm with both expansions, operation by operation in bf16."""
    parameter, low, first, second, second_low = reference_value
    lr, (beta1, beta2), eps, weight_decay = (options[key] for key in ("lr", "betas", "eps", "weight_decay"))
    first = first * beta1 + gradient * (1 - beta1)
    high, rest = split(torch.tensor([beta2], dtype=torch.float64), torch.bfloat16)
    increment = gradient * (1 - beta2) * gradient
    second, second_low = grow(*multiply_expansions(high, rest, second, second_low), increment)
    root = second.sqrt() * (1 / (1 - beta2**step) ** 0.5)
    ratio = first / (root + eps)
    displacement = ratio * (-lr / (1 - beta1**step)) - parameter * (lr * weight_decay)
    parameter, low = grow(parameter, low, displacement)
    return parameter, low, first, second, second_low


def test_plus_in_storage_arithmetic_is_the_published_algorithm():
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    (member,) = parameters(shapes=((500,),))
    reference_value = [member.detach().clone()] + [torch.zeros_like(member.detach()) for _ in range(4)]
    optimizer = CollageAdamW([member], strategy="plus", arithmetic="storage", **options)
    for step in range(1, 31):
        give_gradients([member], step=step)
        reference_value = list(one_published_step(reference_value, member.grad, step, options))
        optimizer.step()
    state = optimizer.state[member]
    found = [member.detach()] + [state[key] for key in ("parameter_low", "exp_avg", "exp_avg_sq", "exp_avg_sq_low")]
    for ours, expected in zip(found, reference_value, strict=True):
        assert torch.equal(ours, expected)


def test_wide_arithmetic_splits_once():
    """The pair after an fp32 step is the split of one fp32 number: high part nearest, sum within 2**-17."""
    (member,) = parameters(shapes=((1000,),))
    optimizer = stepped([member], strategy="plus")
    low = optimizer.state[member]["parameter_low"]
    joined = member.detach().float() + low.float()
    assert torch.equal(joined.bfloat16(), member.detach())
    assert (low != 0).double().mean() > 0.9


def test_not_a_number_stays_where_it_is():
    (member,) = parameters(shapes=((100,),))
    optimizer = CollageAdamW([member], strategy="plus")
    member.grad = torch.full_like(member, 1e-2)
    member.grad[7] = float("nan")
    optimizer.step()
    assert torch.isnan(member.detach()).nonzero().tolist() == [[7]]


@pytest.mark.parametrize(
    ("strategy", "arithmetic"),
    [
        *((name, "fp32") for name in STRATEGIES),
        *((name, "storage") for name in NEAREST if not STRATEGIES[name].is_coded),
    ],
)
def test_another_length_of_chunks_gives_the_same_bits(strategy, arithmetic, monkeypatch):
    """Random numbers and blocks go by element, not by chunk."""
    sets = parameters(shapes=((5000,), (37, 53))), parameters(shapes=((5000,), (37, 53)))
    optimizers = [CollageAdamW(members, strategy=strategy, arithmetic=arithmetic, seed=3) for members in sets]
    train(optimizers[0], sets[0], 3)
    monkeypatch.setattr(tensor_step, "_CPU_CHUNK_ELEMENTS", 700)
    train(optimizers[1], sets[1], 3)
    assert_same_bits(*optimizers)
