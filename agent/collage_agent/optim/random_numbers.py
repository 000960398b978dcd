"""The random numbers of stochastic rounding: counters hashed into a generator's seed."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Seeding", "mixed_seed", "shard_number"]


def mixed_seed(*counters: int) -> int:
    """Counters hashed into a generator's seed (splitmix64, Steele et al. 2014)."""
    mixed = 0
    for value in counters:
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed


@dataclass(frozen=True)
class Seeding:
    """One step's random numbers: the generator is set anew for each tensor, from the seed and the two counters.

    So its state is in the state dict (the seed in the group, the counter in `step`), and replicas that step the
    same tensors round alike; shards of a DTensor draw different numbers.
    """

    seed: int
    step: int
    generator: torch.Generator

    def at(self, position: int, shard: int = 0) -> torch.Generator:
        """The generator, set for the tensor at this position among the optimizer's parameters and for its shard."""
        further = (shard,) if shard else ()
        return self.generator.manual_seed(mixed_seed(self.seed, position, self.step, *further))


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
