"""Guards: refuse values that a storage format cannot hold, and warn of values that it holds badly.

Options that torch accepts silently are logged once under `collage_optim`. A Python warning, which test suites turn
into an error, would forbid the very runs that people want to compare.

`base.py` calls them before a step. They read values later, so that no step waits for a device
(`tests/optim/test_range_guards.py`). The formats fix which values are refused; the words are free.
"""

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from collage_optim.numerics.formats import format_of, gap_towards, round_to
from collage_optim.strategies import STRATEGIES, StateStorage, StorageStrategy, check_packed
from collage_optim.update_rules import Moment

__all__ = [
    "DeferredReads",
    "UpdateGuard",
    "check_moments",
    "check_range",
    "log_once",
    "more_exact",
    "range_findings",
]

_LOGGER = logging.getLogger(__name__)
_FIRST_LOOK = 3
_FALL = 1.4
_FAST = 0.98
_LOST_SHARE = 0.05


class DeferredReads:
    """Values on a device, which are checked once they have arrived, without waiting; on a host at once."""

    def __init__(self) -> None:
        self._coming: deque[tuple[torch.Event, Tensor, Callable[[Tensor], None]]] = deque()

    def add(self, value: Tensor, then: Callable[[Tensor], None]) -> None:
        """Call `then` with the value on the host: now, or at a later `poll`; never with one on the meta device."""
        if value.is_meta:
            return
        if value.device.type == "cpu":
            then(value)
            return
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        event = torch.Event(value.device)
        event.record()
        self._coming.append((event, host, then))

    def poll(self) -> None:
        """Check the values that have arrived since."""
        while self._coming and self._coming[0][0].query():
            _, host, then = self._coming.popleft()
            then(host)


@lru_cache(maxsize=256)
def log_once(finding: str) -> None:
    """Log a finding as a warning, unless this process has said it before."""
    _LOGGER.warning("low precision: %s", finding)


def check_moments(strategy: StorageStrategy, rule_name: str, moments: tuple[Moment, ...]) -> None:
    """Raise ValueError if one of our simpler strategies keeps everything that the rule has in the same way, or if
    the strategy needs moments that the rule has not."""
    check_packed(strategy, rule_name, [moment.name for moment in moments])

    def storages_of(candidate: StorageStrategy) -> tuple[object, ...]:
        averages = [
            (candidate.moment_storage(moment.second), candidate.stochastic_moment(moment.second))
            for moment in moments
        ]
        return candidate.parameter, candidate.stochastic_parameter, *averages

    for simpler in STRATEGIES.values():
        if simpler.name == strategy.name:
            return
        if storages_of(simpler) == storages_of(strategy):
            raise ValueError(
                f"strategy {strategy.name!r} differs from {simpler.name!r} only in how it keeps moving averages "
                f"of a kind of which {rule_name} has none: use {simpler.name!r}, which is the same then"
            )


def check_range(
    group: Mapping[str, Any], strategy: StorageStrategy, moments: tuple[Moment, ...], dtype: torch.dtype
) -> None:
    """Raise ValueError when float16's narrow range makes a rule with second moments meaningless.

    A pair of float16 holds no more than one number where second moments live: the error of a product below 2**-3
    falls under the smallest subnormal. In storage arithmetic an epsilon that rounds to zero divides zero by zero.
    """
    if dtype != torch.float16 or not any(moment.second for moment in moments):
        return
    if strategy.second_moment is StateStorage.PAIR:
        raise ValueError(
            f"strategy {strategy.name!r} keeps the second moment as a pair, which float16's range makes no better "
            f"than one number: use bfloat16 parameters, or {_advised(strategy, 'states', moments, dtype)}"
        )
    eps = float(group.get("eps", 0.0))
    if group["arithmetic"] == "storage" and not strategy.keeps_wide:
        rounded = round_to(torch.tensor(eps, dtype=torch.float64), dtype)
        if eps > 0 and rounded == 0:
            raise ValueError(
                f"eps={eps} rounds to zero in float16, so that a zero gradient divides zero by zero: "
                "use eps >= 1e-4, arithmetic='fp32', or bfloat16 parameters"
            )


