"""Storage strategies: how a weight and the optimizer's moving averages are kept between two steps.

A strategy says only how values are kept; an update rule says how they change. Each is written once, and every
strategy works with every rule where the pair makes sense.

Names and the states that each keeps are fixed: they stand in checkpoints, reports and the catalogue
`collage_monitor/strategies.py`. A package adds one by the entry-point group `collage_agent.strategies`
(`tests/optim/test_extensions.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch

from collage_optim.extensions import extensions

__all__ = [
    "LOW_COMPONENT_SUFFIX",
    "MASTER_PARAMETER",
    "PACKED_FIRST",
    "PACKED_SECOND",
    "PARAMETER_LOW",
    "SCALE_SUFFIX",
    "STRATEGIES",
    "StateStorage",
    "StorageStrategy",
    "check_arithmetic",
    "check_dtype",
    "check_packed",
    "known_strategy",
    "strategy_named",
    "usual_strategy",
]

LOW_COMPONENT_SUFFIX = "_low"
"""State key K + this suffix holds the low component of K: the value kept is the sum of the two. Where it is of an
integer dtype, it holds the bits below K's own (`collage_optim.integer_codes`)."""

SCALE_SUFFIX = "_scale"
"""State key K + this suffix holds one fp32 scale for each block of K's codes."""

PARAMETER_LOW = "parameter" + LOW_COMPONENT_SUFFIX
"""State key of the weight's low component: a float, as Kahan's compensation, or the bits below the weight's."""

MASTER_PARAMETER = "master_parameter"
"""State key of the fp32 master weight, which is the stored weight where it exists."""


PACKED_FIRST, PACKED_SECOND = "exp_avg", "exp_avg_sq"
"""State keys of the moments that BLOCKS_6 and BLOCKS_10 keep in one tensor, which lies under the first of them."""


class StateStorage(Enum):
    """The ways to keep one value."""

    SINGLE = "one number of the parameter's dtype"
    PAIR = "an expansion of two numbers of the parameter's dtype"
    COMPENSATED = "one number and Kahan's compensation, both of the parameter's dtype"
    WIDE = "fp32"
    SPLIT = "bfloat16, and the sixteen bits below it as an integer: together fp32"
    SPLIT_24 = "bfloat16, and eight of the bits below it as an integer: together 24 bits"
    ROOT = "sixteen bits of its square root"
    BLOCKS = "eight bits, with a scale for each block"
    BLOCKS_16 = "sixteen bits of its square root, with a scale for each block"
    BLOCKS_6 = "six bits, with a scale for each block, in the integers of a second moment in BLOCKS_10"
    BLOCKS_10 = "ten bits of its square root, with a scale for each block, above a first moment's six"

    @property
    def has_low(self) -> bool:
        """Whether the value has a second component, under its key + LOW_COMPONENT_SUFFIX."""
        return self in (StateStorage.PAIR, StateStorage.COMPENSATED, StateStorage.SPLIT, StateStorage.SPLIT_24)

    @property
    def is_split(self) -> bool:
        """Whether it is a bfloat16 number and integer bits below it."""
        return self in (StateStorage.SPLIT, StateStorage.SPLIT_24)

    @property
    def has_scales(self) -> bool:
        """Whether blocks of elements share a scale, under its key + SCALE_SUFFIX."""
        return self in (StateStorage.BLOCKS, StateStorage.BLOCKS_16) or self.is_packed

    @property
    def is_packed(self) -> bool:
        """Whether a first and a second moment are the low and the high bits of one integer."""
        return self in (StateStorage.BLOCKS_6, StateStorage.BLOCKS_10)

    @property
    def is_root(self) -> bool:
        """Whether 16-bit codes hold a square root, so that only second moments can be kept."""
        return self in (StateStorage.ROOT, StateStorage.BLOCKS_16, StateStorage.BLOCKS_10)

    @property
    def is_coded(self) -> bool:
        """Whether integers hold the value, or a part of it."""
        return self.is_split or self.is_root or self.has_scales


