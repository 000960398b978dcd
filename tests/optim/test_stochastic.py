"""Stochastic rounding: unbiased, from its own generator, the same again from a checkpoint."""

import itertools

import pytest
import torch
from collage_optim import STRATEGIES, CollageAdamW, CollageLion, CollageSGD, random_numbers
from collage_optim.arithmetic import WideArithmetic, Workspace
from collage_optim.numerics import neighbour, round_to, stochastic_round
from collage_optim.random_numbers import RandomBits, Seeding, mixed_seed

from collage_monitor.strategies import STRATEGIES as CATALOGUE
from tests.optim.models import assert_same_bits, parameters, train, train_each, walk

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("source", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expected_value_is_the_number(dtype, source):
    """200,000 draws of each number: the mean is within five standard errors, and only its neighbours occur."""
    draws = 200_000
    numbers = torch.tensor([1.003, -0.7771, 0.0151, -100.3, 2.0**-8.5, 3.0], dtype=source)
    generator = torch.Generator().manual_seed(4)
    rounded = stochastic_round(numbers.repeat(draws, 1), dtype, generator).double()
    nearest = round_to(numbers, dtype)
    others = neighbour(nearest, numbers - nearest.to(source))
    for number, column, *known in zip(numbers.double(), rounded.T, nearest, others, strict=True):
        occurring = column.unique()
        assert set(occurring.tolist()) <= {float(value) for value in known}
        assert occurring.min() <= number <= occurring.max()
        spread = occurring.max() - occurring.min()
        assert (column.mean() - number).abs() <= 5 * spread / 2 / draws**0.5


def test_the_catalogue_says_which_weights_are_rounded_at_random():
    """One step's lost share misjudges these, and only these: alerts and words go by the catalogue."""
    rounded = {name for name, strategy in STRATEGIES.items() if strategy.stochastic_parameter}
    assert {name for name, entry in CATALOGUE.items() if entry.stochastic} == rounded


def test_representable_and_special_numbers_stay():
    generator = torch.Generator().manual_seed(6)
    numbers = torch.tensor([0.0, -0.0, 1.0, 2.0**-133, float("inf"), -float("inf")])
    assert torch.equal(stochastic_round(numbers, torch.bfloat16, generator).float(), numbers)
    for dtype in (torch.bfloat16, torch.float16):
        not_a_number = torch.full((64,), float("nan")).view(torch.int32).add(0x3FFFFF).view(torch.float32)
        assert torch.isnan(stochastic_round(not_a_number, dtype, generator)).all()
    saturated = stochastic_round(torch.tensor([500.0, -1e6]), torch.float8_e4m3fn, generator)
    assert saturated.float().tolist() == [448.0, -448.0]


def rounded(steps=1, elements=20_000, lr=2.0**-12, strategy="stochastic", **options):
    """What is stored for weights of 1.5 after steps, by default of a thirtieth of a gap each."""
    member = torch.nn.Parameter(torch.full((elements,), 1.5, dtype=torch.bfloat16))
    return walk(CollageSGD([member], lr=lr, strategy=strategy, **options), *[1.0] * steps)


def correlation(first, second):
    return float(torch.corrcoef(torch.stack((first, second)))[0, 1])


def test_default_seeds_make_independent_noise_and_are_repeated_by_manual_seed():
    """20,000 elements: a correlation of independent ones has a standard deviation of 0.007."""
    torch.manual_seed(11)
    first, second = rounded(), rounded()
    assert first.unique().numel() == second.unique().numel() == 2
    assert abs(correlation(first, second)) < 0.035
    torch.manual_seed(11)
    assert torch.equal(first, rounded())
    assert torch.equal(second, rounded())


@pytest.mark.parametrize("strategy", ["plus", "full", "master-weights"])
def test_without_stochastic_rounding_no_seed_is_drawn(strategy):
    before = torch.get_rng_state()
    optimizer = CollageAdamW(parameters(), strategy=strategy)
    assert optimizer.param_groups[0]["seed"] is None
    assert torch.equal(torch.get_rng_state(), before)


def test_processes_that_are_seeded_differently_round_replicas_alike(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    replicas = []
    for seed in (1, 2):
        monkeypatch.setattr(random_numbers, "_BUILT", itertools.count())
        torch.manual_seed(seed)
        replicas.append((rounded(), rounded()))
    assert torch.equal(replicas[0][0], replicas[1][0])
    assert torch.equal(replicas[0][1], replicas[1][1])
    assert abs(correlation(*replicas[0])) < 0.035


def test_groups_share_the_seed_of_their_optimizer():
    members = parameters()
    optimizer = CollageAdamW(members[:2], strategy="plus")
    optimizer.add_param_group({"params": members[2:3], "strategy": "stochastic"})
    optimizer.add_param_group({"params": members[3:], "strategy": "light-stochastic"})
    seeds = [group["seed"] for group in optimizer.param_groups]
    assert seeds[0] is None
    assert seeds[1] == seeds[2] is not None


def test_a_checkpoint_without_a_seed_leaves_the_optimizers_own():
    members = parameters()
    plain, own = CollageAdamW(members, strategy="plus"), CollageAdamW(members, strategy="light-stochastic")
    train(plain, members, 1)
    seed = own.param_groups[0]["seed"]
    own.load_state_dict(plain.state_dict())
    assert own.param_groups[0]["seed"] == seed is not None
    train(own, members, 1)


def noise_of(seed=3, position=0, step=1, shard=0, stream=0, elements=1 << 16, first=0):
    source = Seeding(seed, step).at(position, shard).from_element(first)
    like = torch.empty(elements)
    return source.bits(WideArithmetic(), like, stream).double()


def halves(**where):
    """The upper and lower sixteen of each element's random bits, from 0 to 1."""
    drawn = RandomBits(Seeding(3, 1).at(**where), WideArithmetic(), torch.empty(1 << 16))
    return [drawn.take(16) / 2**16 for _ in range(2)]


def test_both_halves_of_the_bits_are_uniform_and_independent():
    """65,536 elements: spreads and correlations within five standard errors."""
    upper, lower = halves(position=0)
    elsewhere = halves(position=1)
    for half in (upper, lower):
        counts = torch.histc(half, 256, 0, 1)
        assert (counts - 256).square().sum() / 256 < 255 + 5 * (2 * 255) ** 0.5
        for lag in (1, 2, 3, 7, 64, 128, 1000, 4096):
            assert abs(correlation(half[lag:], half[:-lag])) < 5 / 256, lag
    for other in (lower, *elsewhere):
        assert abs(correlation(upper, other)) < 5 / 256
    assert abs(correlation(lower, elsewhere[1])) < 5 / 256


@pytest.mark.parametrize("other", [{"seed": 4}, {"position": 1}, {"shard": 1}, {"stream": 1}, {"stream": 2}])
def test_noise_of_other_tensors_is_independent(other):
    first, second = noise_of(), noise_of(**other)
    for lag in (0, 1, 17):
        assert abs(correlation(first[lag:], second[: len(second) - lag])) < 5 / 256


def test_noise_of_steps_is_evenly_spread():
    """Of 144 consecutive steps an element's numbers fall into each twelfth 12 times, give or take 2."""
    numbers = torch.stack([noise_of(step=step, elements=500) for step in range(1, 145)]) / 2**32 + 0.5
    counts = torch.stack([(numbers * 12).floor().eq(part).sum(0) for part in range(12)])
    assert counts.min() >= 10
    assert counts.max() <= 14


def test_noise_does_not_depend_on_chunks():
    whole = noise_of(elements=5000)
    assert torch.equal(whole[1234:], noise_of(elements=5000 - 1234, first=1234))
    scratch = Workspace(5000, torch.float32, torch.device("cpu"))
    scratch.restart(5000)
    source = Seeding(3, 1).at(0)
    assert torch.equal(whole, source.bits(WideArithmetic(scratch), torch.empty(5000), 0).double())


@pytest.mark.parametrize("stream", [0, 1])
def test_noise_is_the_hash_that_it_was(stream):
    """In plain integers: a training that is resumed under another release rounds as it would have done."""
    source, low = Seeding(3, 5).at(7), 0xFFFFFFFF
    wanted = []
    for index in range(100):
        mixed = (source.start + stream * 0x85EBCA6B + index * 0x9E3779B1) & low
        mixed = (mixed ^ (mixed >> 15) ^ source.flipped) & low
        wanted.append((mixed * 0x2C1B3C6D + source.rotation) & low)
    scratch = Workspace(100, torch.float32, torch.device("cpu"))
    scratch.restart(100)
    for arithmetic in (WideArithmetic(), WideArithmetic(scratch)):
        bits = source.bits(arithmetic, torch.empty(100), stream)
        assert [value & low for value in bits.tolist()] == wanted


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("share", [1e-7, 5e-8])
@pytest.mark.parametrize("arithmetic", ["fp32", "storage"])
def test_one_number_moves_in_the_mean_below_the_resolution_of_fp32(share, arithmetic):
    """An update of 2^-24.3 of the weight and less: some 300 of 25 million roundings go down, as they should."""
    after = rounded(steps=64, elements=400_000, lr=1.5 * share, arithmetic=arithmetic)
    assert float(1.5 - after.mean()) == pytest.approx(64 * 1.5 * share, rel=0.25)


@pytest.mark.drawn(by=lambda keeping, share: (keeping, share))
@pytest.mark.parametrize("share", [1e-7, 5e-8, 1e-8])
@pytest.mark.parametrize(
    "keeping",
    [
        ("light-stochastic", "fp32"),
        ("light-stochastic", "storage"),
        ("split-master", "fp32"),
        ("split-24bit-8bit", "fp32"),
    ],
    ids=" ".join,
)
def test_two_components_move_in_the_mean_below_the_resolution_of_fp32(keeping, share):
    strategy, arithmetic = keeping
    after = rounded(64, 40_000, 1.5 * share, strategy, arithmetic=arithmetic, momentum=1e-9)
    assert float(1.5 - after.mean()) == pytest.approx(64 * 1.5 * share, rel=0.1)


def test_seeds_of_tensors_and_steps_differ():
    seeds = {mixed_seed(seed, position, step) for seed in range(8) for position in range(40) for step in range(40)}
    assert len(seeds) == 8 * 40 * 40


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        *((CollageAdamW, {"strategy": name}) for name in ("stochastic", "light-stochastic", "split-master")),
        (CollageAdamW, {"strategy": "light-stochastic", "arithmetic": "storage"}),
        (CollageSGD, {"strategy": "stochastic", "momentum": 0.9, "arithmetic": "storage"}),
        (CollageLion, {"strategy": "light-stochastic"}),
    ],
)
def test_own_generator(optimizer_class, options):
    """The same from the same seed, other from another, and nothing drawn from the process-wide generator."""
    optimizers = [optimizer_class(parameters(), seed=seed, lr=1e-3, **options) for seed in (1, 1, 2)]
    before = torch.get_rng_state()
    train_each(optimizers, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(optimizers[0], optimizers[1])
    with pytest.raises(AssertionError):
        assert_same_bits(optimizers[0], optimizers[2])
