"""Blocks: aligned, without replacement, a prefix when fewer, the ragged tail as a smaller unit."""

from collections import Counter

import numpy as np
import pytest
import torch
from collage_agent.sample.sampling import block_elements, draw
from collage_agent.sample.state_mappings import state_of
from collage_agent.sample.stored_parts import OURS
from collage_agent.step.gather import BlockLayout, GatheredSample, Staging
from collage_agent.step.layout import StateLayout
from collage_agent.step.totals import SampleSizes
from collage_agent.watching.trained_parameters import bytes_per_parameter
from collage_optim import CollageAdamW

from tests.reference.stored import reference_value

MILLION = 2**20 + 3
ROWS_OF_FEW, ROWS_OF_MANY = [5308, 2686, 957, 9799], [906298, 233742, 125156, 481777]


@pytest.mark.parametrize(("itemsize", "block"), [(1, 32), (2, 32), (4, 16)])
def test_a_block_is_a_cache_line(itemsize, block):
    assert block_elements(itemsize) == block


@pytest.mark.parametrize(
    ("elements", "few", "many"),
    [
        *((elements, 2048, 8192) for elements in (32 * 5_000, 32 * 5_000 + 7, 32 * MILLION + 1)),
        (32 * MILLION, 8 * MILLION, 32 * (MILLION - 200_000)),
    ],
)
def test_a_smaller_sample_is_a_prefix_of_a_larger_one(elements, few, many):
    """Beyond half of the blocks another method drew others: the governor could not halve such a sample."""
    small, large = draw("w", elements, 2, few), draw("w", elements, 2, many)
    assert np.array_equal(large.rows[: len(small.rows)], small.rows[: len(large.rows)])
    assert len(np.unique(large.rows)) == len(large.rows)
    assert large.blocks == many // 32
    assert large.rows.max() < elements // 32


def test_the_draw_depends_on_seed_name_and_shard_alone():
    first = draw("w", 320_000, 2, 2048, seed=1)
    assert np.array_equal(first.rows, draw("w", 320_000, 2, 2048, seed=1).rows)
    for other in ({"seed": 2}, {"seed": 1, "shard": 1}):
        assert not np.array_equal(first.rows, draw("w", 320_000, 2, 2048, **other).rows)
    assert not np.array_equal(first.rows, draw("v", 320_000, 2, 2048, seed=1).rows)


