"""A million and more random pairs in exact arithmetic: every number as an integer over one power of two."""

import pytest
import torch
from collage_optim.numerics import fast_two_sum, two_product, two_sum, ulp

from tests.numerics.bits import random_finite, to_bits
from tests.reference.expansions import LAYOUTS

pytestmark = pytest.mark.slow

CASES = 230_000
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PRODUCT_DOMAIN = {"bfloat16": 2.0**-118, "float16": 2.0**-3}


def integer_table(name):
    """Each bit pattern's value as a multiple of the smallest subnormal; None where it is not finite."""
    layout = LAYOUTS[name]
    unit = 2**-layout.smallest_exponent
    table: list[int | None] = []
    for bits in range(1 << 16):
        try:
            table.append(int(layout.decode(bits) * unit))
        except OverflowError:
            table.append(None)
    return table


@pytest.fixture(scope="module", params=DTYPES)
def cases(request):
    """(name, table, a, b) with random patterns; the larger magnitudes first for the ordered ones."""
    generator = torch.Generator().manual_seed(17)
    a, b = (random_finite(DTYPES[request.param], CASES, generator) for _ in range(2))
    return request.param, integer_table(request.param), a, b


def integers(table, tensor):
    return [table[bits] for bits in to_bits(tensor)]


def check_sums(table, a, b, s, e):
    """s + e = a + b and |e| is at most half an ulp of s, in integers; returns how many were inside the domain."""
    checked = 0
    columns = (integers(table, tensor) for tensor in (a, b, s, e, ulp(s)))
    for one, other, total, error, last_bit in zip(*columns, strict=True):
        if total is None or error is None:
            continue
        assert total + error == one + other
        assert 2 * abs(error) <= last_bit
        checked += 1
    return checked


def test_two_sum(cases):
    _, table, a, b = cases
    assert check_sums(table, a, b, *two_sum(a, b)) > 0.99 * CASES


def test_fast_two_sum_of_ordered_operands(cases):
    _, table, a, b = cases
    ordered = a.abs() >= b.abs()
    large, small = torch.where(ordered, a, b), torch.where(ordered, b, a)
    assert check_sums(table, large, small, *fast_two_sum(large, small)) > 0.99 * CASES


def test_two_product_inside_its_domain(cases):
    name, table, a, b = cases
    unit = 2 ** -LAYOUTS[name].smallest_exponent
    p, e = two_product(a, b)
    exact = (a.double() * b.double()).abs()
    inside = ((exact >= PRODUCT_DOMAIN[name]) & torch.isfinite(p)).tolist()
    rows = zip(*(integers(table, tensor) for tensor in (a, b, p, e)), inside, strict=True)
    checked = 0
    for one, other, product, error, counts in rows:
        if counts:
            assert (product + error) * unit == one * other
            checked += 1
    assert checked > 0.35 * CASES


def test_there_are_a_million_cases():
    """Inside the domain: what the tests above count at least."""
    assert len(DTYPES) * (0.99 + 0.99 + 0.35) * CASES >= 1_000_000
