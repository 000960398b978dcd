"""States that are zero where the gradient is not, against plain counting."""

from __future__ import annotations

import pytest
import torch
from collage_agent.stats import zero_block_counts, zeros

from tests.reference import diagnostics


def test_counts_equal_plain_counting():
    generator = torch.Generator().manual_seed(8)
    gradient, *states = (
        torch.randn(320, generator=generator, dtype=torch.float64)
        * torch.randint(0, 2, (320,), generator=generator)
        for _ in range(3)
    )
    left_out = torch.zeros(320, dtype=torch.uint8)
    live = [gradient.float(), *states]
    found = zero_block_counts(live, gradient, states, left_out, 32).sum(1).tolist()
    for state, count in zip(states, found[1:], strict=True):
        nonzero, zero = diagnostics.zeros(diagnostics.exact(gradient), diagnostics.exact(state))
        assert (320 - found[0], count) == (nonzero, zero)
    left_out[:] = 1
    assert not zero_block_counts(live, gradient, states, left_out, 32).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_host_and_device_count_alike(dtype, monkeypatch):
    gradient = torch.tensor([0.0, -0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0], dtype=torch.float64)
    high = torch.tensor([0.0, 1.0, 0.0, -0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    low = torch.tensor([0.0, 0.0, 0.0, 0.0, 1e-9, 0.0, 0.0, 0.0], dtype=torch.float64)
    left_out = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1], dtype=torch.uint8)
    arguments = ([gradient.to(dtype), high.to(dtype)], gradient, [high + low], left_out, 4)
    expected = [[2.0, 0.0], [2.0, 0.0]]
    assert zero_block_counts(*arguments).tolist() == expected
    monkeypatch.setattr(zeros, "on_host", lambda _: False)
    assert zero_block_counts(*arguments).tolist() == expected
