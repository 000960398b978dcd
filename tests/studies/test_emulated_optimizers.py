"""Formats of other projects by hand-computed codes, and coupled rounding beside the optimizer itself."""

import pytest
import torch
from collage_studies.emulated_optimizers import (
    WAYS,
    BitsAndBytesAdamW,
    EmulatedAdamW,
    ErrorCompensatedAdamW,
    companded,
    dithered,
    dynamic_map,
    in_24_bits,
    nearest_of,
    softsign_codes,
)
from collage_studies.studies.coupled_rounding import ELEMENTS, STREAMS, errors, gradients, rates_and_decay

NO_DECAY = torch.zeros(256)


def filled(*values, length=128):
    return torch.tensor([*values, *[0.0] * (length - len(values))])


def test_flash_optim_codes():
    held = softsign_codes(filled(1.0, 0.5, -0.25, length=32))
    assert held[:3].tolist() == pytest.approx([1, 85 / 169, -51 / 203])
    assert softsign_codes(filled(1 + 2.0**-12, length=32))[0] == 1, "scales are fp16"
    assert in_24_bits(torch.tensor([1 + 2.0**-9])).item() == pytest.approx(1 + 64 / 127 * 2.0**-8, rel=1e-7)


def test_bits_and_bytes_map_and_sign():
    signed, unsigned = dynamic_map(signed=True), dynamic_map(signed=False)
    assert len(signed) == len(unsigned) == 256
    assert signed[[0, 126, 127, 128, 254, 255]].tolist() == pytest.approx(
        [-0.99296875, -5.5e-7, 0, 5.5e-7, 0.99296875, 1]
    )
    assert unsigned[[0, 1, 2, 255]].tolist() == pytest.approx([0, 3.25e-7, 7.75e-7, 1])
    assert nearest_of(unsigned, torch.tensor([1e-7, 2e-7, 5.6e-7])).tolist() == [0, 1, 2]
    optimizer = BitsAndBytesAdamW(False, torch.ones(256), 0.999, NO_DECAY, 1)
    optimizer.first = filled(1.0, -1e-9, 1e-9, length=256)
    optimizer.store(NO_DECAY, NO_DECAY, NO_DECAY)
    assert optimizer.first[:3].tolist() == pytest.approx([1, -5.5e-7, 0])


def test_codes_of_blocks():
    values = filled(1.0, -0.25)
    assert companded(values, 8, 0.5)[:2].tolist() == pytest.approx([1, -((63 / 127) ** 2)])
    assert companded(values, 8, 0.49)[1].item() == pytest.approx(-((64 / 127) ** 2))
    assert companded(values, 8, 0.5, linear=True)[1].item() == pytest.approx(-32 / 127)
    read = dithered(filled(1.0, 0.25), 8, torch.tensor([[0.25]]))[1].item()
    assert read == pytest.approx((63.75**2 - 1 / 12) / 127**2)


@pytest.mark.parametrize("at_random", [False, True])
def test_error_compensation_keeps_the_end_of_the_path(at_random):
    optimizer = ErrorCompensatedAdamW(at_random, torch.ones(256), 0.999, NO_DECAY, 1)
    optimizer.steps, optimizer.first = 10_000, torch.full((256,), 0.3)
    moved, denominator, rate = (torch.full((256,), value) for value in (-1e-3, 0.5, 1e-2))
    before = 1 - 1e-3 - 0.9 / 0.1 * 1e-2 / 0.5 * 0.3
    optimizer.store(moved, denominator, rate)
    assert torch.equal(optimizer.weight, optimizer.weight.bfloat16().float())
    assert optimizer.weight.ne(1 - 1e-3).all()
    after = optimizer.weight.double() - 0.9 / 0.1 * 1e-2 / 0.5 * optimizer.first.double()
    assert after.tolist() == pytest.approx([before] * 256, abs=1e-6)


@pytest.mark.slow
def test_emulated_coupled_rounding_ends_as_the_optimizer_itself():
    drawn, start = gradients([1], 150)
    rates, decay = rates_and_decay(150, 1)
    exact = EmulatedAdamW(start, 0.999, decay, 0, torch.float64)
    ways = [WAYS["ours"]["coupled-8"], WAYS["parts"]["coupled, emulated"]]
    ours, emulated = (way.made(start, 0.999, decay, 1) for way in ways)
    for gradient, rate in zip(drawn, rates, strict=True):
        for optimizer in (exact, ours, emulated):
            optimizer.step(gradient, rate.repeat_interleave(ELEMENTS))
    real, found = (errors(one.weight, exact.weight, start, 1).flatten() for one in (ours, emulated))
    assert len(real) == len(STREAMS)
    assert real.max() < 0.2
    assert ((found / real).log2().abs() < 0.7).all(), dict(
        zip([s.title for s in STREAMS], (found / real).tolist(), strict=True)
    )


def test_the_distance_ahead_is_what_first_moments_still_move_weights_by():
    """c m = rate Σ_k β₁^k / (1 − β₁^(t + k)) m / √v̂, k ≥ 1; after equal gradients m / √v̂ is 1 − β₁^t."""
    start, rate = torch.linspace(0.5, 1, 256), torch.linspace(1e-4, 1e-3, 256)
    expected = rate * sum(0.9**k / (1 - 0.9 ** (5 + k)) for k in range(1, 300)) * (1 - 0.9**5)
    for way in (WAYS["ours"]["split-master"], WAYS["others"]["fp32"]):
        optimizer = way.made(start, 0.999, NO_DECAY, 1)
        for _ in range(5):
            optimizer.step(torch.full((256,), 0.5).bfloat16(), rate)
        assert optimizer.ahead(rate).tolist() == pytest.approx(expected.tolist(), rel=1e-3)


@pytest.mark.parametrize(
    ("way", "most", "mean"),
    [(WAYS["parts"]["coupled, emulated"], 0.51, 1 / 4), (WAYS["at random"]["m rounded at random"], 1.01, 1 / 3)],
)
def test_a_first_moment_is_rounded_to_nearest_or_at_random(way, most, mean):
    first = torch.rand(256 * 64, generator=torch.Generator().manual_seed(1)) + 0.5
    optimizer = way.made(torch.zeros_like(first), 0.999, torch.zeros_like(first), 3)
    off = optimizer._stored_first(first, torch.zeros_like(first, dtype=torch.bool)) - first
    steps = off / (2 * first.sqrt() * 1.5**0.5 / 127)
    assert steps.abs().max() <= most
    assert steps.abs().mean().item() == pytest.approx(mean, abs=0.02)
    assert abs(steps.mean().item()) < 0.02
