"""Where stochastic rounding's random numbers come from: counters hashed into a generator's seed."""

from dataclasses import dataclass

import torch

__all__ = ["Seeding", "mixed_seed"]


def mixed_seed(seed: int, position: int, step: int) -> int:
    """Three counters hashed into a generator's seed (splitmix64, Steele et al. 2014)."""
    mixed = 0
    for value in (seed, position, step):
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed


@dataclass(frozen=True)
class Seeding:
    """One step's random numbers: the generator is set anew for each tensor, from the seed and the two counters.

    So its state is in the state dict (the seed in the group, the counter in `step`), and replicas that step the
    same tensors round alike.
    """

    seed: int
    step: int
    generator: torch.Generator

    def at(self, position: int) -> torch.Generator:
        """The generator, set for the tensor at this position among the optimizer's parameters."""
        return self.generator.manual_seed(mixed_seed(self.seed, position, self.step))
