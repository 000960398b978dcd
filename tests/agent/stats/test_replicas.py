"""Checksums of weights' bits: against Python's integers, and no single flipped bit unseen."""

import math

import numpy as np
import pytest
import torch
from collage_agent.stats.block_sums import Segments
from collage_agent.stats.replicas import block_checksums, replica_sums

BLOCK = 16
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)


def drawn(dtype, blocks=5):
    return torch.randn(blocks * BLOCK, generator=torch.Generator().manual_seed(1)).to(dtype)


def patterns(values):
    """The integers that are summed: of 64-bit elements both halves."""
    size = values.element_size()
    kind = {1: np.uint8, 2: np.int16}.get(size, np.uint32)
    return [int(x) for x in values.view(INTEGERS[size]).numpy().view(kind)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_integers_of_any_size(dtype):
    values = drawn(dtype)
    numbers = np.array([x * (2 * x + 1) for x in patterns(values)], dtype=object).reshape(5, -1)
    assert block_checksums(values, BLOCK).tolist() == [int(sum(row)) % 2**32 for row in numbers]


@pytest.mark.parametrize("replicated", [(True, True), (True, False), (False, True), (False, False)])
def test_only_what_is_replicated_has_a_checksum(replicated):
    values, of_block = drawn(torch.bfloat16), torch.tensor([0, 1, 1, 0, 1])
    sampled = torch.tensor([30.0, 41.0], dtype=torch.float64)
    found = replica_sums(values, BLOCK, Segments(of_block, 2), sampled, torch.tensor(replicated))
    for tensor, known in enumerate(replicated):
        own = patterns(values.view(-1, BLOCK)[of_block == tensor].flatten())
        expected = [sum(x * (2 * x + 1) for x in own) % 2**32, float(sampled[tensor])]
        assert found[:, tensor].tolist() == pytest.approx(
            expected if known else [math.nan] * 2, rel=0, abs=0, nan_ok=True
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype):
    values = drawn(dtype)
    known = block_checksums(values, BLOCK)
    data = values.view(torch.uint8)
    for place in range(3 * BLOCK * values.element_size(), (3 * BLOCK + 2) * values.element_size()):
        for bit in range(8):
            flipped = data.clone()
            flipped[place] ^= 1 << bit
            differs = block_checksums(flipped.view(dtype), BLOCK) != known
            assert differs.tolist() == [False, False, False, True, False], (place, bit)


def test_opposite_changes_do_not_cancel_and_padding_adds_nothing():
    values = torch.zeros(BLOCK, dtype=torch.bfloat16)
    assert block_checksums(values, BLOCK).tolist() == [0]
    values[:2] = torch.tensor([1.0, 2.0])
    known = block_checksums(values, BLOCK)
    moved = values.clone().view(torch.int16)
    moved[0] += 1
    moved[1] -= 1
    assert block_checksums(moved.view(torch.bfloat16), BLOCK).item() != known.item()


def test_many_blocks_are_those_one_by_one():
    values = drawn(torch.bfloat16, blocks=40_000)
    whole = block_checksums(values, BLOCK)
    assert torch.equal(whole[-7:], block_checksums(values[-7 * BLOCK :], BLOCK))
    assert len(whole) == 40_000
