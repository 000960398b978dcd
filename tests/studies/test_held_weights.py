"""Weights held to a format: what it can hold, after every step, as the agent sees it; and a pass in bfloat16."""

from fractions import Fraction

import collage_agent as collage
import pytest
import torch
from collage_agent.transport import MemoryTransport
from collage_demo.models import ByteGPT, loss_of
from collage_studies.held_weights import ReadInBfloat16, expansion, round_weights_after_steps
from torch.nn.utils import parameters_to_vector

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def numbers(count=500, size=0.05):
    return torch.randn(count, generator=torch.Generator().manual_seed(0)) * size


def nearest_parts(value, finite, parts):
    """The sum of the nearest numbers of a format, part by part, in exact rationals; ties go to the even bits."""
    total = Fraction(0)
    for _ in range(parts):
        rest = Fraction(value) - total
        total += min(finite, key=lambda entry: (abs(entry[0] - rest), entry[1] & 1))[0]
    return total


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_an_expansion_of_eight_bit_floats_in_exact_rationals(dtype, parts):
    bits = torch.arange(256, dtype=torch.uint8)
    values = bits.view(dtype).float()
    finite = [
        (Fraction(v), b)
        for v, b in zip(values.tolist(), bits.tolist(), strict=True)
        if abs(v) < float("inf") and b != 128
    ]
    weights = numbers(60)
    largest = Fraction(weights.abs().max().item())
    limit, scale = Fraction(torch.finfo(dtype).max), Fraction(1)
    while largest * scale * 2 <= limit:
        scale *= 2
    held = expansion(dtype, parts)(weights)
    assert held.dtype == weights.dtype
    for weight, found in zip(weights.tolist(), held.tolist(), strict=True):
        assert Fraction(found) == nearest_parts(Fraction(weight) * scale, finite, parts) / scale


def test_more_parts_hold_more_and_what_is_held_stays():
    weights = numbers()
    errors = []
    for parts in (1, 2, 3):
        held = expansion(E4M3, parts)(weights)
        assert torch.equal(expansion(E4M3, parts)(held), held)
        errors.append((held - weights).norm().item())
    assert errors[0] > 5 * errors[1] > 25 * errors[2]


def test_a_pair_of_bfloat16_is_the_number_and_what_it_lacks():
    weights = numbers()
    high = weights.to(torch.bfloat16).float()
    assert torch.equal(expansion(torch.bfloat16, 1)(weights), high)
    assert torch.equal(expansion(torch.bfloat16, 2)(weights), high + (weights - high).to(torch.bfloat16).float())


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_rounding_at_random_is_right_in_the_mean(parts):
    weights = numbers(50)
    hold = expansion(E4M3, parts, torch.Generator().manual_seed(1))
    drawn = torch.stack([hold(weights) for _ in range(2000)])
    off = (drawn.mean(0) - weights).abs()
    assert (off <= 5 * drawn.std(0) / 2000**0.5 + 1e-9).all()
    assert drawn.std(0).max() > 0


def test_zeros_and_what_is_not_finite_have_the_scale_one():
    assert torch.equal(expansion(E4M3, 2)(torch.zeros(4)), torch.zeros(4))
    assert expansion(E5M2, 2)(torch.tensor([1.0, float("inf")]))[0] == 1.0


@pytest.mark.slow
def test_the_agent_sees_what_the_format_takes(tmp_path):
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hold = expansion(E4M3, 2)
    round_weights_after_steps([optimizer], hold)
    twin = torch.nn.Linear(40, 30)
    twin.load_state_dict(model.state_dict())
    free = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    with collage.init("p", dir=tmp_path, transport=MemoryTransport()):
        handle = collage.watch(model, optimizer, every=1, sample="all", budget=None)
        for step in range(3):
            twin.load_state_dict(model.state_dict())
            given = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
            for own, by in ((model, optimizer), (twin, free)):
                by.zero_grad()
                own(given).square().mean().backward()
            before = parameters_to_vector(model.parameters()).detach().double()
            optimizer.step()
            free.step()
            for weight in model.parameters():
                assert torch.equal(weight, hold(weight.detach()))
            moved, meant = (
                parameters_to_vector(own.parameters()).detach().double() - before for own in (model, twin)
            )
            expected = float(meant @ moved / (meant @ meant))
            assert handle.summary()["model"]["edq_ratio"] == pytest.approx(expected, rel=1e-4)
        assert handle.info.intent == "shadow"


def test_a_model_that_is_read_in_bfloat16_computes_as_one_in_bfloat16():
    torch.manual_seed(0)
    inner = ByteGPT(layers=1, width=32, length=16)
    low = ByteGPT(layers=1, width=32, length=16).to(torch.bfloat16)
    low.load_state_dict(inner.state_dict())
    model = ReadInBfloat16(inner)
    inputs = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    losses = [loss_of(entry, inputs, inputs) for entry in (model, low)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for weight, other in zip(inner.parameters(), low.parameters(), strict=True):
        assert weight.grad is not None
        assert other.grad is not None
        assert weight.grad.dtype == torch.float32
        assert torch.equal(weight.grad, other.grad.float())