def range_findings(strategy: StorageStrategy, moments: Sequence[Moment], dtype: torch.dtype) -> Iterator[str]:
    """Warnings: decay factors that the strategy cannot follow in this dtype, each with what to use instead."""
    if dtype not in (torch.bfloat16, torch.float16):
        return
    for moment in moments:
        storage = strategy.moment_storage(moment.second)
        if moment.decay is None or storage is StateStorage.WIDE or strategy.stochastic_moment(moment.second):
            continue
        limit = _smallest_forgetting(storage, dtype)
        if 1 - moment.decay < limit:
            yield (
                f"{moment.name} with decay {moment.decay} is more than {strategy.name!r} can hold in {dtype}: "
                f"it decays too little or not at all below 1 - decay = 2**{math.log2(limit):.0f}; "
                f"use {_advised(strategy, 'states', moments, dtype)}"
            )
        if moment.second and dtype == torch.float16:
            smallest = math.sqrt(2.0**-25 / (1 - moment.decay))
            yield (
                f"{moment.name} in float16 is zero for gradients below {smallest:.1e} (decay {moment.decay}): "
                f"use bfloat16 parameters, or {_advised(strategy, 'states', moments, dtype)}"
            )


def _smallest_forgetting(storage: StateStorage, dtype: torch.dtype) -> float:
    """The smallest 1 - decay that an average follows: 2**-8 as one bfloat16 number, 2**-15 as a pair or 24 bits.

    Measured on averages left without gradient for 1 / (1 - decay) steps: log(reached) / log(exact) is 1.38 at
    2**-8, 0.11 at 2**-8.5 and 0 below 2**-9 for one number; 0.988 at 2**-15, 0.957 at 2**-16 and 0.01 at 2**-17
    for a pair.
    """
    bits = format_of(dtype).mantissa_bits + 1
    return 2.0 ** -(2 * bits - 1) if storage in (StateStorage.PAIR, StateStorage.SPLIT_24) else 2.0**-bits


def _advised(
    strategy: StorageStrategy,
    lacking: Literal["weights", "states"],
    moments: Sequence[Moment],
    dtype: torch.dtype,
) -> str:
    """The strategies that keep more of the lacking parts and no less of the rest, with their bytes under a rule of
    these moments."""
    counts = _counts(moments)
    found = more_exact(strategy, lacking, moments, dtype)
    told = " or ".join(f"{entry.name!r} ({entry.bytes_of(*counts)} bytes a parameter)" for entry in found)
    return f"strategy {told}" if told else "fp32 parameters"


def more_exact(
    present: StorageStrategy,
    lacking: Literal["weights", "states"],
    moments: Sequence[Moment],
    dtype: torch.dtype,
) -> list[StorageStrategy]:
    """Our strategies that keep more of the lacking parts than `present` does, and no less of the rest.

    The most exact, and the most exact that needs no more bytes than the present one under a rule of these moments:
    what `collage_monitor.strategies.more_exact` advises, which knows strategies by name alone.
    """
    whole = present.parameter in (StateStorage.WIDE, StateStorage.SPLIT)
    if present.name == "split-master" or (lacking == "weights" and whole):
        return []
    if dtype == torch.float16:
        return [STRATEGIES["master-weights"]] if present.name != "master-weights" else []
    found = [STRATEGIES["split-master"]]
    if present.name == "fp32-states" or (present.name == "master-weights" and lacking == "states"):
        return found
    counts = _counts(moments)
    most = present.bytes_of(*counts)
    fitting = (STRATEGIES[name] for name in _by_exactness(moments))
    in_no_more = next((entry for entry in fitting if entry.bytes_of(*counts) <= most), present)
    return found if in_no_more in (*found, present) else [*found, in_no_more]


def _by_exactness(moments: Sequence[Moment]) -> tuple[str, ...]:
    """The most exact first, as docs/numerics.md has measured it.

    A second moment that moves slowly walks at random in 8 bits: bits of its own are worth more there than the
    weight's.
    """
    if not _counts(moments)[1]:
        return "split-master", "split-master-16bit", "split-master-8bit", "split-24bit-8bit"
    decays = [moment.decay for moment in moments if moment.decay is not None]
    slow = not decays or decays[-1] > _FAST
    in_eight, in_seven = ("coupled-8", "coupled-7") if slow else ("split-master-8bit", "split-24bit-8bit")
    return "split-master", "coupled-9", "split-master-16bit", in_eight, in_seven


def _counts(moments: Sequence[Moment]) -> tuple[int, int]:
    """How many moments of each kind."""
    second = sum(moment.second for moment in moments)
    return len(moments) - second, second


