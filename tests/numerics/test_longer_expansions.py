"""Expansions of one to three parts: exact sums, no overlap, comparison by value, in every format."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from collage_optim.numerics import compare_expansions, join, renormalise, scale_expansion, split, ulp

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e5m2]
COUNT = 400


def exact(parts):
    """The exact sum of each element's parts."""
    columns = [[Fraction(value) for value in part.double().tolist()] for part in parts]
    return [sum(values) for values in zip(*columns, strict=True)]


def numbers(seed, scale=1.0):
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def unordered(dtype, length, seed):
    """Parts of very different sizes, in no order, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(length):
        scale = torch.exp2(torch.randint(-6, 4, (COUNT,), generator=generator).double())
        part = torch.randn(COUNT, generator=generator, dtype=torch.float64) * scale
        parts.append(torch.where(torch.rand(COUNT, generator=generator) < 0.1, 0, part).to(dtype))
    return parts


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to_and_from_fp64(dtype, length):
    x = numbers(1)
    parts = split(x, dtype, length)
    assert len(parts) == length
    error = (join(*parts) - x).abs()
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float8_e5m2: 3}[dtype]
    smallest = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float8_e5m2: 2.0**-16}[dtype]
    # Each part's rounding leaves half an ulp, and its sign is worth a bit to the next.
    assert (error <= x.abs() * 2.0 ** -(length * (bits + 1) - 1) + smallest).all()


@pytest.mark.parametrize("length", [2, 3, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_renormalising_keeps_the_sum_and_separates_the_parts(dtype, length):
    parts = unordered(dtype, length, seed=length)
    found = renormalise(*parts)
    assert exact(found) == exact(parts)
    for high, low in pairwise(found):
        assert (2 * low.double().abs() <= ulp(high).double()).all()
        assert (low.double()[high.double() == 0] == 0).all()


def test_cutting_rounds_to_nearest():
    parts = unordered(torch.bfloat16, 4, seed=9)
    found = renormalise(*parts, length=2)
    assert len(found) == 2
    for kept, wanted, last in zip(exact(found), exact(parts), ulp(found[1]).double().tolist(), strict=True):
        assert abs(kept - wanted) <= Fraction(last) / 2


@pytest.mark.parametrize("length", [1, 2, 3])
def test_scaling(length):
    parts = split(numbers(2), torch.bfloat16, length)
    factor = numbers(3).to(torch.bfloat16)
    found = exact(scale_expansion(parts, factor))
    for value, whole, times in zip(found, exact(parts), factor.double().tolist(), strict=True):
        wanted = whole * Fraction(times)
        assert abs(value - wanted) <= abs(wanted) * Fraction(2) ** -(8 * length)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_comparison_is_by_value(dtype):
    a, b = unordered(dtype, 3, seed=11), unordered(dtype, 2, seed=12)
    signs = compare_expansions(tuple(a), tuple(b)).tolist()
    assert signs == [(one > other) - (one < other) for one, other in zip(exact(a), exact(b), strict=True)]
    assert compare_expansions(tuple(a), renormalise(*a)).tolist() == [0] * COUNT


def test_equal_values_in_other_bits_are_equal():
    """101.25 - 0.25 and 103 - 2 + … : a re-split pair."""
    first = torch.tensor([103.5], dtype=torch.bfloat16), torch.tensor([-0.25], dtype=torch.bfloat16)
    second = torch.tensor([103.0], dtype=torch.bfloat16), torch.tensor([0.25], dtype=torch.bfloat16)
    assert compare_expansions(first, second).item() == 0