@dataclass(frozen=True)
class StorageStrategy:
    """How the weight, the first moments (momentum included) and the second moments are kept.

    stochastic: the last component of the weight, and a moment kept in 24 bits or fewer, are rounded up or down at
    random so that the expected value is right. A compensated weight never is, nor are values in fp32 or as a pair.
    coupled: weight and first moment exchange what rounding takes, under rules that say how far a first moment will
    still move a weight (`collage_optim.coupling`); for weights with integer bits below them, first moments in
    blocks, and stochastic rounding. A package adds a strategy through the entry-point group
    `collage_agent.strategies`, under the same name. If any part is kept in fp32, both arithmetics compute in fp32.
    Raises ValueError for a compensated moment, a weight in blocks, a root of a signed value, one packed moment
    without the other, and what cannot be coupled.
    """

    name: str
    parameter: StateStorage
    first_moment: StateStorage
    second_moment: StateStorage
    stochastic: bool = False
    coupled: bool = False

    def __post_init__(self) -> None:
        if StateStorage.COMPENSATED in (self.first_moment, self.second_moment):
            raise ValueError(f"strategy {self.name!r}: only a weight can be COMPENSATED; keep moments otherwise")
        if self.parameter.is_root or self.parameter.has_scales or self.first_moment.is_root:
            raise ValueError(
                f"strategy {self.name!r}: ROOT and BLOCKS_16 are for second moments, BLOCKS for moments"
            )
        packed = self.first_moment is StateStorage.BLOCKS_6, self.second_moment is StateStorage.BLOCKS_10
        if self.second_moment is StateStorage.BLOCKS_6 or packed[0] != packed[1]:
            raise ValueError(f"strategy {self.name!r}: first moments in BLOCKS_6 need second ones in BLOCKS_10")
        blocks = self.first_moment.has_scales
        if self.coupled and not (blocks and self.parameter.is_split and self.stochastic):
            raise ValueError(f"strategy {self.name!r}: coupled is for split weights and BLOCKS, rounded at random")

    @property
    def is_packed(self) -> bool:
        """Whether a first and a second moment share a tensor, so that a rule needs both, under torch's names."""
        return self.first_moment.is_packed

    @property
    def is_plain(self) -> bool:
        """Whether everything is one number of the parameter's dtype, rounded to nearest, as in torch."""
        return set(self.storages) == {StateStorage.SINGLE} and not self.stochastic

    @property
    def keeps_wide(self) -> bool:
        """Whether anything is kept in fp32."""
        return StateStorage.WIDE in self.storages

    def moment_storage(self, second_moment: bool) -> StateStorage:
        """How a moving average is kept, by its kind."""
        return self.second_moment if second_moment else self.first_moment

    def stochastic_moment(self, second_moment: bool) -> bool:
        """Whether a moving average of that kind is rounded at random."""
        return self.stochastic and self.moment_storage(second_moment) in _ROUNDED_AT_RANDOM

    @property
    def stochastic_parameter(self) -> bool:
        """Whether the weight is rounded at random."""
        return self.stochastic and self.parameter not in (StateStorage.COMPENSATED, StateStorage.WIDE)

    @property
    def is_coded(self) -> bool:
        """Whether integers hold a value, or a part of it."""
        return any(storage.is_coded for storage in self.storages)

    def bytes_of(self, first_moments: int = 1, second_moments: int = 1) -> int:
        """Bytes a 16-bit parameter under a rule that keeps so many moments of each kind, the gradient included.

        A weight in fp32 has a 16-bit copy beside it. Scales of blocks, 1/32 of a byte a moment, are not counted.
        """
        beside = 2 if self.parameter is StateStorage.WIDE else 0
        moments = first_moments * _BYTES[self.first_moment] + second_moments * _BYTES[self.second_moment]
        return _GRADIENT_BYTES + beside + _BYTES[self.parameter] + moments

    @property
    def storages(self) -> tuple[StateStorage, StateStorage, StateStorage]:
        """The storages of the weight, the first and the second moments."""
        return self.parameter, self.first_moment, self.second_moment

    @property
    def parameter_state(self) -> str | None:
        """The state key that the weight needs beside the parameter itself, or None."""
        if self.parameter is StateStorage.WIDE:
            return MASTER_PARAMETER
        return PARAMETER_LOW if self.parameter.has_low else None


