"""Chunks, layouts, scratch and the two arithmetics: what a step does to each element, derived another way."""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW, tensor_step
from collage_optim.arithmetic import (
    StorageArithmetic,
    WideArithmetic,
    Workspace,
    release_scratch,
    shared_workspace,
)
from collage_optim.numerics import grow, multiply_expansions, split
from collage_optim.strategies import LOW_COMPONENT_SUFFIX
from collage_optim.tensor_step import chunks, longest_chunk

from tests.optim.models import assert_same_bits, give_gradients, parameters, train, train_each, walk
from tests.reference.stored import reference_value

NEAREST = [name for name, strategy in STRATEGIES.items() if not strategy.stochastic]


@pytest.mark.parametrize("strategy", NEAREST)
def test_memory_layout_does_not_show(strategy):
    """Channels-last parameters with contiguous gradients end with the same values."""
    (plain,) = parameters(shapes=((4, 3, 5, 5),))
    strided = torch.nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    first, second = (CollageAdamW([member], strategy=strategy) for member in (plain, strided))
    train_each((first, second), 3)
    assert strided.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(first.stored_parameter(plain), second.stored_parameter(strided))


def test_stored_parameter_of_each_strategy():
    for strategy in STRATEGIES:
        (member,) = parameters(shapes=((6, 4),))
        optimizer = CollageAdamW([member], strategy=strategy)
        assert torch.equal(optimizer.stored_parameter(member), member.detach().double())
        train(optimizer, [member], 3)
        state, stored = optimizer.state[member], optimizer.stored_parameter(member)
        name = "parameter" if "master_parameter" not in state else "master_parameter"
        assert stored.dtype == torch.float64
        assert stored.shape == member.shape
        assert torch.equal(stored, reference_value(state, name, member if name == "parameter" else None))
        if strategy == "plus":
            assert (state["parameter_low"] != 0).double().mean() > 0.8
        # Bits below a weight are split at a tie away from zero, pairs and masters at the even neighbour.
        if strategy != "light-stochastic" and not STRATEGIES[strategy].is_coded:
            assert torch.equal(stored.to(torch.float32).bfloat16(), member.detach())


def one_published_step(kept, gradient, step, options):
    """The published algorithm with both expansions, operation by operation in bf16."""
    parameter, low, first, second, second_low = kept
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
    kept = [member.detach().clone(), *torch.zeros(4, 500, dtype=torch.bfloat16)]
    optimizer = CollageAdamW([member], strategy="plus", arithmetic="storage", **options)
    for step in range(1, 31):
        give_gradients([member], step=step)
        kept = one_published_step(kept, member.grad, step, options)
        optimizer.step()
    state = optimizer.state[member]
    found = [member.detach()] + [state[key] for key in ("parameter_low", "exp_avg", "exp_avg_sq", "exp_avg_sq_low")]
    assert len(found) == len(kept)
    assert all(map(torch.equal, found, kept))


def test_not_a_number_stays_where_it_is():
    (member,) = parameters(shapes=((100,),))
    optimizer = CollageAdamW([member], strategy="plus")
    walk(optimizer, torch.full((100,), 1e-2).index_fill_(0, torch.tensor(7), math.nan))
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
    sets = [parameters(shapes=((5000,), (37, 53))) for _ in range(2)]
    optimizers = [CollageAdamW(members, strategy=strategy, arithmetic=arithmetic, seed=3) for members in sets]
    train_each(optimizers[:1], 3)
    monkeypatch.setattr(tensor_step, "_CPU_CHUNK_ELEMENTS", 700)
    train_each(optimizers[1:], 3)
    assert_same_bits(*optimizers)


def workspace(elements, dtype=torch.float32):
    return Workspace(elements, dtype, torch.device("cpu"))


