"""Transformations and expansions against exact rationals, on pairs with random bit patterns."""

import operator
from fractions import Fraction

import pytest
import torch
from collage_optim import numerics

from tests.numerics.bits import random_finite, to_bits
from tests.reference.expansions import LAYOUTS, OPERATIONS

DTYPES = ["bfloat16", "float16"]
PAIRS = 4000


def draw(dtype, operands, seed):
    generator = torch.Generator().manual_seed(seed)
    return [random_finite(getattr(torch, dtype), PAIRS, generator) for _ in range(operands)]


def normal_expansions(dtype, count, seed):
    """`count` normal expansions whose high parts lie within 2**±5, so that nothing over- or underflows."""
    generator = torch.Generator().manual_seed(seed)
    values: list[torch.Tensor] = []
    for _ in range(count):
        value = torch.randn(PAIRS, generator=generator, dtype=torch.float64)
        scale = torch.exp2(torch.randint(-5, 6, (PAIRS,), generator=generator).double())
        values.extend(numerics.split(value * scale, getattr(torch, dtype)))
    return values


def exact(tensor, layout):
    return [layout.decode(bits) for bits in to_bits(tensor)]


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["two_sum", "fast_two_sum", "two_product", "grow"])
def test_every_bit_on_random_patterns(operation, dtype):
    layout = LAYOUTS[dtype]
    operands = draw(dtype, 3 if operation == "grow" else 2, seed=len(operation))
    computed = getattr(numerics, operation)(*operands)
    checked = 0
    for index, values in enumerate(zip(*(exact(tensor, layout) for tensor in operands), strict=True)):
        try:
            expected = OPERATIONS[operation](layout, *values)
        except OverflowError:
            continue
        assert [Fraction(float(part[index])) for part in computed] == list(expected), values
        checked += 1
    assert checked > 0.8 * PAIRS


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("operation", "combine", "bound"),
    [("add_expansions", operator.add, 3), ("multiply_expansions", operator.mul, 8)],
)
def test_relative_error_of_expansions(operation, combine, bound, dtype):
    layout = LAYOUTS[dtype]
    operands = normal_expansions(dtype, 2, seed=5)
    hi, lo = getattr(numerics, operation)(*operands)
    a_hi, a_lo, b_hi, b_lo, hi, lo = (exact(tensor, layout) for tensor in (*operands, hi, lo))
    smallest = Fraction(2) ** layout.smallest_exponent
    for index in range(PAIRS):
        wanted = combine(a_hi[index] + a_lo[index], b_hi[index] + b_lo[index])
        error = abs(hi[index] + lo[index] - wanted)
        allowed = bound * abs(wanted) * Fraction(1, 4 ** (layout.mantissa_bits + 1))
        # In float16 low parts near the smallest subnormal are rounded to it: at most once for each term.
        assert error <= allowed + (4 * smallest if dtype == "float16" else 0)
        assert layout.round(hi[index] + lo[index]) == hi[index]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_expansions_survives_cancellation(dtype):
    hi, lo = normal_expansions(dtype, 1, seed=6)
    other_hi, other_lo = -hi, -numerics.neighbour(lo, torch.ones_like(lo))
    total = numerics.join(*numerics.add_expansions(hi, lo, other_hi, other_lo))
    wanted = numerics.join(hi, lo) + numerics.join(other_hi, other_lo)
    assert torch.equal(total, wanted)
    assert (total != 0).all()


def test_split_then_join_is_within_the_stated_precision():
    x = torch.randn(PAIRS, generator=torch.Generator().manual_seed(8), dtype=torch.float32)
    joined = numerics.join(*numerics.split(x, torch.bfloat16))
    assert ((joined - x.double()).abs() <= 2.0**-17 * x.double().abs()).all()


def test_shapes_broadcast():
    s, e = numerics.two_sum(torch.ones(3, 1, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))
    assert s.shape == e.shape == (3, 4)