_SINGLE, _PAIR, _COMPENSATED, _WIDE, _SPLIT, _SPLIT_24, _ROOT, _BLOCKS, _BLOCKS_16, _BLOCKS_6, _BLOCKS_10 = (
    StateStorage
)
_GRADIENT_BYTES = 2
_BYTES = {
    **dict.fromkeys((_PAIR, _COMPENSATED, _WIDE, _SPLIT), 4),
    _SPLIT_24: 3,
    **dict.fromkeys((_SINGLE, _ROOT, _BLOCKS_16, _BLOCKS_10), 2),
    _BLOCKS: 1,
    _BLOCKS_6: 0,
}
"""Bytes of a value in 16-bit training; BLOCKS_6 lies in the two of BLOCKS_10."""
_ROUNDED_AT_RANDOM = (_SINGLE, _SPLIT_24, _ROOT, _BLOCKS, _BLOCKS_16, _BLOCKS_6, _BLOCKS_10)
_TABLE = (
    StorageStrategy("plain", _SINGLE, _SINGLE, _SINGLE),
    StorageStrategy("stochastic", _SINGLE, _SINGLE, _SINGLE, stochastic=True),
    StorageStrategy("kahan", _COMPENSATED, _SINGLE, _SINGLE),
    StorageStrategy("light", _PAIR, _SINGLE, _SINGLE),
    StorageStrategy("light-stochastic", _PAIR, _SINGLE, _SINGLE, stochastic=True),
    StorageStrategy("plus", _PAIR, _SINGLE, _PAIR),
    StorageStrategy("full", _PAIR, _PAIR, _PAIR),
    StorageStrategy("fp32-states", _SINGLE, _WIDE, _WIDE),
    StorageStrategy("split-master", _SPLIT, _SPLIT_24, _SPLIT_24, stochastic=True),
    StorageStrategy("split-master-16bit", _SPLIT, _SINGLE, _ROOT, stochastic=True),
    StorageStrategy("split-master-8bit", _SPLIT, _BLOCKS, _BLOCKS, stochastic=True, coupled=True),
    StorageStrategy("split-24bit-8bit", _SPLIT_24, _BLOCKS, _BLOCKS, stochastic=True, coupled=True),
    StorageStrategy("coupled-9", _SPLIT, _BLOCKS, _BLOCKS_16, stochastic=True, coupled=True),
    StorageStrategy("coupled-8", _SPLIT_24, _BLOCKS, _BLOCKS_16, stochastic=True, coupled=True),
    StorageStrategy("coupled-7", _SPLIT_24, _BLOCKS_6, _BLOCKS_10, stochastic=True, coupled=True),
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


def usual_strategy(group: Mapping[str, Any], has_second_moment: bool) -> str:
    """What a group is kept as that names no strategy: the most exact that its parameters' dtypes allow.

    bfloat16: `split-master`; float16: `master-weights`; wider: `plain`. In `storage`
    arithmetic, which `split-master` refuses: `plus`, or `light` for a rule without a second moment.
    """
    dtypes = {parameter.dtype for parameter in group["params"]}
    if dtypes.issubset(_HIGH_PRECISION):
        return "plain"
    if group["arithmetic"] == "storage":
        return "plus" if has_second_moment else "light"
    return "master-weights" if torch.float16 in dtypes else "split-master"


def check_arithmetic(strategy: StorageStrategy, arithmetic: str) -> None:
    """Raise ValueError for an arithmetic that rounds away what the strategy keeps."""
    if arithmetic == "storage" and strategy.is_coded:
        raise ValueError(
            f"arithmetic='storage' rounds each operation to the parameters' dtype, but strategy {strategy.name!r} "
            "keeps other bits than those: leave arithmetic out"
        )


def check_packed(strategy: StorageStrategy, rule_name: str, averages: Sequence[str]) -> None:
    """Raise ValueError where the strategy packs two moments that a rule of these averages has not both."""
    if strategy.is_packed and tuple(averages[:2]) != (PACKED_FIRST, PACKED_SECOND):
        raise ValueError(
            f"strategy {strategy.name!r} packs {PACKED_FIRST} and {PACKED_SECOND} into one tensor, and {rule_name} "
            f"keeps {' and '.join(averages) or 'no average'}: use strategy 'split-24bit-8bit'"
        )


def check_dtype(strategy: StorageStrategy, dtype: torch.dtype) -> None:
    """Raise ValueError when parameters of `dtype` cannot be kept that way."""
    if dtype == torch.float16 and any(storage.is_split for storage in strategy.storages):
        raise ValueError(
            f"strategy {strategy.name!r} keeps the bits of fp32 below a bfloat16 number, and float16 is no leading "
            "part of fp32: use bfloat16 parameters, or strategy 'master-weights'"
        )
    if dtype in _LOW_PRECISION or (dtype in _HIGH_PRECISION and strategy.is_plain):
        return
    if dtype in _HIGH_PRECISION:
        is_split = any(storage.is_split for storage in strategy.storages)
        narrow = "bfloat16" if is_split else "bfloat16 and float16"
        raise ValueError(
            f"strategy {strategy.name!r} is for {narrow} parameters, not {dtype}: "
            "put these parameters into a group of their own with strategy='plain'"
        )
    raise ValueError(f"parameters of {dtype} are not supported: use bfloat16, float16, float32 or float64")
