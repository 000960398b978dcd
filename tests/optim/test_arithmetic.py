"""The wide arithmetic's square root is the correctly rounded one, and scratch does not leak into results."""

import itertools
import math
from fractions import Fraction

import numpy
import pytest
import torch
from collage_optim import CollageAdamW
from collage_optim.arithmetic import (
    StorageArithmetic,
    WideArithmetic,
    Workspace,
    release_scratch,
    shared_workspace,
)
from collage_optim.strategies import LOW_COMPONENT_SUFFIX
from collage_optim.tensor_step import chunks, longest_chunk

from tests.optim.models import parameters, train


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
def test_with_and_without_scratch_agree(dtype):
    x = torch.cat(
        [torch.rand(5000, dtype=dtype), torch.tensor([0.0, -0.0, 1e-45, math.inf, math.nan], dtype=dtype)]
    )
    roots = [WideArithmetic(space, dtype).square_root(x) for space in (None, workspace(x.numel(), dtype))]
    expected = torch.from_numpy(numpy.sqrt(x.numpy()))
    torch.testing.assert_close(roots[0], expected, rtol=2.0**-52, atol=0, equal_nan=True)
    torch.testing.assert_close(roots[1], expected, rtol=0, atol=0, equal_nan=True)


def test_root_of_a_negative_number_is_not_a_number_and_no_warning():
    assert torch.isnan(WideArithmetic(workspace(1)).square_root(torch.tensor([-1.0]))).all()


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
