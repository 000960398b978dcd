"""A conversion to 24 bits leaves the visible weight alone, and takes the nearest number that stands beside it."""

from __future__ import annotations

import copy

import pytest
import torch
from collage_optim import CollageAdamW


@pytest.mark.parametrize(("seed", "scale"), [(31, 0.05), (2, 1.0), (5, 3e-4)])
@pytest.mark.parametrize("source", ["master-weights", "split-master"])
def test_the_nearest_beside_the_visible_weight(source, seed, scale):
    torch.manual_seed(seed)
    weight = torch.nn.Parameter((torch.randn(50_000) * scale).bfloat16())
    optimizer = CollageAdamW([weight], lr=3e-3 * scale, strategy=source)
    for _ in range(6):
        weight.grad = torch.randn(weight.shape).bfloat16()
        optimizer.step()
    exact = optimizer.stored_parameter(weight).detach().double()
    other = torch.nn.Parameter(weight.detach().clone())
    target = CollageAdamW([other], lr=3e-3 * scale, strategy="split-24bit-8bit")
    target.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(other, weight)
    low = target.state[other]["parameter_low"].to(torch.int32)
    bits = exact.float().view(torch.int32)
    wanted = ((bits - (other.detach().view(torch.int16).to(torch.int32) << 16)) / 256).round()
    beside = low == wanted.clamp(-128, 127)
    # At a tie of its own, either neighbour is nearest.
    tie = (bits & 0xFF) == 0x80
    assert bool((beside | tie).all())
    assert bool(((wanted - low).abs() <= 1).all())
    assert 0.0005 < float((wanted > 127).double().mean()) < 0.004
