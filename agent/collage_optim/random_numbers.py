"""The random numbers of stochastic rounding: counters hashed, the same in every chunk.

An element's numbers are a hash of its index plus a multiple of the golden ratio, one more with each step (Weyl's
sequence). Elements, tensors and optimizers are independent of each other. The numbers of one element are uniform,
and over the steps they are spread evenly: each rounding is right in expectation, and the errors of many steps
cancel better than independent ones do.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from collage_optim.arithmetic import INDEX_FACTOR, Scalar, WideArithmetic, signed

__all__ = ["RandomBits", "RandomSource", "Seeding", "default_seed", "mixed_seed", "shard_number"]

_STREAM, _MIX, _GOLDEN = 0x85EBCA6B, 0x2C1B3C6D, 0x9E3779B9
_BUILT = itertools.count()


def mixed_seed(*counters: int) -> int:
    """64 bits hashed of counters (splitmix64, Steele et al. 2014)."""
    mixed = 0
    for value in counters:
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed


def default_seed() -> int:
    """A seed for an optimizer without one: drawn from torch's CPU generator, so that `manual_seed` repeats it.

    Where several processes train, they may be seeded differently, and replicas must round alike: there it is the
    number of optimizers that this process has asked for.
    """
    if _processes() > 1:
        return mixed_seed(next(_BUILT)) >> 1
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


def _processes() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or 1)


@dataclass(frozen=True)
class RandomSource:
    """The source of a tensor's random bits in a step. Three 32-bit integers, or int32 tensors of no dimension.

    start: added to the hashed index, as if the tensor began there; flipped: bits turned within the hash;
    rotation: added to the hash, another with each step.
    """

    start: Scalar
    flipped: Scalar
    rotation: Scalar

    def from_element(self, index: int) -> RandomSource:
        """The source of the elements from `index` on."""
        start = self.start + signed(index * INDEX_FACTOR)
        return replace(self, start=start if isinstance(start, Tensor) else signed(int(start)))

    def numbers(self) -> Tensor:
        """The three as one int32 tensor, for a compiled step, which guards each tensor that it is given."""
        return torch.tensor((self.start, self.flipped, self.rotation), dtype=torch.int32)

    @classmethod
    def of_numbers(cls, numbers: Tensor) -> RandomSource:
        """The source that `numbers` was made from."""
        return cls(*numbers.unbind())

    def bits(self, arithmetic: WideArithmetic, like: Tensor, stream: int) -> Tensor:
        """32 random bits for each element of a flat tensor: int32, fresh. Streams are independent of each other.

        A multiplicative hash with one fold in between: its upper 24 bits are the good ones.
        """
        start = self.start + signed(stream * _STREAM)
        mixed = arithmetic.indices(like, start if isinstance(start, Tensor) else signed(int(start)))
        folded = arithmetic.fresh(torch.bitwise_right_shift, mixed, 15)
        folded = arithmetic.on(torch.bitwise_and, folded, 0x1FFFF)
        mixed = arithmetic.on(torch.bitwise_xor, mixed, folded)
        arithmetic.give_back(folded)
        mixed = arithmetic.on(torch.bitwise_xor, mixed, self.flipped)
        return arithmetic.on(_multiplied_and_rotated, mixed, self.rotation)


def _multiplied_and_rotated(mixed: Tensor, rotation: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.add(rotation, mixed, alpha=_MIX, out=out)


class RandomBits:
    """The random bits of a chunk's elements, handed out from the upper ones of each 32 on, which are the best.

    like: a flat tensor as long as the chunk. An element's bits follow from its index and the calls before.
    """

    def __init__(self, source: RandomSource, arithmetic: WideArithmetic, like: Tensor, stream: int = 0) -> None:
        self._source, self._arithmetic, self._like = source, arithmetic, like
        self._stream, self._left = stream, 0
        self._bits: Tensor | None = None

    def take(self, count: int) -> Tensor:
        """A fresh int32 vector of numbers from 0 up to, but not, 2^count, count at most 31."""
        arithmetic = self._arithmetic
        if self._bits is None or count > self._left:
            if self._bits is not None:
                arithmetic.give_back(self._bits)
            self._bits, self._left = self._source.bits(arithmetic, self._like, self._stream), 32
            self._stream += 1
        bits, mask = self._bits, (1 << count) - 1
        self._left -= count
        if self._left:
            bits = arithmetic.fresh(torch.bitwise_right_shift, bits, self._left)
        else:
            self._bits = None
        return arithmetic.on(torch.bitwise_and, bits, mask)

    def uniform(self, end: float = 1.0) -> Tensor:
        """Fresh fp32 numbers from 0 up to, but not, `end`, a power of two, in steps of its 2^24th part."""
        drawn = self.take(24)
        numbers = self._arithmetic.load(drawn)
        self._arithmetic.give_back(drawn)
        return numbers.mul_(2.0**-24 * end)

    def longer(self, like: Tensor) -> RandomBits:
        """The next 32 bits of as many elements as `like`, which has the chunk's and more."""
        self._left = 0
        self._stream += 1
        return RandomBits(self._source, WideArithmetic(), like, self._stream - 1)


@dataclass(frozen=True)
class Seeding:
    """One step's random numbers: those of each tensor follow from the seed and the two counters.

    So their state is in the state dict (the seed in the group, the counter in `step`), and replicas that step the
    same tensors round alike; shards of a DTensor draw different numbers.
    """

    seed: int
    step: int

    @property
    def rotation(self) -> int:
        """That of every tensor's source."""
        return signed(self.step * _GOLDEN)

    @staticmethod
    def rotations(steps: Tensor) -> Tensor:
        """Those of several steps' numbers, int32 of their shape."""
        return (steps.to(torch.int64) * _GOLDEN).to(torch.int32)

    def at(self, position: int, shard: int = 0) -> RandomSource:
        """The source of the tensor at this position among the optimizer's parameters, and of its shard."""
        key = mixed_seed(self.seed, position, *((shard,) if shard else ()))
        return RandomSource(signed(key), signed(key >> 32), self.rotation)


def shard_number(tensor: Tensor) -> int:
    """Which shard of a DTensor lives here, from 0: the same for replicas of one shard. 0 for a plain tensor."""
    mesh = getattr(tensor, "device_mesh", None)
    coordinates = None if mesh is None else mesh.get_coordinate()
    if mesh is None or coordinates is None:
        return 0
    number = 0
    for placement, size, coordinate in zip(tensor.placements, mesh.shape, coordinates, strict=True):  # type: ignore[attr-defined]
        if placement.is_shard():
            number = number * size + coordinate
    return number
