"""AdaBelief (Zhuang et al. 2020): the step is divided by how far gradients stray from their moving average.

m = beta1 m + (1 - beta1) g;  s = beta2 s + (1 - beta2) (g - m)^2 + eps;
displacement = -lr / (1 - beta1^t) * m / (sqrt(s) / sqrt(1 - beta2^t) + eps) - lr * weight_decay * parameter.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from collage_agent.optim import Arithmetic, Moment, Scalar, State, UpdateRule
from torch import Tensor

__all__ = ["AdaBelief", "RULE"]


class AdaBelief(UpdateRule):
    """Written once, in operations of an arithmetic: it runs under every strategy, compiled, and in fp64."""

    options: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-16, "weight_decay": 0.0, "decoupled_weight_decay": True}
    )

    def moments(self, group: Mapping[str, Any]) -> tuple[Moment, ...]:
        beta1, beta2 = group["betas"]
        return Moment("exp_avg", decay=beta1), Moment("exp_avg_var", second=True, decay=beta2)

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, Scalar]:
        beta1, beta2 = group["betas"]
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        numbers: dict[str, Scalar] = {
            "beta1": beta1,
            "one_minus_beta1": 1 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1 - beta2,
            "root_correction": 1 / math.sqrt(1 - beta2**step),
            "eps": float(group["eps"]),
            "negative_step_size": -lr / (1 - beta1**step),
        }
        if weight_decay != 0:
            if group["decoupled_weight_decay"]:
                numbers["decay"] = lr * weight_decay
            else:
                numbers["coupled_decay"] = weight_decay
        return numbers

    def displacement(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> Tensor:
        if "coupled_decay" in scalars:
            gradient = arithmetic.product(parameter, scalars["coupled_decay"]).add_(gradient)
        increment = arithmetic.product(gradient, scalars["one_minus_beta1"])
        first = arithmetic.average(state, "exp_avg", scalars["beta1"], increment)
        surprise = arithmetic.product(first, -1.0).add_(gradient)
        increment = arithmetic.product(surprise, surprise).mul_(scalars["one_minus_beta2"]).add_(scalars["eps"])
        second = arithmetic.average(state, "exp_avg_var", scalars["beta2"], increment)
        denominator = arithmetic.square_root(second).mul_(scalars["root_correction"]).add_(scalars["eps"])
        displacement = arithmetic.quotient(first, denominator).mul_(scalars["negative_step_size"])
        if "decay" in scalars:
            displacement.sub_(arithmetic.product(parameter, scalars["decay"]))
        return displacement


RULE = AdaBelief()
