"""Rounding, ulp, gaps and neighbours against exact rationals and against all 16-bit patterns.

Float8 over all pairs of finite numbers, against fp64, in which all of it is exact.
"""

from fractions import Fraction

import pytest
import torch
from collage_optim.numerics import fast_two_sum, gap_towards, neighbour, round_to, two_product, two_sum, ulp
from collage_optim.numerics.formats import format_of

from tests.numerics.bits import finite_patterns, to_bits
from tests.reference.expansions import LAYOUTS

DTYPES = [torch.bfloat16, torch.float16]


def layout_of(dtype):
    return LAYOUTS[str(dtype).removeprefix("torch.")]


def values_around_the_grid(dtype, count):
    """fp64 numbers on, between and a hair beside the midpoints of the grid: where double rounding goes wrong."""
    generator = torch.Generator().manual_seed(1)
    everything = finite_patterns(dtype)
    chosen = everything[torch.randint(everything.numel(), (count,), generator=generator)].double()
    gap = ulp(chosen.to(dtype)).double()
    share = torch.tensor([0.0, 0.25, 0.5, 0.75])[torch.randint(4, (count,), generator=generator)].double()
    hair = torch.tensor([-(2.0**-30), 0.0, 2.0**-30])[torch.randint(3, (count,), generator=generator)].double()
    return chosen + torch.sign(chosen) * gap * (share + hair)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.float64, torch.float32])
def test_rounding_is_correct(dtype, source):
    layout = layout_of(dtype)
    x = values_around_the_grid(dtype, 5000).to(source)
    wrong_in_torch = 0
    rounded, cast = round_to(x, dtype).double().tolist(), x.to(dtype).double().tolist()
    for value, ours, theirs in zip(x.tolist(), rounded, cast, strict=True):
        try:
            expected = layout.round(Fraction(value))
        except OverflowError:
            assert abs(ours) == float("inf")
            continue
        assert Fraction(ours) == expected, value
        wrong_in_torch += theirs != ours
    assert (wrong_in_torch > 0) == (source == torch.float64), "the cases no longer provoke a double rounding"


def test_rounding_keeps_what_is_not_finite():
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e300, -1e300], dtype=torch.float64)
    inf = float("inf")
    rounded = round_to(x, torch.bfloat16)
    assert rounded[[0, 1, 3, 4]].tolist() == [inf, -inf, inf, -inf]
    assert torch.isnan(rounded[2])


def test_rounding_keeps_signed_zero_and_the_smallest_subnormal():
    x = torch.tensor([-0.0, 2.0**-134, 2.0**-134 * (1 + 2.0**-40), 2.0**-133, -(2.0**-200)], dtype=torch.float64)
    assert to_bits(round_to(x, torch.bfloat16)) == [0x8000, 0, 1, 1, 0x8000]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_of_every_number(dtype):
    layout = layout_of(dtype)
    x = finite_patterns(dtype)
    computed = ulp(x)
    assert computed.dtype == dtype
    for value, found in zip(x.tolist(), computed.tolist(), strict=True):
        assert found == 2.0 ** layout.exponent_of_ulp(Fraction(value))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_gap_is_the_distance_to_the_neighbour(dtype):
    x = finite_patterns(dtype) if dtype != torch.float32 else torch.randn(5000, dtype=dtype).ldexp(torch.tensor(-9))
    if dtype == torch.float32:
        x = torch.cat([x, torch.exp2(torch.arange(-126.0, 127.0)), torch.tensor([0.0, 1e-45, -1e-45, 1e-40])])
    for sign in (1.0, -1.0):
        direction = torch.full(x.shape, sign)
        reached = neighbour(x, direction)
        finite = torch.isfinite(reached)
        distance = (reached.double() - x.double())[finite]
        assert torch.equal(distance, sign * gap_towards(x, direction)[finite])
    assert gap_towards(x, torch.ones_like(x)).dtype == torch.float64


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_walk_over_all_numbers_in_order(dtype):
    x = torch.unique(finite_patterns(dtype).double()).to(dtype)
    assert torch.equal(neighbour(x[:-1], torch.ones(x.numel() - 1)), x[1:])
    assert torch.equal(neighbour(x[1:], -torch.ones(x.numel() - 1)), x[:-1])
    assert torch.equal(neighbour(x, torch.zeros(x.numel())), x)


