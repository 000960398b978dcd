"""Residuals against exact fractions: zeros, fill and its histogram."""

from __future__ import annotations

import pytest
import torch
from collage_agent.stats.optimizer_state import residual_block_sums
from collage_agent.stats.update_histogram import ulp_octave_counts

from tests.reference import diagnostics


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_residual_sums_and_histogram_equal_the_exact_ones(dtype):
    generator = torch.Generator().manual_seed(6)
    exact = torch.randn(320, generator=generator, dtype=torch.float64) * 2.0 ** torch.randint(-18, 2, (320,))
    exact[:32] = (1.0 + 1e-4) * 2.0 ** torch.arange(-16, 16)
    values = exact.to(dtype)
    residual = (exact - values.double()).to(dtype).double()
    residual[40:60] = 0.0
    zero, fill, octaves = diagnostics.residuals(
        diagnostics.exact(residual), [float(x) for x in values.double()], dtype
    )
    taken = torch.zeros(320, dtype=torch.uint8)
    found = residual_block_sums(residual, values, dtype, taken, 32).sum(1)
    assert found[:2].tolist() == [320, zero]
    assert float(found[2]) == pytest.approx(float(fill), rel=1e-13)
    assert 0 < float(found[2]) <= 320 - zero
    counts = ulp_octave_counts(residual, values, dtype, torch.zeros(10, dtype=torch.int64), 1, 32, gaps=0.5)[:, 0]
    counts[0] -= zero
    assert counts.tolist() == octaves


def test_what_is_left_out_is_no_element_and_no_zero():
    values = torch.ones(8, dtype=torch.bfloat16)
    excluded = torch.tensor([0, 1, 0, 1, 0, 1, 0, 0], dtype=torch.uint8)
    found = residual_block_sums(torch.zeros(8, dtype=torch.float64), values, torch.bfloat16, excluded, 8)
    assert found[:, 0].tolist() == [5, 5, 0]
