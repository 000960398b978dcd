"""Stochastic gradient descent for low-precision parameters, with any storage strategy that fits it."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from collage_agent.optim.base import CollageOptimizer
from collage_agent.optim.options import check_learning_rate, check_not_negative, check_torch_options
from collage_agent.optim.rules import SGDRule

__all__ = ["CollageSGD"]


class CollageSGD(CollageOptimizer):
    """SGD with momentum, Nesterov's momentum and decay, kept as `strategy` says (see `CollageAdamW`).

    There is no second moment, so `plus` is refused in favour of `light`; without momentum there is no average, so
    `full` and `fp32-states` are refused too. `plain` in `storage` arithmetic is, bit for bit, torch.optim.SGD's
    for-loop. Other options and errors are those of torch.optim.SGD.
    """

    rule = SGDRule()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
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
        check_not_negative("momentum", momentum)
        check_not_negative("weight_decay", weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        kept = {"strategy": strategy, "arithmetic": arithmetic, "seed": seed, "compiled": compiled}
        super().__init__(params, {"lr": lr, **options, "maximize": maximize, **kept})
