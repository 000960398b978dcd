"""Counterfactuals against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from collage_agent.stats.counterfactuals import COUNTERFACTUAL_SUMS, counterfactual_block_sums, fp8_scales

from tests.reference import diagnostics
from tests.reference.expansions import LAYOUTS

NAMES = ("squared", "plain", "light", "stochastic", "fp8", "variance")


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("size", [1e-4, 3e-3, 0.1])
@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16])
def test_every_method_equals_the_exact_one(size, stored):
    generator = torch.Generator().manual_seed(11)
    theta = torch.randn(640, generator=generator, dtype=torch.float64).to(stored).double()
    theta[:16] = 2.0 ** torch.arange(-10, 6)
    u = size * theta.abs() * torch.randn(640, generator=generator, dtype=torch.float64)
    u[16:40] = 0.0
    scale = fp8_scales(theta, torch.zeros(20, dtype=torch.int64), 1, 32)
    assert float(scale[0]) == float(theta.abs().max()) / 448
    expected = diagnostics.counterfactuals(
        diagnostics.exact(theta), diagnostics.exact(u), Fraction(float(scale[0]))
    )
    found = counterfactual_block_sums(theta, u, scale, 32).sum(1).tolist()
    assert len(found) == len(COUNTERFACTUAL_SUMS) == len(NAMES)
    for name, value in zip(NAMES, found, strict=True):
        assert value == pytest.approx(float(expected[name]), rel=1e-9), name


def test_scales_are_by_tensor_and_a_tensor_of_zeros_is_kept_as_it_is():
    theta = torch.tensor([1.0, -448.0, 0.0, 0.0, 7.0, 0.0], dtype=torch.bfloat16)
    scales = fp8_scales(theta, torch.tensor([2, 0, 2]), 3, 2)
    assert scales.tolist() == [1.0, 1.0, 1.0]
    assert fp8_scales(theta * 2, torch.tensor([2, 0, 2]), 3, 2).tolist() == [2.0, 1.0, 2.0]
    still = torch.zeros(2, dtype=torch.float64)
    assert not counterfactual_block_sums(still, still, scales[1:2], 2).any()


def test_stochastic_rounding_really_has_this_variance():
    theta = torch.tensor([1.0, 1.0, -3.0, 0.7], dtype=torch.float64).to(torch.bfloat16).double()
    u = torch.tensor([1e-3, -1e-3, 5e-3, -2e-4], dtype=torch.float64)
    sums = [Fraction(x) for x in (theta + u).tolist()]
    below, above = zip(*(diagnostics.neighbours(LAYOUTS["bfloat16"], x) for x in sums), strict=True)
    low, high = (torch.tensor([float(x) for x in side], dtype=torch.float64) for side in (below, above))
    draws = torch.rand(40_000, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    seen = torch.where(draws < (theta + u - low) / (high - low), high, low)
    assert torch.allclose(seen.mean(0) - theta, u, atol=5e-5)
    variance = counterfactual_block_sums(theta, u, torch.ones(1, dtype=torch.float64), 4)[-1, 0]
    assert float(variance) == pytest.approx(float(seen.var(0).sum()), rel=0.03)