@pytest.mark.parametrize("elements", [1, 31, 32, 33, 4096])
def test_a_tensor_no_larger_than_the_cap_is_measured_whole(elements):
    sample = draw("w", elements, 2, 4096)
    assert sample.whole
    assert sample.sampled == sample.elements == elements
    assert sample.rows.tolist() == list(range(elements // 32)), "in memory order"


def test_a_cap_below_a_block_draws_one_block():
    assert draw("w", 1000, 2, 20).sampled == 32


@pytest.mark.parametrize("ragged", [0, 5])
def test_every_block_the_ragged_one_included_is_drawn_equally_often(ragged):
    drawn: Counter[int] = Counter()
    blocks = 10 + bool(ragged)
    for seed in range(4000):
        sample = draw("w", 10 * 32 + ragged, 2, 128, seed=seed)
        drawn.update([*sample.rows.tolist(), *([10] if sample.tail else [])])
        assert sample.blocks == 4
        assert sample.sampled == len(sample.rows) * 32 + sample.tail * ragged
    expected = 4000 * 4 / blocks
    assert drawn.keys() == set(range(blocks))
    assert all(abs(count - expected) < 5 * expected**0.5 for count in drawn.values())


def laid_out(tensors, itemsize, cap, names="abcdefgh", **options):
    """A sample of each tensor, and their layout."""
    if len(tensors) > len(names):
        names = [f"t{place}" for place in range(len(tensors))]
    samples = [draw(name, t.numel(), itemsize, cap, **options) for name, t in zip(names, tensors, strict=False)]
    return samples, BlockLayout(samples, tensors)


@pytest.mark.parametrize("contiguous", [True, False])
def test_many_tensors_of_one_shape_are_gathered_as_they_are(contiguous):
    shapes = [(4, 8), (3, 5), (64,), (2000,), (2, 4, 2, 2)]
    tensors = [torch.randn(shapes[index % 5]) + index for index in range(150)]
    samples, layout = laid_out(tensors, 4, 128)
    staging = Staging(layout, torch.float32)
    assert len(staging.alike) == 3
    if not contiguous:  # As gradients can be.
        tensors = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
    for _ in range(2):
        layout.gather(tensors, staging, lasting=contiguous)
        values = staging.values.view(-1, 16)
        for index, (tensor, sample) in enumerate(zip(tensors, samples, strict=True)):
            found = values[layout.tensor_of_block == index]
            padded = torch.cat([tensor.reshape(-1), torch.zeros(-tensor.numel() % 16)]).view(-1, 16)
            assert torch.equal(found, padded[torch.from_numpy(sample.rows)] if not sample.whole else padded)
        tensors = [tensor.clone() for tensor in tensors]
    assert layout.positions_of(layout).tolist() == list(range(layout.blocks))
    assert all(staging.values[layout.padding] == 0)


def test_a_layout_holds_while_its_tensors_lie_in_memory_as_they_did():
    tensors = [torch.zeros(40, 64), *(torch.zeros(4, 16) for _ in range(16))]
    _, layout = laid_out(tensors, 4, 256)
    assert layout.holds([tensor + 1 for tensor in tensors])
    for other in (torch.zeros(64, 40).t(), torch.zeros(40, 64, device="meta")):
        assert not layout.holds([other, *tensors[1:]])
    # Many of one shape are joined as they are.
    assert not layout.holds([tensors[0], *(torch.zeros(8, 8) for _ in range(16))])


def in_one_buffer(tensors, apart):
    """The same tensors as views of one buffer, each `apart` elements behind the end of the last."""
    buffer = torch.zeros(sum(tensor.numel() + 64 for tensor in tensors), dtype=tensors[0].dtype)
    found, end = [], 0
    for tensor in tensors:
        begin = -(-end // 16) * 16 + apart
        end = begin + tensor.numel()
        found.append(buffer[begin:end].copy_(tensor))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint16])
@pytest.mark.parametrize("start", [None, 24])
def test_wherever_tensors_lie_in_memory_the_same_elements_are_gathered(dtype, start):
    sizes = (2000, 1003, 96, 45, 1)
    values = [torch.randint(1, 100, (size + (start or 0),)).to(dtype) for size in sizes]
    samples = [draw(f"t{index}", size, 2, 256, start=start) for index, size in enumerate(sizes)]
    layout = BlockLayout(samples, values)
    padded = [
        torch.cat([value[start or 0 :], torch.zeros(-size % 32, dtype=dtype)]).view(-1, 32)
        for value, size in zip(values, sizes, strict=True)
    ]
    staging = Staging(layout, dtype)
    elsewhere = [value.clone() for value in values]
    for tensors in (values, values, elsewhere, *(in_one_buffer(values, apart) for apart in (0, 8, 1))):
        for lasting in (True, False):
            staging.values.fill_(7)
            layout.gather(tensors, staging, lasting=lasting)
            assert torch.equal(staging.values.double().view(-1, 32), blocks_of(padded, samples, layout))
    assert len(layout.padding) == layout.slots - sum(sample.sampled for sample in samples)
    values[0].fill_(7)
    layout.gather(values, staging)
    padded[0] = torch.full_like(padded[0], 7)
    assert torch.equal(staging.values.double().view(-1, 32), blocks_of(padded, samples, layout))


def blocks_of(padded, samples, layout):
    """The chosen blocks of the padded tensors, in the layout's order."""
    found = np.zeros((layout.blocks, 32))
    for index, (tensor, sample) in enumerate(zip(padded, samples, strict=True)):
        ragged = [sample.population_blocks - 1] if sample.tail else []
        found[layout.host_tensor_of_block == index] = tensor.double().numpy()[[*sample.rows.tolist(), *ragged]]
    return torch.from_numpy(found)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("becomes", [lambda data: torch.zeros(64), lambda data: data.bfloat16()])
@pytest.mark.parametrize("of", [0, 1])
def test_a_tensor_that_has_become_smaller_is_not_read_beyond_its_end(becomes, of, in_place):
    tensors = [torch.zeros(5000), torch.ones(4096)]
    _, layout = laid_out(tensors, 4, 256)
    staging = Staging(layout, torch.float32)
    for _ in range(2):
        layout.gather(tensors, staging)
    if in_place:
        tensors[of].data = becomes(tensors[of].data)
    else:
        tensors[of] = becomes(tensors[of])
    with pytest.raises((RuntimeError, IndexError)):
        layout.gather(tensors, staging)


def test_positions_of_a_smaller_sample_are_found_and_a_foreign_one_is_refused():
    tensors = [torch.zeros(5000), torch.zeros(300)]
    large = BlockLayout([draw("a", 5000, 4, 2048), draw("b", 300, 4, 2048)], tensors)
    small = BlockLayout([draw("a", 5000, 4, 512), draw("b", 300, 4, 128)], tensors)
    positions = torch.from_numpy(large.positions_of(small))
    assert torch.equal(large.tensor_of_block[positions], small.tensor_of_block)
    foreign = BlockLayout([draw("a", 5000, 4, 2048, seed=9), draw("b", 300, 4, 128)], tensors)
    with pytest.raises(ValueError, match="same seed"):
        large.positions_of(foreign)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_tensors_are_looked_at_for_their_squares_and_the_largest(dtype):
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(count, generator=generator).to(dtype) for count in (5000, 300, 7001)]
    tensors[2][4321] = -30.0
    samples, layout = laid_out(tensors, dtype.itemsize, 512)
    total, largest = layout.whole_squares(samples, tensors)
    exact = [tensor.double().square() for tensor in tensors]
    assert samples[1].whole
    assert (total[1], largest[1]) == (0.0, 0.0)
    for index in (0, 2):
        assert float(total[index]) == pytest.approx(float(exact[index].sum()), rel=2.0**-7)
        assert largest[index] == exact[index].max()


