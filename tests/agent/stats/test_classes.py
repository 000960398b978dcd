"""Classes by block and |u| / gap by exponents, element by element against the definitions in exact fractions."""

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collage_agent.stats.block_sums import flag_counts, nonfinite, zero_excluded
from collage_agent.stats.classes import Flags, class_counts, measure
from collage_agent.stats.edq import edq_products
from collage_agent.stats.update_histogram import ulp_octave_counts

from collage_monitor.metrics import HISTOGRAM_LABELS
from tests.reference import diagnostics

BLOCK = 32


def count(theta, gradient, u, e, visible, *, elements=BLOCK):
    """The sums over whole tensors; only the first `elements` slots of a block hold one."""
    rows = torch.stack((theta, gradient, e, visible, u)).clone()
    excluded = nonfinite(rows.sum(0))
    all_finite = not excluded.any()
    excluded.view(-1, BLOCK)[:, elements:] = 1
    flags = Flags(excluded, nonfinite(gradient), nonfinite(theta + e))
    zero_excluded(rows, excluded)
    updates = rows[2:] if (e - visible).any() else rows[3:]
    product = edq_products(rows[4], rows[2:3])[0]
    held = torch.full((len(u) // BLOCK,), float(elements), dtype=torch.float64)
    classes = class_counts(updates, product, None if all_finite else flags, BLOCK, held)
    step: Any = SimpleNamespace(classes=classes, block_elements=held)
    return {key: float(sums.sum()) for key, sums in measure(step).by_block.items()}


def random_case(seed):
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(20 * BLOCK, generator=generator, dtype=torch.float64)

    def some(share):
        return torch.rand(20 * BLOCK, generator=generator) < share

    theta, gradient, u = normal(), normal(), normal()
    e = u * torch.tensor([0.0, 1.0, 0.5, 1.5, 0.4999, 1.5001, -1.0, 2.0], dtype=torch.float64).repeat(80)
    visible = torch.where(some(0.3), 0.0, e)
    u[some(0.2)] = 0.0
    e[some(0.2)] = -0.0
    gradient[some(0.02)] = torch.nan
    theta[some(0.02)] = torch.inf
    return theta, gradient, u, e, visible


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("elements", [BLOCK, BLOCK - 5])
def test_counts_equal_the_definitions(seed, finite, elements):
    case = [values.nan_to_num(0.0, 0.0) if finite else values for values in random_case(seed)]
    for values in case:
        values.view(-1, BLOCK)[:, elements:] = 0.0
    held = [diagnostics.exact(values.view(-1, BLOCK)[:, :elements].flatten()) for values in case]
    expected = diagnostics.classes(*held)
    found = count(*case, elements=elements)
    assert {key: found[key] for key in expected} == expected
    assert (found["nonfinite"] == 0) == finite


def test_a_block_full_of_one_class_does_not_spill_into_the_next_count_and_a_longer_one_is_refused():
    ones = torch.ones(BLOCK, dtype=torch.float64)
    counts = count(ones, ones, ones, ones, ones)
    assert counts == {**dict.fromkeys(counts, 0.0), "faithful": float(BLOCK), "active_blocks": 1.0}
    with pytest.raises(ValueError, match="at most 32"):
        flag_counts(torch.zeros(1, 64, dtype=torch.uint8), 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_nonfinite_flags_every_nan_and_infinity_and_nothing_else(dtype):
    info = torch.finfo(dtype)
    values = torch.tensor(
        [0.0, -0.0, 1.0, info.max, info.min, info.tiny, torch.nan, torch.inf, -torch.inf], dtype=dtype
    )
    assert nonfinite(values).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert nonfinite(-values).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def counted(u, values, dtype):
    """The bins of each single element, with one block of one element each."""
    columns = torch.arange(len(u))
    found = ulp_octave_counts(u, values.double(), dtype, columns, len(u), 1)
    return found.t()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_updates_fall_into_the_octaves_of_the_exact_gaps(dtype):
    generator = torch.Generator().manual_seed(3)
    values = (torch.randn(600, generator=generator) * 10.0 ** torch.randint(-4, 4, (600,), generator=generator)).to(
        dtype
    )
    u = torch.randn(600, generator=generator, dtype=torch.float64) * values.double().abs()
    u *= 2.0 ** torch.randint(-40, 3, (600,), generator=generator).double()
    found = counted(u, values, dtype)
    for index in range(600):
        expected = diagnostics.octave_counts([Fraction(float(u[index]))], [float(values[index])], dtype)
        assert found[index].tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_edges_power_of_two_subnormal_zero_largest(dtype, sign):
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    points = [0.0, 1.0, 2.0, 1.0 + info.eps, info.smallest_normal, 3 * tiny, tiny, info.max, 0.5]
    for point in points:
        value = torch.tensor([sign * point], dtype=dtype)
        scale = float(diagnostics.neighbour_gap(float(value), True, dtype))
        for factor in (0.25, 0.49, 0.5, 0.51, 1.0, 1.99, 2.0, 100.0, 1e-9, 1e9):
            for direction in (1.0, -1.0):
                u = torch.tensor([direction * factor * scale], dtype=torch.float64)
                expected = diagnostics.octave_counts([Fraction(float(u))], [float(value)], dtype)
                assert counted(u, value, dtype)[0].tolist() == expected, (point, factor, direction)


def test_downwards_from_a_power_of_two_the_gap_is_half_as_wide():
    values = torch.tensor([1.0, 1.0, -1.0], dtype=torch.bfloat16)
    u = torch.tensor([2.0**-8, -(2.0**-8), 2.0**-8], dtype=torch.float64)
    bins = counted(u, values, torch.bfloat16).argmax(1)
    assert [HISTOGRAM_LABELS[int(index)] for index in bins] == ["-1", "0", "0"]