def test_gap_halves_only_below_a_normal_power_of_two():
    x = torch.tensor([1.0, -1.0, 1.0, 2.0**-126, 2.0**-125, 0.0, 1.0078125], dtype=torch.bfloat16)
    direction = torch.tensor([-1.0, 1.0, 0.0, -1.0, -1.0, -1.0, -1.0])
    expected = [2.0**-8, 2.0**-8, 2.0**-7, 2.0**-133, 2.0**-133, 2.0**-133, 2.0**-7]
    assert gap_towards(x, direction).tolist() == expected


def test_what_is_not_finite_has_no_gap():
    x = torch.tensor([float("inf"), float("nan"), 3.3895e38], dtype=torch.bfloat16)
    assert torch.isnan(ulp(x)).tolist() == [True, True, False]
    assert torch.isnan(gap_towards(x, -x)).tolist() == [True, True, False]
    assert neighbour(x, torch.ones(3))[2] == float("inf")
    assert neighbour(x, -torch.ones(3))[0] == float("inf")


def test_float8_gaps():
    x = torch.tensor([1.0, 448.0, 0.0]).to(torch.float8_e4m3fn)
    assert gap_towards(x, torch.tensor([-1.0, -1.0, 1.0])).tolist() == [0.0625, 32.0, 2.0**-9]
    assert ulp(torch.tensor([1.0, 57344.0]).to(torch.float8_e5m2)).float().tolist() == [0.25, 8192.0]


def test_unknown_formats_are_named():
    with pytest.raises(TypeError, match=r"torch\.int64 is not a format known here"):
        format_of(torch.int64)


FLOAT8 = {torch.float8_e4m3fn: 254, torch.float8_e5m2: 248}
PRODUCT_DOMAIN = {torch.float8_e4m3fn: 0.2198, torch.float8_e5m2: 3.75e-4}


def finite_float8(dtype):
    everything = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    return everything[torch.isfinite(everything.float())]


def all_pairs(dtype):
    values = finite_float8(dtype)
    assert values.numel() == FLOAT8[dtype]
    first = values.view(torch.uint8).repeat_interleave(values.numel()).view(dtype)
    second = values.view(torch.uint8).repeat(values.numel()).view(dtype)
    return first, second


def nearest(x, dtype):
    """Nearest value by search among all of them, ties to the even pattern; beyond the largest: the largest."""
    grid = finite_float8(dtype)[: FLOAT8[dtype] // 2].double()
    magnitude = x.abs().clamp(max=grid.max())
    above = torch.searchsorted(grid, magnitude).clamp(max=grid.numel() - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = grid[above] - magnitude, magnitude - grid[below]
    take_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    return torch.where(take_below, grid[below], grid[above]).copysign(x)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_rounding_of_all_sums_and_products(dtype):
    a, b = (operand.double() for operand in all_pairs(dtype))
    largest = finite_float8(dtype).float().max().double()
    for exact in (a + b, a * b):
        inside = exact.abs() <= largest
        rounded = round_to(exact, dtype).double()
        assert torch.equal(rounded[inside], nearest(exact, dtype)[inside])


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_sums_are_exact_on_all_pairs(dtype):
    """By Dekker's three operations on all ordered ones, and seldom on others."""
    a, b = all_pairs(dtype)
    exact = a.double() + b.double()
    s, e = (part.double() for part in two_sum(a, b))
    fits = torch.isfinite(s)
    wrong = (s + e != exact) & fits
    # e5m2: two pairs whose sum fits and whose intermediate does not. e4m3 saturates; the error holds the rest.
    assert int(wrong.sum()) == (2 if dtype == torch.float8_e5m2 else 0)
    assert not (torch.isfinite(e) & wrong).any()
    assert torch.equal(s[fits], nearest(exact, dtype)[fits])
    s, e = (part.double() for part in fast_two_sum(a, b))
    fits, ordered = torch.isfinite(s), a.double().abs() >= b.double().abs()
    assert torch.equal((s + e)[fits & ordered], exact[fits & ordered])
    assert ((s + e)[fits & ~ordered] != exact[fits & ~ordered]).double().mean() > 0.5


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_two_product_is_exact_inside_its_domain(dtype):
    a, b = all_pairs(dtype)
    p, e = (part.double() for part in two_product(a, b))
    exact = a.double() * b.double()
    largest = finite_float8(dtype).float().max().double()
    inside = (exact.abs() >= PRODUCT_DOMAIN[dtype]) & (exact.abs() <= largest)
    assert inside.double().mean() > 0.4
    assert torch.equal((p + e)[inside], exact[inside])
