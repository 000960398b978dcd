"""Guards: combinations of options that a storage format cannot carry are refused before they train nothing."""

from collections.abc import Mapping
from typing import Any

import torch

from collage_agent.numerics.formats import round_to
from collage_agent.optim.rules import Moment
from collage_agent.optim.strategies import Kept, Strategy

__all__ = ["check_moments", "check_range"]


def check_moments(strategy: Strategy, rule_name: str, moments: tuple[Moment, ...]) -> None:
    """Raise ValueError when a rule keeps nothing that the strategy would keep differently from a simpler one."""
    if strategy.name == "plus" and not any(moment.second for moment in moments):
        raise ValueError(
            f"strategy 'plus' keeps the second moment as a pair, and {rule_name} has none: "
            "use 'light', which then takes the same bytes, or 'full'"
        )
    if strategy.name in ("full", "fp32-states") and not moments:
        simpler = "light" if strategy.name == "full" else "plain"
        raise ValueError(
            f"strategy {strategy.name!r} is about moving averages, and {rule_name} keeps none with these options: "
            f"use {simpler!r}, which is the same then"
        )


def check_range(
    group: Mapping[str, Any], strategy: Strategy, moments: tuple[Moment, ...], dtype: torch.dtype
) -> None:
    """Raise ValueError when float16's narrow range makes a rule with second moments meaningless.

    A pair of float16 holds no more than one number where second moments live: the error of a product below 2**-3
    falls under the smallest subnormal. In storage arithmetic an epsilon that rounds to zero divides zero by zero.
    """
    if dtype != torch.float16 or not any(moment.second for moment in moments):
        return
    if strategy.second_moment is Kept.PAIR:
        raise ValueError(
            f"strategy {strategy.name!r} keeps the second moment as a pair, which float16's range makes no better "
            "than one number: use bfloat16 parameters, or strategy 'fp32-states' or 'master-weights'"
        )
    eps = float(group["eps"])
    if group["arithmetic"] == "storage" and strategy.second_moment is not Kept.WIDE:
        rounded = round_to(torch.tensor(eps, dtype=torch.float64), dtype)
        if eps > 0 and rounded == 0:
            raise ValueError(
                f"eps={eps} rounds to zero in float16, so that a zero gradient divides zero by zero: "
                "use eps >= 1e-4, arithmetic='fp32', or bfloat16 parameters"
            )
