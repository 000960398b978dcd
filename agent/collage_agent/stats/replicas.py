"""Checksums of replicated weights: the bits of the sampled elements after the step, for the server to compare.

The server's `sealing/replica_comparison.py` compares them. The checksum is fixed: ranks of two versions must agree
on it. `step/bucket.py` calls it. Names are those of `collage_monitor/statistics/element_counts.py`, repeated in the
server; the sum is held by `tests/agent/stats/test_replicas.py`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from collage_agent.stats.block_sums import Segments

__all__ = ["KEYS", "block_checksums", "replica_sums"]

KEYS: Final = ("replica_checksum", "replica_checksum_elements")
_BITS: Final = 2**32 - 1
_AT_ONCE: Final = 2**18
_PATTERNS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def block_checksums(values: Tensor, block: int) -> Tensor:
    """Σ x(2x + 1) mod 2³² over each block of values [slots], x an element's bits: int64 [slots / block].

    x(2x + 1) takes every value once mod 2³²: a change of one element (one half of a 64-bit one) never goes unseen,
    of several only by an accident of 2⁻³². Integers add up alike in any order and on any device; zeros, and so
    padding, add nothing. No synchronisation.
    """
    patterns = values.view(_PATTERNS[values.element_size()])
    width = block * patterns.numel() // max(values.numel(), 1)
    sums = []
    for piece in torch.split(patterns, _AT_ONCE // block * width):
        bits = piece.to(torch.int32)
        mixed = bits.mul(2).add_(1).mul_(bits)
        sums.append(mixed.view(-1, width).sum(1, dtype=torch.int32))
    return torch.cat(sums).to(torch.int64).bitwise_and_(_BITS)


def replica_sums(values: Tensor, block: int, segments: Segments, sampled: Tensor, replicated: Tensor) -> Tensor:
    """Each tensor's checksum and its inputs: fp64 [KEYS, tensors], NaN where not `replicated` [tensors].

    values: the weights after the step, [slots] in their own dtype; sampled fp64 [tensors]. No synchronisation.
    """
    sums = segments.sums(block_checksums(values, block).unsqueeze(0)).bitwise_and_(_BITS).to(torch.float64)
    return torch.where(replicated, torch.cat((sums, sampled.unsqueeze(0))), torch.nan)
