"""States that are zero where the gradient is not, against plain counting."""

from __future__ import annotations

import pytest
import torch
from collage_agent.stats import may_be_zero, zero_block_counts

from tests.reference import diagnostics


def test_counts_equal_plain_counting():
    generator = torch.Generator().manual_seed(8)
    gradient, *states = (
        torch.randn(320, generator=generator, dtype=torch.float64)
        * torch.randint(0, 2, (320,), generator=generator)
        for _ in range(3)
    )
    left_out = torch.zeros(320, dtype=torch.uint8)
    found = zero_block_counts(gradient, states, left_out, 32).sum(1).tolist()
    for state, count in zip(states, found[1:], strict=True):
        nonzero, zero = diagnostics.zeros(diagnostics.exact(gradient), diagnostics.exact(state))
        assert (320 - found[0], count) == (nonzero, zero)
    left_out[:] = 1
    assert not zero_block_counts(gradient, states, left_out, 32).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_zeros_beyond_the_padding_are_noticed_on_the_host(dtype):
    values = torch.tensor([1.0, -2.0, 0.0, 0.0]).to(dtype)
    assert not may_be_zero(values, 2)
    assert may_be_zero(values, 1)
    assert may_be_zero(torch.tensor([1.0, -2.0, -0.0, 0.0]).to(dtype), 1)
    assert may_be_zero(torch.zeros(4, device="meta", dtype=dtype), 4)
