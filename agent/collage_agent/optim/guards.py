"""Guards: refuse what a storage format cannot hold, and warn of what it holds badly.

What torch itself accepts in silence is logged, once each, under `collage_agent.optim`: a warning that a test
suite turns into an error would forbid the very runs that people want to compare.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from collage_agent.numerics.formats import format_of, round_to
from collage_agent.optim.rules import Moment
from collage_agent.optim.strategies import STRATEGIES, StateStorage, StorageStrategy

__all__ = ["check_moments", "check_range", "learning_rate_finding", "log_once", "range_findings"]

_LOGGER = logging.getLogger(__name__)


@lru_cache(maxsize=256)
def log_once(finding: str) -> None:
    """Log a finding as a warning, unless this process has said it before."""
    _LOGGER.warning("low precision: %s", finding)


def check_moments(strategy: StorageStrategy, rule_name: str, moments: tuple[Moment, ...]) -> None:
    """Raise ValueError when one of our simpler strategies keeps all that the rule has in the same way."""

    def kept_by(candidate: StorageStrategy) -> tuple[object, ...]:
        averages = [candidate.kept(moment.second) for moment in moments]
        return candidate.parameter, candidate.stochastic, *averages

    for simpler in STRATEGIES.values():
        if simpler.name == strategy.name:
            return
        if kept_by(simpler) == kept_by(strategy):
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
            "than one number: use bfloat16 parameters, or strategy 'fp32-states' or 'master-weights'"
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
        kept = strategy.kept(moment.second)
        if moment.decay is None or kept is StateStorage.WIDE or strategy.stochastic_moment(moment.second):
            continue
        limit = _smallest_forgetting(kept, dtype)
        if 1 - moment.decay < limit:
            yield (
                f"{moment.name} with decay {moment.decay} is more than {strategy.name!r} can hold in {dtype}: "
                f"it decays too little or not at all below 1 - decay = 2**{math.log2(limit):.0f}; "
                f"use {_better(kept, moment.second)}"
            )
        if moment.second and dtype == torch.float16:
            smallest = math.sqrt(2.0**-25 / (1 - moment.decay))
            yield (
                f"{moment.name} in float16 is zero for gradients below {smallest:.1e} (decay {moment.decay}): "
                "use bfloat16 parameters, or strategy 'fp32-states' or 'master-weights'"
            )


def _smallest_forgetting(kept: StateStorage, dtype: torch.dtype) -> float:
    """The smallest 1 - decay that an average follows: for bfloat16 2**-8 as one number, 2**-15 as a pair.

    Measured on averages left without gradient for 1 / (1 - decay) steps: log(reached) / log(exact) is 1.38 at
    2**-8, 0.11 at 2**-8.5 and 0 below 2**-9 for one number; 0.988 at 2**-15, 0.957 at 2**-16 and 0.01 at 2**-17
    for a pair.
    """
    bits = format_of(dtype).mantissa_bits + 1
    return 2.0 ** -(2 * bits - 1) if kept is StateStorage.PAIR else 2.0**-bits


def _better(kept: StateStorage, second: bool) -> str:
    if kept is StateStorage.PAIR:
        return "strategy 'fp32-states' or 'master-weights'"
    return "strategy 'plus', 'light-stochastic' or 'fp32-states'" if second else "strategy 'full' or 'fp32-states'"


def learning_rate_finding(
    group: Mapping[str, Any], strategy: StorageStrategy, parameters: Sequence[Tensor]
) -> str | None:
    """Warn of a learning rate below half an ulp of the weights, for rules whose steps are about that large.

    parameters: those about to take their first step; only such as live on the CPU are read, so that no device
    waits. The weight's size is its root mean square; the learning rate is the schedule's own where it warms up
    from less.
    """
    lr = max(float(group["lr"]), float(group.get("initial_lr", 0.0)))
    if lr == 0 or strategy.stochastic or strategy.parameter is StateStorage.WIDE:
        return None
    low_precision = [
        parameter
        for parameter in parameters
        if parameter.dtype in (torch.bfloat16, torch.float16)
        and parameter.device.type == "cpu"
        and parameter.numel()
    ]
    below = [parameter for parameter in low_precision if lr < _half_ulp(strategy, parameter)]
    if not below:
        return None
    other = (
        "'light-stochastic' or 'master-weights'"
        if strategy.parameter is not StateStorage.SINGLE
        else "'light' or 'plus'"
    )
    return (
        f"lr={lr} is below half an ulp of a typical weight in {len(below)} of {len(parameters)} tensors, so that "
        f"strategy {strategy.name!r} loses most of their updates: use strategy {other}"
    )


def _half_ulp(strategy: StorageStrategy, parameter: Tensor) -> float:
    """Half an ulp, towards zero, of the root mean square of a weight, in the last component that is kept."""
    size = float(parameter.detach().to(torch.float32).square().mean().sqrt())
    bits = format_of(parameter.dtype).mantissa_bits + 1
    return size * 2.0 ** -(bits + 1 if strategy.parameter is StateStorage.SINGLE else 2 * bits + 1)
