"""Stochastic rounding: unbiased, from its own generator, the same again from a checkpoint."""

import pytest
import torch
from collage_agent.numerics import neighbour, round_to, stochastic_round
from collage_agent.optim import CollageAdamW, CollageLion, CollageSGD
from collage_agent.optim.random_numbers import mixed_seed

from tests.optim.models import assert_same_bits, give_gradients, parameters, train

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("source", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expected_value_is_the_number(dtype, source):
    """200,000 draws of each number: the mean is within five standard errors, and only two values occur."""
    draws = 200_000
    numbers = torch.tensor([1.003, -0.7771, 0.0151, -100.3, 2.0**-8.5, 3.0], dtype=source)
    generator = torch.Generator().manual_seed(4)
    rounded = stochastic_round(numbers.repeat(draws, 1), dtype, generator).double()
    for number, column in zip(numbers.double(), rounded.T, strict=True):
        occurring = column.unique()
        assert occurring.numel() <= 2
        assert occurring.min() <= number <= occurring.max()
        spread = occurring.max() - occurring.min()
        assert (column.mean() - number).abs() <= 5 * spread / 2 / draws**0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_two_values_are_neighbours(dtype):
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randn(5000, generator=generator)
    rounded = stochastic_round(numbers, dtype, generator)
    nearest = round_to(numbers, dtype)
    other = neighbour(nearest, numbers - nearest.float())
    same = [rounded.float() == candidate.float() for candidate in (nearest, other)]
    assert (same[0] | same[1]).all()


def test_representable_and_special_numbers_stay():
    generator = torch.Generator().manual_seed(6)
    numbers = torch.tensor([0.0, -0.0, 1.0, 2.0**-133, float("inf"), -float("inf")])
    assert torch.equal(stochastic_round(numbers, torch.bfloat16, generator).float(), numbers)
    for dtype in (torch.bfloat16, torch.float16):
        not_a_number = torch.full((64,), float("nan")).view(torch.int32).add(0x3FFFFF).view(torch.float32)
        assert torch.isnan(stochastic_round(not_a_number, dtype, generator)).all()


def test_e4m3_saturates():
    rounded = stochastic_round(torch.tensor([500.0, -1e6]), torch.float8_e4m3fn, torch.Generator().manual_seed(0))
    assert rounded.float().tolist() == [448.0, -448.0]


def test_seeds_of_tensors_and_steps_differ():
    seeds = {mixed_seed(seed, position, step) for seed in range(8) for position in range(40) for step in range(40)}
    assert len(seeds) == 8 * 40 * 40


OPTIMIZERS = [
    (CollageAdamW, {"strategy": "stochastic"}),
    (CollageAdamW, {"strategy": "light-stochastic"}),
    (CollageAdamW, {"strategy": "light-stochastic", "arithmetic": "storage"}),
    (CollageSGD, {"strategy": "stochastic", "momentum": 0.9, "arithmetic": "storage"}),
    (CollageLion, {"strategy": "light-stochastic"}),
]


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS)
def test_own_generator(optimizer_class, options):
    """The same from the same seed, other from another, and nothing drawn from the process-wide generator."""
    sets = [parameters() for _ in range(3)]
    optimizers = [
        optimizer_class(members, seed=seed, lr=1e-3, **options)
        for members, seed in zip(sets, (1, 1, 2), strict=True)
    ]
    before = torch.get_rng_state()
    for optimizer, members in zip(optimizers, sets, strict=True):
        train(optimizer, members, 4)
    state = torch.get_rng_state()
    assert torch.equal(state, before)
    assert_same_bits(optimizers[0], optimizers[1])
    with pytest.raises(AssertionError):
        assert_same_bits(optimizers[0], optimizers[2])


@pytest.mark.parametrize("arithmetic", ["fp32", "storage"])
def test_updates_far_below_half_an_ulp_arrive_in_the_mean(arithmetic):
    """lr is a sixteenth of half an ulp of 1: stochastic rounding loses nothing on average."""
    member = torch.nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = CollageSGD([member], lr=2.0**-13, strategy="stochastic", arithmetic=arithmetic)
    for _ in range(64):
        member.grad = torch.ones_like(member)
        optimizer.step()
    moved = 1 - member.detach().double()
    assert moved.mean() == pytest.approx(64 * 2.0**-13, rel=0.02)


@pytest.mark.parametrize("arithmetic", ["fp32", "storage"])
@pytest.mark.parametrize("strategy", ["stochastic", "light-stochastic"])
def test_second_moment_decays_in_the_mean(strategy, arithmetic):
    member = torch.nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = CollageAdamW([member], lr=0.0, strategy=strategy, arithmetic=arithmetic)
    member.grad = torch.ones_like(member)
    optimizer.step()
    before = optimizer.state[member]["exp_avg_sq"].double().mean()
    member.grad = torch.zeros_like(member)
    for _ in range(300):
        optimizer.step()
    left = optimizer.state[member]["exp_avg_sq"].double().mean() / before
    assert left == pytest.approx(0.999**300, rel=0.01)


def test_light_stochastic_passes_its_break_point():
    """An update of 2**-20 of the weight: the low component loses it to nearest, and keeps it in the mean."""
    left = {}
    for strategy in ("light", "light-stochastic"):
        member = torch.nn.Parameter(torch.full((4000,), 1.5, dtype=torch.bfloat16))
        optimizer = CollageSGD([member], lr=1.5 * 2.0**-20, strategy=strategy)
        for _ in range(1000):
            member.grad = torch.ones_like(member)
            optimizer.step()
        moved = float(1.5 - optimizer.stored_parameter(member).mean())
        left[strategy] = moved / (1000 * 1.5 * 2.0**-20)
    assert left["light"] < 0.5
    assert left["light-stochastic"] == pytest.approx(1, abs=0.02)


def test_empty_tensors_draw_nothing():
    empty = torch.nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))
    optimizer = CollageAdamW([empty], strategy="stochastic")
    give_gradients([empty], step=1)
    optimizer.step()
    assert empty.numel() == 0