def test_square_root_is_correctly_rounded():
    """x lies between the squares of the midpoints to the root's two neighbours, in exact rationals."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.exp2(torch.randint(-126, 126, (3000,), generator=generator).float())
    x = torch.rand(3000, generator=generator) * scale
    root = WideArithmetic(workspace(3000)).square_root(x)
    below = torch.nextafter(root, torch.zeros(()))
    above = torch.nextafter(root, torch.full((), math.inf))
    rows = zip(*(part.tolist() for part in (x, below, root, above)), strict=True)
    for value, lower, found, upper in rows:
        low = (Fraction(lower) + Fraction(found)) / 2
        high = (Fraction(found) + Fraction(upper)) / 2
        assert low * low <= Fraction(value) <= high * high


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roots_with_and_without_scratch_agree(dtype):
    hard = torch.tensor([0.0, -0.0, 1e-45, math.inf, math.nan, -1.0], dtype=dtype)
    x = torch.cat([torch.rand(5000, dtype=dtype), hard])
    roots = [WideArithmetic(space, dtype).square_root(x) for space in (None, workspace(x.numel(), dtype))]
    with numpy.errstate(invalid="ignore"):
        expected = torch.from_numpy(numpy.sqrt(x.numpy()))
    torch.testing.assert_close(roots[0], expected, rtol=2.0**-52, atol=0, equal_nan=True)
    torch.testing.assert_close(roots[1], expected, rtol=0, atol=0, equal_nan=True)


def test_of_two_pairs_the_larger_is_kept_whole():
    pairs = [(1.0, 0.0), (2.0, 0.0), (1.0, 2.0**-10), (1.0, -(2.0**-10)), (2.0, -(2.0**-9))]
    drawn = list(itertools.product(pairs, repeat=2))
    state = {}
    for name, own in zip(("most", "now"), zip(*drawn, strict=True), strict=True):
        for key, values in zip((name, name + LOW_COMPONENT_SUFFIX), zip(*own, strict=True), strict=True):
            state[key] = torch.tensor(values, dtype=torch.bfloat16)
    StorageArithmetic().keep_maximum(state, "most", "now")
    kept = zip(state["most"].tolist(), state["most" + LOW_COMPONENT_SUFFIX].tolist(), strict=True)
    assert list(kept) == [max(both) for both in drawn]


@pytest.mark.parametrize("decay", [0.999, 0.9])
def test_a_pair_decays_by_the_decay_itself(decay):
    """In bfloat16 0.999 is 1."""
    state = {name: torch.full((1,), value, dtype=torch.bfloat16) for name, value in (("v", 1.0), ("v_low", 0.0))}
    StorageArithmetic().average(state, "v", decay, torch.zeros(1, dtype=torch.bfloat16))
    assert float(state["v"].double() + state["v_low"].double()) == pytest.approx(decay, rel=2.0**-15)


def test_scratch_is_handed_out_in_turn_and_again():
    space = workspace(8)
    first, second = space.take(), space.take()
    assert first.shape == second.shape == (8,)
    assert first.data_ptr() != second.data_ptr()
    space.give_back(second)
    assert space.take().data_ptr() == second.data_ptr()
    space.restart(3)
    again = space.take()
    assert again.shape == (3,)
    assert again.data_ptr() == first.data_ptr()


@pytest.mark.parametrize("elements", [0, 1, 150, 151, 1000, 1049])
def test_chunks_are_nearly_equal_and_none_is_too_long(elements):
    vector = torch.arange(elements)
    found = [chunk["parameter"] for chunk in chunks({"parameter": vector}, 100)]
    assert torch.equal(torch.cat([vector[:0], *found]), vector)
    assert all(0 < part.numel() <= 150 for part in found)


def test_optimizers_share_their_scratch():
    """An optimizer for each parameter, as in training that steps in the backward pass, is no reason for more."""
    device = torch.device("cpu")
    release_scratch()
    before = shared_workspace(device, torch.float32, longest_chunk(device))
    members = parameters()
    for member in members:
        train(CollageAdamW([member]), [member], 1)
    assert shared_workspace(device, torch.float32, longest_chunk(device)) is before
    release_scratch()
    assert shared_workspace(device, torch.float32, longest_chunk(device)) is not before
