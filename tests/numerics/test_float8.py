"""Both float8 formats over all pairs of finite numbers, against fp64, in which all of it is exact."""

import pytest
import torch
from collage_optim.numerics import fast_two_sum, round_to, two_product, two_sum

FORMATS = {torch.float8_e4m3fn: 254, torch.float8_e5m2: 248}
PRODUCT_DOMAIN = {torch.float8_e4m3fn: 0.2198, torch.float8_e5m2: 3.75e-4}


def finite(dtype):
    everything = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    return everything[torch.isfinite(everything.float())]


def all_pairs(dtype):
    values = finite(dtype)
    assert values.numel() == FORMATS[dtype]
    first = values.view(torch.uint8).repeat_interleave(values.numel()).view(dtype)
    second = values.view(torch.uint8).repeat(values.numel()).view(dtype)
    return first, second


def nearest(x, dtype):
    """Nearest value by search among all of them, ties to the even pattern; beyond the largest: the largest."""
    grid = finite(dtype)[: FORMATS[dtype] // 2].double()
    magnitude = x.abs().clamp(max=grid.max())
    above = torch.searchsorted(grid, magnitude).clamp(max=grid.numel() - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = grid[above] - magnitude, magnitude - grid[below]
    take_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    return torch.where(take_below, grid[below], grid[above]).copysign(x)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_rounding_of_all_sums_and_products(dtype):
    a, b = (operand.double() for operand in all_pairs(dtype))
    largest = finite(dtype).float().max().double()
    for exact in (a + b, a * b):
        inside = exact.abs() <= largest
        rounded = round_to(exact, dtype).double()
        assert torch.equal(rounded[inside], nearest(exact, dtype)[inside])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_two_sum_is_exact_on_all_pairs(dtype):
    a, b = all_pairs(dtype)
    s, e = (part.double() for part in two_sum(a, b))
    exact = a.double() + b.double()
    wrong = (s + e != exact) & torch.isfinite(s)
    # e5m2: two pairs whose sum fits and whose intermediate does not. e4m3 saturates; the error holds the rest.
    assert int(wrong.sum()) == (2 if dtype == torch.float8_e5m2 else 0)
    assert not (torch.isfinite(e) & wrong).any()
    assert torch.equal(s[torch.isfinite(s)], nearest(exact, dtype)[torch.isfinite(s)])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_fast_two_sum_is_exact_on_all_ordered_pairs(dtype):
    a, b = all_pairs(dtype)
    s, e = (part.double() for part in fast_two_sum(a, b))
    ordered = (a.double().abs() >= b.double().abs()) & torch.isfinite(s)
    assert torch.equal((s + e)[ordered], (a.double() + b.double())[ordered])
    unordered = ~ordered & torch.isfinite(s)
    assert ((s + e)[unordered] != (a.double() + b.double())[unordered]).double().mean() > 0.5


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_two_product_is_exact_inside_its_domain(dtype):
    a, b = all_pairs(dtype)
    p, e = (part.double() for part in two_product(a, b))
    exact = a.double() * b.double()
    largest = finite(dtype).float().max().double()
    inside = (exact.abs() >= PRODUCT_DOMAIN[dtype]) & (exact.abs() <= largest)
    assert inside.double().mean() > 0.4
    assert torch.equal((p + e)[inside], exact[inside])
