"""Values kept as integers: all bits of fp32, 24 of them, 16-bit roots, 8-bit blocks, read by their definitions."""

import copy

import pytest
import torch
from collage_optim import CollageAdamW, StateStorage, StorageStrategy, integer_codes
from collage_optim.arithmetic import WideArithmetic
from collage_optim.random_numbers import RandomBits, Seeding

from tests.optim.models import copies_of, walk
from tests.reference.stored import reference_value

WIDE = WideArithmetic()
ROOTS = 63_488
"""Codes of 16-bit roots: 40 powers of two with 1,024 each, 88 with 256."""


def draws(like, seed=1, step=1):
    return RandomBits(Seeding(seed, step).at(0), WIDE, like)


def of_bits(*patterns):
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def any_numbers(count=200_000):
    bits = torch.randint(0, 2**32, (count,), generator=torch.Generator().manual_seed(1)) - 2**31
    numbers = bits.to(torch.int32).view(torch.float32)
    return numbers[numbers.isfinite()]


def split(value, dtype):
    high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=dtype)
    storage = StateStorage.SPLIT_24 if dtype == torch.int8 else StateStorage.SPLIT
    integer_codes.store_split(WIDE, value, high, low, storage)
    return high, low


def test_a_split_master_is_every_fp32_number():
    value = torch.cat([any_numbers(), of_bits(0x00000001, 0x80000001, 0x7F7FFFFF, 0xFF7F8000, 0x7F800000)])
    high, low = split(value, torch.int16)
    assert torch.equal(integer_codes.stored_value({"parameter_low": low}, "parameter", high), value.double())
    finite = value.isfinite()
    assert torch.equal(reference_value({"parameter_low": low}, "parameter", high)[finite], value.double()[finite])


def test_the_visible_part_is_rounded_to_nearest_and_ties_away_from_zero():
    value = any_numbers()
    high, _ = split(value, torch.int16)
    tie = value.view(torch.int32).bitwise_and(0xFFFF) == 0x8000
    assert torch.equal(high[~tie], value.bfloat16()[~tie])
    high, low = split(of_bits(0x3F808000, 0x3F818000, 0xBF808000), torch.int16)
    assert high.tolist() == [1.0078125, 1.015625, -1.0078125]
    assert low.tolist() == [-32768] * 3


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8])
def test_what_is_not_finite_stays_so(dtype):
    """7fffffff is the NaN of CUDA: its upper half rounded up would be −0."""
    nans = (0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF, 0xFFC00000, 0xFFFF0000, 0xFFFF7F00)
    high, low = split(of_bits(*nans, 0x7F800000, 0xFF800000), dtype)
    again = integer_codes.stored_value({"parameter_low": low}, "parameter", high)
    for found in (high, again):
        assert found[:-2].isnan().all()
        assert found[-2:].tolist() == [float("inf"), -float("inf")]


def test_what_becomes_of_nans_that_no_step_makes():
    """Signalling ones of the lower bits alone, and of the last bits with a sign, which a carry takes to 0."""
    few, all_bits = of_bits(0x7F800001, 0xFF80007F), of_bits(0xFFFF8000, 0xFFFFFFFF)
    for value, visible in ((few, [float("inf"), -float("inf")]), (all_bits, [0.0, 0.0])):
        high, low = split(value, torch.int16)
        assert high.tolist() == visible
        assert integer_codes.stored_value({"parameter_low": low}, "parameter", high).isnan().all()
        assert split(value, torch.int8)[0].tolist() == visible


def test_the_largest_numbers_are_kept_where_the_visible_part_rounds_to_infinity():
    value = of_bits(0x7F7F7F7F, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFF7F, 0x7F7FFF80, 0x7F7FFFFF)
    value = torch.cat([value, -value])
    # With 24 bits the last two are infinite, rounded to nearest.
    rounded = value.view(torch.int32).add(0x80).bitwise_and(-0x100).view(torch.float32)
    assert rounded.isinf().tolist() == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 2
    for dtype, kept in ((torch.int16, value), (torch.int8, rounded)):
        high, low = split(value, dtype)
        assert torch.equal(high, kept.bfloat16())
        assert torch.equal(integer_codes.stored_value({"parameter_low": low}, "parameter", high), kept.double())


