"""Sums over a window against exact fractions."""

import pytest
import torch
from collage_agent.stats.several_steps import WINDOW_SUMS, window_block_sums

from tests.reference import diagnostics


def test_window_sums_equal_the_exact_ones():
    generator = torch.Generator().manual_seed(9)
    updates = torch.randn(3, 320, generator=generator, dtype=torch.float64)
    updates[:, :20] = 0.0
    before = torch.randn(320, generator=generator, dtype=torch.float64).to(torch.bfloat16).double()
    after = (before + updates.sum(0) * (torch.arange(320) % 3 > 0)).to(torch.bfloat16).double()
    visible = (before + updates.sum(0) * (torch.arange(320) % 5 > 1)).to(torch.bfloat16).double()
    exact = [diagnostics.exact(u) for u in updates]
    stored = diagnostics.window(exact, diagnostics.exact(before), diagnostics.exact(after))
    seen = diagnostics.window(exact, diagnostics.exact(before), diagnostics.exact(visible))
    found = dict(
        zip(
            WINDOW_SUMS,
            window_block_sums(updates.sum(0), after - before, visible - before, 32).array.sum(1).tolist(),
            strict=True,
        )
    )
    assert found["window_active"] == stored["active"] == 300
    assert found["window_lost"] == stored["lost"] > 0
    assert found["window_lost_visible"] == seen["lost"] > stored["lost"]
    for name, expected in (
        ("intended_squared", stored["intended_squared"]),
        ("intended_effective", stored["product"]),
        ("effective_squared", stored["effective_squared"]),
        ("intended_visible", seen["product"]),
        ("visible_squared", seen["effective_squared"]),
    ):
        assert found[f"window_{name}_sum"] == pytest.approx(float(expected), rel=1e-12)
