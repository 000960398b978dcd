"""Ten bytes a parameter: weights rounded stochastically, and a second moment that decays as it should.

`stochastic` keeps everything in one bfloat16 number, eight bytes, and rounds the second moment at random too: it is
right in the mean, and noisy. Here the second moment is a pair, two bytes more, without noise.
"""

from collage_agent.optim import StateStorage, StorageStrategy

__all__ = ["STRATEGY"]

STRATEGY = StorageStrategy(
    "stochastic-plus",
    parameter=StateStorage.SINGLE,
    first_moment=StateStorage.SINGLE,
    second_moment=StateStorage.PAIR,
    stochastic=True,
)