@pytest.mark.parametrize("strategy", ["split-master", "light-stochastic", "stochastic", "plus", "full"])
@pytest.mark.parametrize("bits", [0x7FC0, 0xFFC0])
def test_the_maximum_of_amsgrad_does_not_forget_a_nan(strategy, bits):
    """torch.maximum sets all bits of a NaN, and these, rounded up, were 0: the next steps divided by less."""
    lost = of_bits(bits << 16).bfloat16()
    parameter = torch.nn.Parameter(torch.ones(65, dtype=torch.bfloat16))
    optimizer = CollageAdamW([parameter], strategy=strategy, amsgrad=True)
    walk(optimizer, 1.0, lost, 1.0, 1.0)
    assert integer_codes.stored_value(optimizer.state[parameter], "max_exp_avg_sq").isnan().all()


def test_24_bits_are_within_half_of_their_last():
    value = any_numbers()
    value = value[value.abs().gt(1e-30) & value.abs().lt(1e30)]
    high, low = split(value, torch.int8)
    found = reference_value({"parameter_low": low}, "parameter", high)
    assert ((found - value).abs() <= value.double().abs() * 2.0**-16).all()
    assert torch.equal(integer_codes.stored_value({"parameter_low": low}, "parameter", high), found)
    again = split(found.float(), torch.int8)
    assert torch.equal(again[0], high)
    assert torch.equal(again[1], low)


def test_all_16_bit_roots():
    code = torch.arange(ROOTS).to(torch.int16)
    value = integer_codes.stored_value({"exp_avg_sq": code}, "exp_avg_sq")
    # Squares below 2^-126 lose bits, and below 2^-149 all of them.
    torch.testing.assert_close(value, reference_value({"exp_avg_sq": code}, "exp_avg_sq"), rtol=0, atol=2.0**-149)
    assert value.isfinite().all()
    assert (value.diff() > 0).all()
    normal = value >= 2.0**-110
    state = integer_codes.state_of(
        "exp_avg_sq", value[normal].float(), StateStorage.ROOT, True, value[normal].bfloat16()
    )
    assert torch.equal(state["exp_avg_sq"], code[normal])
    # What is too large has the largest.
    value = torch.tensor([float("inf"), 3.4e38, 0.0])
    state = integer_codes.state_of("exp_avg_sq", value, StateStorage.ROOT, True, value.bfloat16())
    assert state["exp_avg_sq"].bitwise_and(0xFFFF).tolist() == [ROOTS - 1 - 2**16, ROOTS - 1 - 2**16, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "second", "gaps"),
    [
        ("ROOT", True, 2.0**-8),
        ("SPLIT_24", False, 2.0**-15),
        ("BLOCKS", True, 1 / 255),
        ("BLOCKS", False, 1 / 127),
        ("BLOCKS_16", True, 1 / 65535),
        ("BLOCKS_6", False, 1 / 31),
        ("BLOCKS_10", True, 1 / 1024),
    ],
)
def test_rounded_at_random_the_mean_is_right(storage, second, gaps):
    """1,280 numbers, 400 steps each: the mean is within four 400ths of a gap, as even spreading says."""
    generator = torch.Generator().manual_seed(2)
    value = torch.randn(1280, generator=generator).mul_(1e-3)
    value = value.square() if second else value
    total = torch.zeros(1280).double()
    name = "exp_avg_sq" if second else "exp_avg"
    state = {"exp_avg": torch.arange(1280).to(torch.int16)} if storage == "BLOCKS_10" else {}
    state |= integer_codes.state_of(name, value, StateStorage[storage], second, value.bfloat16(), state)
    seen = dict(integer_codes.unpacked(state))
    for step in range(400):
        integer_codes.store(WIDE, value.clone(), seen, name, StateStorage[storage], draws(value, step=step))
        found = reference_value(state, name)
        total += found.sqrt() if second else found
    exact = value.double().sqrt() if second else value.double()
    gap = exact.abs() * gaps if "BLOCKS" not in storage else exact.abs().max() * 2 * gaps
    assert ((total / 400 - exact).abs() <= gap * 4 / 400).all()


