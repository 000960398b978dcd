"""Lion for low-precision parameters, with any storage strategy that fits it."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from collage_agent.optim.base import CollageOptimizer
from collage_agent.optim.options import (
    check_learning_rate,
    check_not_negative,
    check_torch_options,
    checked_betas,
)
from collage_agent.optim.rules import LionRule

__all__ = ["CollageLion"]


class CollageLion(CollageOptimizer):
    """Lion with decoupled decay, kept as `strategy` says (see `CollageAdamW`).

    There is no second moment, so `plus` is refused in favour of `light`. All updates are as large as the learning
    rate, which makes plain storage lose them all at once when it falls below half an ulp of a weight.
    Raises ValueError or TypeError for options out of range, naming the value.
    """

    rule = LionRule()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        strategy: str = "light",
        arithmetic: str = "fp32",
        maximize: bool = False,
        seed: int = 0,
        compiled: str | None = None,
        **torch_options: Any,
    ) -> None:
        check_torch_options(torch_options)
        check_learning_rate(lr)
        check_not_negative("weight_decay", weight_decay)
        kept = {"strategy": strategy, "arithmetic": arithmetic, "seed": seed, "compiled": compiled}
        options = {"lr": lr, "betas": checked_betas(betas), "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, **kept})