@dataclass
class _UpdateHistory:
    """The last look at a group: its step and learning rate, and what its updates had moved and lost by then."""

    step: int = 0
    rate: float = math.inf
    looked_at: float = math.inf
    moved: float = 0.0
    lost: float = 0.0


class UpdateGuard:
    """Warns once, before a strategy has lost a tenth of the movement in an optimizer's groups.

    It looks at the updates really made, in fp64 on a sample: at the third step, when the number of steps has
    doubled, and when the rate has fallen by a factor of 1.4; not while it rises, as in a warm-up. Between two looks
    it uses the last one for all steps. An update with |u| below half a gap of the stored value counts as lost.
    Shares are of sum |u|, along the path and not from end to end, so noisy updates warn sooner. No synchronisation:
    on a device the warning comes a step later.
    """

    def __init__(self) -> None:
        self.told = False
        self._steps = 0
        self._histories: dict[int, _UpdateHistory] = {}
        self._reads = DeferredReads()

    def begin(self) -> None:
        """Count a step of the optimizer."""
        self._steps += 1
        self._reads.poll()

    def is_due(self, number: int, group: Mapping[str, Any], strategy: StorageStrategy) -> bool:
        """Whether the updates of group `number` are to be looked at in this step."""
        if self.told or strategy.parameter is StateStorage.WIDE or strategy.stochastic_parameter:
            return False
        history = self._histories.setdefault(number, _UpdateHistory())
        rate, before = float(group["lr"]), history.rate
        history.rate = rate
        if rate > before or not rate or self._steps < _FIRST_LOOK:
            return False
        return self._steps >= 2 * history.step or rate <= history.looked_at / _FALL

    def look(
        self,
        number: int,
        group: Mapping[str, Any],
        strategy: StorageStrategy,
        moments: Sequence[Moment],
        weight: Tensor,
        displacement: Tensor,
    ) -> None:
        """Judge a sample: `weight` as it is visible, [n] in its own dtype, `displacement` [n] fp64.

        moments: those of the rule, for counting the bytes of the advised strategies.
        """
        history, size = self._histories[number], displacement.abs()
        lost = size.lt(_stored_half_gap(strategy, weight, displacement)).logical_and_(size.isfinite())
        sums = torch.stack((size.nan_to_num_(0.0, 0.0, 0.0).sum(), size.mul_(lost).sum()))
        falls = group["lr"] < history.looked_at
        since = self._steps - history.step
        # A rate that stays is looked at again after as many steps, one that falls after about as many as before.
        ahead = since if falls else self._steps
        history.step, history.looked_at = self._steps, float(group["lr"])
        judge = functools.partial(
            self._judge, history, strategy, moments, history.looked_at, since, ahead, weight.dtype
        )
        self._reads.add(sums, judge)

    def _judge(
        self,
        history: _UpdateHistory,
        strategy: StorageStrategy,
        moments: Sequence[Moment],
        rate: float,
        since: int,
        ahead: int,
        dtype: torch.dtype,
        sums: Tensor,
    ) -> None:
        moved, lost = sums.tolist()
        history.moved += since * moved
        history.lost += since * lost
        whole = history.moved + ahead * moved
        share = (history.lost + ahead * lost) / whole if whole else 0.0
        if share > _LOST_SHARE and not self.told:
            self.told = True
            now = lost / moved if moved else 0.0
            _LOGGER.warning(
                "low precision: at lr=%.3g, %.0f %% of what the updates move is below half a gap of what strategy "
                "%r keeps in %s, and is lost: %s",
                rate,
                100 * now,
                strategy.name,
                dtype,
                f"use {_advised(strategy, 'weights', moments, dtype)}",
            )


def _stored_half_gap(strategy: StorageStrategy, weight: Tensor, direction: Tensor) -> Tensor:
    """Half a gap of a strategy's stored weight, in the sign of `direction`: fp64, of the weight's shape.

    A pair's low component is at most half a gap of the weight, and has the weight's precision: it is taken as large
    as that, where its own gaps are widest and where updates of one direction come to rest. Strategies that keep a
    whole fp32 number are bounded by the gaps of the fp32 sum.
    """
    bits = format_of(weight.dtype).mantissa_bits + 1
    if strategy.parameter in (StateStorage.PAIR, StateStorage.COMPENSATED):
        return gap_towards(weight, direction) * 2.0 ** -(bits + 2)
    if strategy.parameter is StateStorage.SINGLE:
        return gap_towards(weight, direction) * 0.5
    return gap_towards(weight.to(torch.float32), direction) * 0.5
