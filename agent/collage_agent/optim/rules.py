"""Update rules: the displacement of one step from weight, gradient and moving averages, each rule written once.

A rule runs unchanged in fp32 on chunks, in the storage format operation by operation, in fp64 as the exact rule
that the agent's shadow step calls, and inside a compiled step: the arithmetic decides.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim.adam import adam

from collage_agent.optim.arithmetic import Arithmetic, Scalar, State

__all__ = ["AdamRule", "Moment", "Rule"]

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Moment:
    """A moving average that a rule keeps: its state key, and whether it averages squares."""

    name: str
    second: bool = False


class Rule(Protocol):
    """What an optimizer needs to know of its rule."""

    def moments(self, group: Group) -> tuple[Moment, ...]:
        """The moving averages that the rule keeps under these options."""

    def scalars(self, group: Group, step: int) -> dict[str, Scalar]:
        """The numbers that enter step `step` (1 for the first), computed in double precision.

        A term that is switched off has no entry, so that its operations are left out, not multiplied by zero.
        """

    def displacement(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> Tensor:
        """The step's displacement, weight decay included; a fresh tensor.

        parameter, gradient: one shape, left unchanged. state: the moving averages by name, advanced in place.
        """

    def torch_step(self, group: Group, parameter: Tensor, gradient: Tensor, state: State) -> bool:
        """Let torch's own for-loop optimizer make the step, `step` counter included; False where torch has none."""


def as_float(value: float | Tensor) -> float:
    """A hyper-parameter as a number; a one-element tensor on a device synchronises it."""
    return float(value)


@dataclass(frozen=True)
class AdamRule:
    """Adam, with decay either decoupled from the gradient (AdamW) or added to it.

    m = beta1 m + (1 - beta1) g;  v = beta2 v + ((1 - beta2) g) g; displacement = -lr / (1 - beta1^t) * m /
    (sqrt(v) / sqrt(1 - beta2^t) + eps) - (lr * weight_decay) * parameter. The decay is part of the displacement:
    as a factor of its own, 1 - lr * weight_decay would be rounded away. References: Kingma and Ba 2015;
    Loshchilov and Hutter 2019; Reddi, Kale and Kumar 2018 (amsgrad).
    """

    decoupled: bool

    def moments(self, group: Group) -> tuple[Moment, ...]:
        averages = (Moment("exp_avg"), Moment("exp_avg_sq", second=True))
        return (*averages, Moment("max_exp_avg_sq", second=True)) if group["amsgrad"] else averages

    def scalars(self, group: Group, step: int) -> dict[str, Scalar]:
        beta1, beta2 = (as_float(beta) for beta in group["betas"])
        lr, weight_decay = as_float(group["lr"]), as_float(group["weight_decay"])
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
            if self.decoupled:
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
        increment = arithmetic.product(gradient, scalars["one_minus_beta2"]).mul_(gradient)
        second = arithmetic.average(state, "exp_avg_sq", scalars["beta2"], increment)
        if "max_exp_avg_sq" in state:
            second = arithmetic.keep_maximum(state, "max_exp_avg_sq", "exp_avg_sq")
        denominator = arithmetic.square_root(second).mul_(scalars["root_correction"]).add_(scalars["eps"])
        displacement = arithmetic.quotient(first, denominator).mul_(scalars["negative_step_size"])
        if "decay" in scalars:
            displacement.sub_(arithmetic.product(parameter, scalars["decay"]))
        return displacement

    def torch_step(self, group: Group, parameter: Tensor, gradient: Tensor, state: State) -> bool:
        adam(
            [parameter],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [state["max_exp_avg_sq"]] if group["amsgrad"] else [],
            [state["step"]],
            foreach=False,
            amsgrad=group["amsgrad"],
            beta1=as_float(group["betas"][0]),
            beta2=as_float(group["betas"][1]),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            decoupled_weight_decay=self.decoupled,
        )
        return True
