"""Storage strategies: how a weight and the optimizer's moving averages are kept between two steps.

A strategy says only how values are kept; an update rule says how they change. Each is written once, and any of
one works with any of the other where both make sense.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch

__all__ = [
    "LOW_COMPONENT_SUFFIX",
    "MASTER_PARAMETER",
    "PARAMETER_LOW",
    "STRATEGIES",
    "Kept",
    "Strategy",
    "check_dtype",
    "strategy_named",
]

LOW_COMPONENT_SUFFIX = "_low"
"""State key K + this suffix holds the low component of K: the value kept is the sum of the two."""

PARAMETER_LOW = "parameter" + LOW_COMPONENT_SUFFIX
"""State key of the weight's low component; the stored weight is p + parameter_low, for Kahan's compensation too."""

MASTER_PARAMETER = "master_parameter"
"""State key of the fp32 master weight, which is the stored weight where it exists."""


class Kept(Enum):
    """The ways to keep one value."""

    SINGLE = "one number of the parameter's dtype"
    PAIR = "an expansion of two numbers of the parameter's dtype"
    COMPENSATED = "one number and Kahan's compensation, both of the parameter's dtype"
    WIDE = "fp32"


@dataclass(frozen=True)
class Strategy:
    """How the weight, the first moments (momentum included) and the second moments are kept.

    stochastic: the last component of the weight, and a second moment kept as a single number, are rounded up or
    down at random so that the expected value is right.
    """

    name: str
    parameter: Kept
    first_moment: Kept
    second_moment: Kept
    stochastic: bool = False

    def kept(self, second_moment: bool) -> Kept:
        """How a moving average is kept, by its kind."""
        return self.second_moment if second_moment else self.first_moment

    def stochastic_moment(self, second_moment: bool) -> bool:
        """Whether a moving average of that kind is rounded at random."""
        return self.stochastic and second_moment and self.second_moment is Kept.SINGLE

    @property
    def parameter_state(self) -> str | None:
        """The state key that the weight needs beside the parameter itself, or None."""
        if self.parameter is Kept.WIDE:
            return MASTER_PARAMETER
        return None if self.parameter is Kept.SINGLE else PARAMETER_LOW


_TABLE = (
    Strategy("plain", Kept.SINGLE, Kept.SINGLE, Kept.SINGLE),
    Strategy("stochastic", Kept.SINGLE, Kept.SINGLE, Kept.SINGLE, stochastic=True),
    Strategy("kahan", Kept.COMPENSATED, Kept.SINGLE, Kept.SINGLE),
    Strategy("light", Kept.PAIR, Kept.SINGLE, Kept.SINGLE),
    Strategy("light-stochastic", Kept.PAIR, Kept.SINGLE, Kept.SINGLE, stochastic=True),
    Strategy("plus", Kept.PAIR, Kept.SINGLE, Kept.PAIR),
    Strategy("full", Kept.PAIR, Kept.PAIR, Kept.PAIR),
    Strategy("fp32-states", Kept.SINGLE, Kept.WIDE, Kept.WIDE),
    Strategy("master-weights", Kept.WIDE, Kept.WIDE, Kept.WIDE),
)

STRATEGIES: Mapping[str, Strategy] = MappingProxyType({strategy.name: strategy for strategy in _TABLE})

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_HIGH_PRECISION = (torch.float32, torch.float64)


def strategy_named(name: str) -> Strategy:
    """Return the strategy of that name; raise ValueError with the known names otherwise."""
    found = STRATEGIES.get(name)
    if found is None:
        raise ValueError(f"Invalid strategy: {name!r}; use one of {', '.join(STRATEGIES)}")
    return found


def check_dtype(strategy: Strategy, dtype: torch.dtype) -> None:
    """Raise ValueError when parameters of `dtype` cannot be kept that way."""
    if dtype in _LOW_PRECISION or (dtype in _HIGH_PRECISION and strategy.name == "plain"):
        return
    if dtype in _HIGH_PRECISION:
        raise ValueError(
            f"strategy {strategy.name!r} is for bfloat16 and float16 parameters, not {dtype}: "
            "put these parameters into a group of their own with strategy='plain'"
        )
    raise ValueError(f"parameters of {dtype} are not supported: use bfloat16, float16, float32 or float64")
