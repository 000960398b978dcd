"""|u| / gap by exponents, against gaps read off bit patterns in exact fractions."""

from fractions import Fraction

import pytest
import torch
from collage_agent.stats.update_histogram import ulp_octave_counts

from collage_monitor.metrics import HISTOGRAM_LABELS
from tests.reference import diagnostics

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