def test_packed_moments_leave_each_other_alone():
    """The second moment is the nearest of the codes with the first one's bits, and the largest is exact."""
    generator = torch.Generator().manual_seed(6)
    first, second = torch.randn(300, generator=generator), torch.rand(300, generator=generator) ** 8
    parameter = first.bfloat16()
    state = integer_codes.state_of("exp_avg", first, StateStorage.BLOCKS_6, False, parameter)
    before = reference_value(state, "exp_avg")
    assert (before - first).abs().max() <= 1 / 31 * first.abs().max()
    state |= integer_codes.state_of("exp_avg_sq", second, StateStorage.BLOCKS_10, True, parameter, state)
    assert set(state) == {"exp_avg", "exp_avg_scale", "exp_avg_sq_scale"}
    assert torch.equal(reference_value(state, "exp_avg"), before)
    found = reference_value(state, "exp_avg_sq")
    for name in ("exp_avg", "exp_avg_sq"):
        decoded = integer_codes.stored_value(state, name)
        torch.testing.assert_close(decoded, reference_value(state, name), rtol=1e-6, atol=0)
    for block in range(0, 300, 128):
        exact, kept = second[block : block + 128].double().sqrt(), found[block : block + 128].sqrt()
        assert kept[exact.argmax()] == pytest.approx(float(exact.max()), rel=1e-6)
        # A code c stands for c² of the largest: the middle of a step of 64 is 32 to 45 above its lower end.
        codes = (kept / exact.max()).sqrt(), (exact / exact.max()).sqrt()
        assert ((codes[0] - codes[1]).abs() <= 46 / 65535 + 64 / 65535 * (codes[1] < 64 / 65535)).all()


def test_one_packed_moment_needs_the_other():
    kinds = StateStorage.SPLIT_24, StateStorage.BLOCKS_6, StateStorage.BLOCKS_10, StateStorage.BLOCKS_16
    weight, first, second, other = kinds
    for moments in ((first, other), (first, first), (StateStorage.BLOCKS, second), (second, second)):
        with pytest.raises(ValueError, match="strategy 'mine': "):
            StorageStrategy("mine", weight, *moments)


def test_blocks_keep_small_values_beside_large_ones():
    value = torch.full((300,), 1e-6)
    value[0], value[200] = 1.0, -1e-3
    state = integer_codes.state_of("exp_avg", value, StateStorage.BLOCKS, False, value.bfloat16())
    assert state["exp_avg_scale"].tolist() == pytest.approx([1.0, 1e-3, 1e-6])
    found = reference_value(state, "exp_avg")
    torch.testing.assert_close(found[256:], value[256:].double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[128:256], value[128:256].double(), rtol=0, atol=1e-3 / 127)
    assert found[200] == pytest.approx(-1e-3)


def test_a_tie_that_the_visible_weight_rounded_to_even_loses_one_bit():
    """It cannot be written with sixteen signed bits beside that weight, and conversions leave the weight alone."""
    master = of_bits(0x3F808000, 0x3F808001, 0x3F807FFF)
    visible = master.bfloat16()
    low = torch.empty(3, dtype=torch.int16)
    integer_codes.store_low(master, visible, low)
    found = integer_codes.stored_value({"parameter_low": low}, "parameter", visible)
    assert (found - master.double()).tolist() == [-(2.0**-23), 0.0, 0.0]


@pytest.mark.parametrize(("seed", "scale"), [(31, 0.05), (2, 1.0), (5, 3e-4)])
@pytest.mark.parametrize("source", ["master-weights", "split-master"])
def test_a_conversion_to_24_bits_takes_the_nearest_beside_the_visible_weight(source, seed, scale):
    torch.manual_seed(seed)
    weight = torch.nn.Parameter((torch.randn(50_000) * scale).bfloat16())
    optimizer = CollageAdamW([weight], lr=3e-3 * scale, strategy=source)
    walk(optimizer, *torch.randn(6, 50_000))
    (other,) = copies_of([weight])
    target = CollageAdamW([other], strategy="split-24bit-8bit")
    target.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(other, weight)
    low = target.state[other]["parameter_low"].to(torch.int32)
    bits = optimizer.stored_parameter(weight).float().view(torch.int32)
    wanted = ((bits - (other.detach().view(torch.int16).to(torch.int32) << 16)) / 256).round()
    # At a tie of its own, either neighbour is nearest.
    assert ((low == wanted.clamp(-128, 127)) | ((bits & 0xFF) == 0x80)).all()
    assert ((wanted - low).abs() <= 1).all()
    assert 0.0005 < float((wanted > 127).double().mean()) < 0.004