@pytest.mark.parametrize(
    ("elements", "rows"), [(320_000, ROWS_OF_FEW), (32 * MILLION, ROWS_OF_MANY)], ids=["permuted", "drawn"]
)
def test_a_draw_is_the_same_in_every_version(elements, rows):
    """Resumed runs and replicas of two versions look at the same elements."""
    assert draw("w", elements, 2, 2048, seed=1).rows[:4].tolist() == rows


@pytest.mark.parametrize(("strategy", "size"), [("coupled-7", 7), ("coupled-8", 8)])
def test_coupled_moments_are_gathered_and_counted_once_and_the_second_is_judged(strategy, size):
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(64, 160, generator=generator).bfloat16())
    optimizer = CollageAdamW([weight], strategy=strategy, seed=1)
    for _ in range(3):
        weight.grad = torch.randn(64, 160, generator=generator).bfloat16()
        optimizer.step()
    assert bytes_per_parameter([optimizer]) == size + 2 * 4 / 128
    state = state_of(optimizer, weight)
    layout = StateLayout.of(weight, state, OURS)
    assert {entry.name: entry.is_decaying for entry in layout.averages} == {"exp_avg": False, "exp_avg_sq": True}
    (sample,), blocks = laid_out([weight], 2, 1024)
    gathered = GatheredSample(blocks, OURS)
    gathered.gather(layout.kept, [state], weights=[weight])
    for name in ("exp_avg", "exp_avg_sq"):
        expected = reference_value(optimizer.state[weight], name).view(-1, sample.block)[sample.rows].flatten()
        torch.testing.assert_close(gathered.values[name].double(), expected, rtol=1e-6, atol=0)


def test_sums_are_scaled_to_the_tensor_and_variances_by_the_square():
    sizes = SampleSizes(*laid_out([torch.zeros(3200, dtype=torch.bfloat16)], 2, 320))
    keys = ("measured_steps", "variance_numerator/edq_ratio", "intended_squared_sum", "rounding_variance")
    assert sizes.factors(keys).flatten().tolist() == [1.0, 1.0, 10.0, 100.0]
    assert sizes.factors(keys, frozenset({"intended"})).isnan().flatten().tolist() == [False, True, True, True]
