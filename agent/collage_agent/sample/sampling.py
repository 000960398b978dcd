"""Which elements of a tensor are looked at: aligned blocks, without replacement, fixed for the run.

A draw is fixed by the run's seed: the same tensors give the same blocks in every process and version, because
replicas are compared and resumed runs continue (`tests/agent/sample/test_sampling.py`).
`step/bucket_planner.py` and `step/average_meter.py` draw. `touched_rows.py` makes samples by itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MAXIMUM_BLOCK",
    "TensorSample",
    "block_elements",
    "draw",
]

_CACHE_LINE_BYTES: Final = 64
MAXIMUM_BLOCK: Final = 32
_PERMUTED_WHOLE: Final = 2**20
"""Up to so many blocks. This, the generator and the size of a block fix the draw: another value measures others."""
_DRAWN_AT_ONCE: Final = 4096
"""Free: it changes no draw."""


@dataclass(frozen=True)
class TensorSample:
    """The sampled blocks of one tensor shard.

    `rows` are the chosen full blocks in the order in which they were drawn, so that the first n of them are a
    smaller sample; `tail` says that the ragged last block, `elements % block` long, is among the chosen.
    `blocks` of `population_blocks` were chosen, `sampled` of `elements` elements. `start`: the shard is only a part
    of the flattened tensor that is registered, from there on.
    """

    elements: int
    block: int
    rows: NDArray[np.int64]
    tail: bool
    start: int | None = None

    @property
    def tail_elements(self) -> int:
        """Length of the ragged last block: 0 when there is none, chosen or not."""
        return self.elements % self.block

    @cached_property
    def blocks(self) -> int:
        """Chosen blocks, the ragged one included."""
        return len(self.rows) + self.tail

    @cached_property
    def population_blocks(self) -> int:
        """All blocks of the tensor, the ragged one included."""
        return -(-self.elements // self.block)

    @cached_property
    def sampled(self) -> int:
        """How many elements are chosen."""
        return len(self.rows) * self.block + self.tail * self.tail_elements

    @cached_property
    def whole(self) -> bool:
        """Whether every element is measured."""
        return self.blocks == self.population_blocks


def block_elements(itemsize: int, at_least: int = 1) -> int:
    """Elements of one block: a cache line of the dtype, or `at_least` so many, a power of two.

    At most MAXIMUM_BLOCK: a block's counts are packed into bytes.
    """
    return min(max(_CACHE_LINE_BYTES // itemsize, at_least), MAXIMUM_BLOCK)


def draw(
    name: str,
    elements: int,
    itemsize: int,
    cap: int | Literal["all"],
    *,
    seed: int = 0,
    shard: int = 0,
    start: int | None = None,
    least_block: int = 1,
) -> TensorSample:
    """The sample of the tensor called `name`: at most `cap` elements in whole blocks, all if it is no larger.

    The draw depends on (seed, name, shard) and the number of blocks alone: a smaller cap gives a prefix.
    """
    block = block_elements(itemsize, least_block)
    population = -(-elements // block)
    if cap == "all" or elements <= cap:
        return _whole(elements, block, start)
    count = min(max(cap // block, 1), population)
    drawn = _permutation_prefix(_generator(seed, name, shard), population, count)
    ragged = population - 1 if elements % block else -1
    return TensorSample(elements, block, drawn[drawn != ragged], bool((drawn == ragged).any()), start)


@lru_cache(maxsize=256)
def _whole(elements: int, block: int, start: int | None) -> TensorSample:
    """All of a tensor: models have many of the same size."""
    rows = np.arange(elements // block)
    rows.flags.writeable = False
    return TensorSample(elements, block, rows, elements % block > 0, start)


def _generator(seed: int, name: str, shard: int) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed}/{shard}/{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def _permutation_prefix(generator: np.random.Generator, population: int, count: int) -> NDArray[np.int64]:
    """First `count` of a random order of range(population); independent of `count` up to that point.

    A large population is drawn with replacement and repeats are dropped: the order of first appearance is a
    uniformly random order too, and no table of the population is needed.
    """
    if population <= _PERMUTED_WHOLE:
        return generator.permutation(population)[:count].astype(np.int64)
    drawn = np.empty(0, dtype=np.int64)
    while len(drawn) < count:
        # However many are drawn at once, the generator gives the same numbers one after the other.
        more = generator.integers(0, population, size=max(_DRAWN_AT_ONCE, len(drawn)), dtype=np.int64)
        candidates = np.concatenate([drawn, more])
        _, first = np.unique(candidates, return_index=True)
        drawn = candidates[np.sort(first)]
    return drawn[:count]