@pytest.mark.parametrize("dropped", [8, 16])
def test_a_sum_is_rounded_to_its_neighbours(dropped):
    generator = torch.Generator().manual_seed(3)
    total = torch.cat([torch.randn(50_000, generator=generator), of_bits(0x3F800000, 0xBF800000, 0, 0x7F800000)])
    error = total * 2.0**-26
    error[-1] = 0
    found = integer_codes.round_sum_at_random(WIDE, total.clone(), error.clone(), draws(total), dropped)
    grid = total.view(torch.int32).bitwise_and(-(1 << dropped))
    beyond = (grid + (1 << dropped)).view(torch.float32)
    grid = grid.view(torch.float32)
    assert ((found == grid) | (found == beyond)).all()
    assert torch.equal(found[-2:], total[-2:])


def test_a_weight_moves_by_whole_gaps_and_in_the_mean_by_what_it_should():
    """Updates of 2^-12 to 2^6 gaps, 400 steps each: within four 400ths of a gap, as even spreading says."""
    generator = torch.Generator().manual_seed(4)
    value = torch.cat([torch.randn(500, generator=generator), torch.ones(6), -torch.ones(6), torch.zeros(6)])
    gap = torch.ldexp(torch.ones(len(value)), torch.frexp(value.double()).exponent - 24).clamp_min(2.0**-103)
    gap[value == 0] = 2.0**-103
    chance = torch.rand(len(value), generator=generator)
    share = 2.0 ** (chance * 18 - 12) * torch.randn(len(value), generator=generator).sign()
    total = torch.zeros(len(value)).double()
    for step in range(400):
        moved = integer_codes.move_at_random(
            WIDE, value.clone(), (share * gap).float(), draws(value, step=step)
        ).double()
        assert ((moved - value) / gap).frac().eq(0).all()
        total += moved - value
    assert ((total / 400 - share * gap).abs() <= gap * 4 / 400).all()


@pytest.mark.parametrize("strategy", ["split-master", "split-master-8bit", "split-24bit-8bit"])
def test_tiny_weights_train_as_others_do(strategy):
    """Weights and a rate that are 2^-76 times as large (1.3e-23) make the same steps, 2^-76 times as large."""
    paths = []
    for scale in (1.0, 2.0**-76):
        generator = torch.Generator().manual_seed(5)
        weight = torch.nn.Parameter(((torch.rand(500, generator=generator) + 1) * scale).bfloat16())
        optimizer = CollageAdamW([weight], lr=2.0**-10 * scale, strategy=strategy, weight_decay=0, seed=7)
        paths.append(walk(optimizer, *torch.randn(20, 500, generator=generator)) / scale)
    assert torch.equal(*paths)


def test_a_weight_that_is_to_stay_stays():
    value = torch.cat([any_numbers(20_000), of_bits(0, 0x80000000, 0x3F800000, 0x7F7FFFFF, 0x7F800000)])
    for zero in (0.0, -0.0):
        moved = integer_codes.move_at_random(WIDE, value.clone(), torch.full_like(value, zero), draws(value))
        assert torch.equal(moved, value)
    lost = integer_codes.move_at_random(
        WIDE, of_bits(0x7FC00000, 0x3F800000), of_bits(0x3F800000, 0x7FC00000), draws(value[:2])
    )
    assert lost.isnan().all()
    far = integer_codes.move_at_random(
        WIDE, torch.tensor([0.02, -3.0]), torch.tensor([1e21, float("inf")]), draws(value[:2])
    )
    assert far.tolist() == [torch.tensor(1e21).item(), float("inf")]
