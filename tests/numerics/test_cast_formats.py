"""Low-precision copies against tables of all the numbers of each format, on hard cases and on random ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from collage_optim.numerics.cast_formats import CAST_FORMATS, coded, scaled

from collage_monitor.statistics.casts import FORMATS
from tests.reference import casts

ROWS, COLUMNS = 40, 64


def matrices():
    """fp32: random over many scales; exactly between numbers; zeros, large beside small, subnormals."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(ROWS, COLUMNS, generator=generator)
    yield normal * torch.exp2(torch.randint(-12, 6, (ROWS, 1), generator=generator).float())
    yield (torch.randint(-4096, 4097, (ROWS, COLUMNS), generator=generator) / 256).float()
    hard = normal * 1e-3
    hard[0] = 0
    hard[1, 5] = 448.0
    hard[2, 7] = float(np.nextafter(np.float32(448), np.float32(449)))
    hard[3] *= 2.0**-110
    hard[4, ::3] = 0
    yield hard
    yield torch.zeros(2, COLUMNS)
    for factor in range(3, 40):
        yield normal[:2] * factor


def test_the_agent_and_the_contract_name_the_same_formats():
    assert tuple(CAST_FORMATS) == FORMATS == tuple(casts.ELEMENTS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_copies_are_the_nearest_numbers(name, dtype):
    kind = CAST_FORMATS[name]
    for matrix in matrices():
        largest = matrix.abs().max().expand(matrix.numel() // kind.block) if kind.of_tensor else None
        found = scaled(*coded(matrix.reshape(-1).to(dtype), kind, largest), kind).double().numpy()
        np.testing.assert_array_equal(found, casts.copy_of(matrix.numpy(), name).reshape(-1))


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "fp8_e5m2", "mxfp8"])
def test_a_sum_of_two_numbers_is_rounded_once(name):
    generator = torch.Generator().manual_seed(4)
    high = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16).double()
    values = high + high * torch.randn(ROWS, COLUMNS, generator=generator).double() * 2.0**-26
    found = scaled(*coded(values.reshape(-1), CAST_FORMATS[name]), CAST_FORMATS[name]).double().numpy()
    np.testing.assert_array_equal(found, casts.copy_of(values.numpy(), name).reshape(-1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", FORMATS)
def test_a_value_that_is_not_finite_spoils_its_block_alone(name, bad):
    kind = CAST_FORMATS[name]
    values = torch.linspace(-1, 1, 96)
    values[40] = bad
    # The largest weight of a tensor with such a value is not finite either: then nothing of its copy is known.
    largest = values.abs().max().expand(96 // kind.block) if kind.of_tensor else None
    finite = scaled(*coded(values, kind, largest), kind).double().isfinite()
    start = 40 // kind.block * kind.block
    expected = torch.ones(96, dtype=torch.bool)
    expected[slice(None) if kind.of_tensor else slice(start, start + kind.block)] = False
    assert torch.equal(finite, expected)
