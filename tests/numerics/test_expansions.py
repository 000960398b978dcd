"""Transformations and expansions: the written-down cases, and random ones against exact rationals.

Expansions are of one to three parts: exact sums, no overlap, comparison by value, in every format.
"""

import json
import operator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from collage_optim import numerics
from collage_optim.numerics import compare_expansions, join, renormalise, scale_expansion, split, ulp
from collage_optim.numerics.expansions import split_scalar

from tests.numerics.bits import from_bits, random_finite, to_bits, to_hexadecimal
from tests.reference.expansions import LAYOUTS, OPERATIONS

VECTORS = json.loads((Path(__file__).parents[1] / "vectors.json").read_text(encoding="utf-8"))

SPLITS = {
    "3f800001": "3f80 3400",
    "3f808000": "3f80 3b80",
    "3f818000": "3f82 bb80",
    "3f80ffff": "3f81 b400",
    "42ce802c": "42cf be80",
    "7f7f7fff": "7f7f 7b00",
    "7f7f8000": "7f80 ff80",
    "00800001": "0080 0000",
    "05000100": "0500 0002",
}

BETA2_PAIRS = {
    0.9: "3f66 3acd",
    0.95: "3f73 3a4d",
    0.98: "3f7b b9f6",
    0.99: "3f7d 3ae1",
    0.995: "3f7f ba8f",
    0.999: "3f80 ba83",
    0.9999: "3f80 b8d2",
    1 - 2**-17: "3f80 b700",
}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['operation']}-{vector['note']}")
def test_one_of_45_vectors(vector):
    """Its bits, which exact rationals give too, and whether anything of the result is lost."""
    assert len(VECTORS) == 45
    operands = [from_bits([pattern], getattr(torch, vector["dtype"])) for pattern in vector["inputs"]]
    assert to_hexadecimal(*getattr(numerics, vector["operation"])(*operands)) == vector["outputs"]
    layout = LAYOUTS[vector["dtype"]]
    given, outputs = ([layout.decode(int(bits, 16)) for bits in vector[side]] for side in ("inputs", "outputs"))
    assert list(OPERATIONS[vector["operation"]](layout, *given)) == outputs
    whole = given[0] * given[1] if vector["operation"] == "two_product" else sum(given)
    if vector["operation"] == "multiply_expansions":
        whole = (given[0] + given[1]) * (given[2] + given[3])
    assert (sum(outputs) == whole) == vector["error_free"]


@pytest.mark.parametrize("pattern", SPLITS)
def test_split(pattern):
    hi, lo = numerics.split(from_bits([pattern], torch.float32), torch.bfloat16)
    assert " ".join(to_hexadecimal(hi, lo)) == SPLITS[pattern]
    # Beyond the largest the parts are infinities of both signs.
    assert torch.isnan(numerics.join(hi, lo)).item() == (pattern == "7f7f8000")


def test_split_again_keeps_the_value_and_may_change_the_bits():
    hi, lo = numerics.split(from_bits(["42ce802c"], torch.float32), torch.bfloat16)
    joined = numerics.join(hi, lo, dtype=torch.float32)
    again = numerics.split(joined, torch.bfloat16)
    assert to_hexadecimal(*again) == ["42ce", "3e80"]
    assert torch.equal(numerics.join(*again), numerics.join(hi, lo))


@pytest.mark.parametrize("beta2", BETA2_PAIRS)
def test_residual_of_beta2_is_taken_against_the_rounded_value(beta2):
    pair = [torch.tensor([part], dtype=torch.bfloat16) for part in split_scalar(beta2, torch.bfloat16)]
    assert " ".join(to_hexadecimal(*pair)) == BETA2_PAIRS[beta2]


def test_intermediate_overflow_is_where_the_docstring_says():
    a, b = from_bits(["7bc0"], torch.bfloat16), from_bits(["ff7f"], torch.bfloat16)
    s, e = numerics.two_sum(a, b)
    assert to_hexadecimal(s) == ["ff7e"]
    assert torch.isnan(e).all()
    assert to_hexadecimal(*numerics.fast_two_sum(b, a)) == ["ff7e", "7b00"]
    assert to_hexadecimal(*numerics.two_sum(b, a)) == ["ff7e", "7b00"]


def test_product_leaves_its_operands_alone():
    """A product that overwrites its operand turns (1, 0) * 0.95 into 3f67 bd45 = 0.854."""
    one, zero = from_bits(["3f80"], torch.bfloat16), from_bits(["0000"], torch.bfloat16)
    hi, lo = from_bits(["3f73"], torch.bfloat16), from_bits(["3a4d"], torch.bfloat16)
    assert to_hexadecimal(*numerics.multiply_expansions(one, zero, hi, lo)) == ["3f73", "3a4d"]
    assert to_hexadecimal(one, zero, hi, lo) == ["3f80", "0000", "3f73", "3a4d"]


@pytest.mark.parametrize("operation", ["two_sum", "fast_two_sum", "two_product"])
def test_mixed_formats_and_products_of_fp64_are_refused(operation):
    with pytest.raises(TypeError, match=r"one dtype.*bfloat16.*float32"):
        getattr(numerics, operation)(torch.ones(1), torch.ones(1, dtype=torch.bfloat16))
    if operation == "two_product":
        with pytest.raises(TypeError, match="float64"):
            numerics.two_product(torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))


DTYPES = ["bfloat16", "float16"]
PAIRS = 4000


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
    generator = torch.Generator().manual_seed(len(operation))
    count = 3 if operation == "grow" else 2
    operands = [random_finite(getattr(torch, dtype), PAIRS, generator) for _ in range(count)]
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


def test_shapes_broadcast():
    s, e = numerics.two_sum(torch.ones(3, 1, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))
    assert s.shape == e.shape == (3, 4)


FORMATS = [torch.bfloat16, torch.float16, torch.float8_e5m2]
COUNT = 400


def sums(parts):
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
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
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
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_renormalising_keeps_the_sum_and_separates_the_parts(dtype, length):
    parts = unordered(dtype, length, seed=length)
    found = renormalise(*parts)
    assert sums(found) == sums(parts)
    for high, low in pairwise(found):
        assert (2 * low.double().abs() <= ulp(high).double()).all()
        assert (low.double()[high.double() == 0] == 0).all()


def test_cutting_rounds_to_nearest():
    parts = unordered(torch.bfloat16, 4, seed=9)
    found = renormalise(*parts, length=2)
    assert len(found) == 2
    for kept, wanted, last in zip(sums(found), sums(parts), ulp(found[1]).double().tolist(), strict=True):
        assert abs(kept - wanted) <= Fraction(last) / 2


@pytest.mark.parametrize("length", [1, 2, 3])
def test_scaling(length):
    parts = split(numbers(2), torch.bfloat16, length)
    factor = numbers(3).to(torch.bfloat16)
    found = sums(scale_expansion(parts, factor))
    for value, whole, times in zip(found, sums(parts), factor.double().tolist(), strict=True):
        wanted = whole * Fraction(times)
        assert abs(value - wanted) <= abs(wanted) * Fraction(2) ** -(8 * length)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_comparison_is_by_value(dtype):
    a, b = unordered(dtype, 3, seed=11), unordered(dtype, 2, seed=12)
    signs = compare_expansions(tuple(a), tuple(b)).tolist()
    assert signs == [(one > other) - (one < other) for one, other in zip(sums(a), sums(b), strict=True)]
    assert compare_expansions(tuple(a), renormalise(*a)).tolist() == [0] * COUNT
