"""Storage strategies: how a weight and the optimizer's moving averages are kept between two steps.

A strategy says only how values are kept; an update rule says how they change. Each is written once, and any of
one works with any of the other where both make sense.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch

from collage_monitor.extensions import extensions

__all__ = [
    "LOW_COMPONENT_SUFFIX",
    "MASTER_PARAMETER",
    "PARAMETER_LOW",
    "STRATEGIES",
    "StateStorage",
    "StorageStrategy",
    "check_dtype",
    "known_strategy",
    "strategy_named",
]

LOW_COMPONENT_SUFFIX = "_low"
"""State key K + this suffix holds the low component of K: the value kept is the sum of the two."""

PARAMETER_LOW = "parameter" + LOW_COMPONENT_SUFFIX
"""State key of the weight's low component; the stored weight is p + parameter_low, for Kahan's compensation too."""

MASTER_PARAMETER = "master_parameter"
"""State key of the fp32 master weight, which is the stored weight where it exists."""


class StateStorage(Enum):
    """The ways to keep one value."""

    SINGLE = "one number of the parameter's dtype"
    PAIR = "an expansion of two numbers of the parameter's dtype"
    COMPENSATED = "one number and Kahan's compensation, both of the parameter's dtype"
    WIDE = "fp32"


@dataclass(frozen=True)
class StorageStrategy:
    """How the weight, the first moments (momentum included) and the second moments are kept.

    stochastic: the last component of the weight, and a second moment kept as a single number, are rounded up or
    down at random so that the expected value is right; a compensated weight never is.
    A package adds one of its own through the entry-point group `collage_agent.strategies`, under the same name.
    Where something is kept in fp32, both arithmetics compute in fp32. Raises ValueError for a moment that is to be
    compensated: only weights are.
    """

    name: str
    parameter: StateStorage
    first_moment: StateStorage
    second_moment: StateStorage
    stochastic: bool = False

    def __post_init__(self) -> None:
        if StateStorage.COMPENSATED in (self.first_moment, self.second_moment):
            raise ValueError(f"strategy {self.name!r}: only a weight can be COMPENSATED; keep moments otherwise")

    @property
    def is_plain(self) -> bool:
        """Whether all is one number of the parameter's dtype, rounded to nearest, as torch keeps it."""
        kept = {self.parameter, self.first_moment, self.second_moment}
        return kept == {StateStorage.SINGLE} and not self.stochastic

    @property
    def keeps_wide(self) -> bool:
        """Whether anything is kept in fp32."""
        return StateStorage.WIDE in (self.parameter, self.first_moment, self.second_moment)

    def kept(self, second_moment: bool) -> StateStorage:
        """How a moving average is kept, by its kind."""
        return self.second_moment if second_moment else self.first_moment

    def stochastic_moment(self, second_moment: bool) -> bool:
        """Whether a moving average of that kind is rounded at random."""
        return self.stochastic and second_moment and self.second_moment is StateStorage.SINGLE

    @property
    def parameter_state(self) -> str | None:
        """The state key that the weight needs beside the parameter itself, or None."""
        if self.parameter is StateStorage.WIDE:
            return MASTER_PARAMETER
        return None if self.parameter is StateStorage.SINGLE else PARAMETER_LOW


_SINGLE, _PAIR, _COMPENSATED, _WIDE = StateStorage
_TABLE = (
    StorageStrategy("plain", _SINGLE, _SINGLE, _SINGLE),
    StorageStrategy("stochastic", _SINGLE, _SINGLE, _SINGLE, stochastic=True),
    StorageStrategy("kahan", _COMPENSATED, _SINGLE, _SINGLE),
    StorageStrategy("light", _PAIR, _SINGLE, _SINGLE),
    StorageStrategy("light-stochastic", _PAIR, _SINGLE, _SINGLE, stochastic=True),
    StorageStrategy("plus", _PAIR, _SINGLE, _PAIR),
    StorageStrategy("full", _PAIR, _PAIR, _PAIR),
    StorageStrategy("fp32-states", _SINGLE, _WIDE, _WIDE),
    StorageStrategy("master-weights", _WIDE, _WIDE, _WIDE),
)

STRATEGIES: Mapping[str, StorageStrategy] = MappingProxyType({strategy.name: strategy for strategy in _TABLE})
"""Our own, by name."""

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_HIGH_PRECISION = (torch.float32, torch.float64)


_ADDED: dict[str, StorageStrategy] = {}
"""Those of other packages that were asked for: no `functools.cache`, which a user's torch.compile cannot trace."""


def known_strategy(name: str) -> StorageStrategy | None:
    """The strategy of that name, ours or one that an installed package adds; None where there is none.

    Raises:
        ValueError: what a package adds under the name is no `StorageStrategy`, or is called otherwise.
    """
    known = STRATEGIES.get(name) or _ADDED.get(name)
    if known is not None:
        return known
    found = extensions("collage_agent.strategies").get(name)
    if found is None:
        return None
    if not isinstance(found, StorageStrategy) or found.name != name:
        raise ValueError(f"collage_agent.strategies {name!r} must be a StorageStrategy of that name, not {found!r}")
    _ADDED[name] = found
    return found


def strategy_named(name: str) -> StorageStrategy:
    """Return the strategy of that name; raise ValueError with the known names otherwise."""
    found = known_strategy(name)
    if found is None:
        names = [*STRATEGIES, *extensions("collage_agent.strategies")]
        raise ValueError(f"Invalid strategy: {name!r}; use one of {', '.join(names)}")
    return found


def check_dtype(strategy: StorageStrategy, dtype: torch.dtype) -> None:
    """Raise ValueError when parameters of `dtype` cannot be kept that way."""
    if dtype in _LOW_PRECISION or (dtype in _HIGH_PRECISION and strategy.is_plain):
        return
    if dtype in _HIGH_PRECISION:
        raise ValueError(
            f"strategy {strategy.name!r} is for bfloat16 and float16 parameters, not {dtype}: "
            "put these parameters into a group of their own with strategy='plain'"
        )
    raise ValueError(f"parameters of {dtype} are not supported: use bfloat16, float16, float32 or float64")
