"""Adam and AdamW: the direction is a moving average over the root of a moving average of squares."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.optim.adam import adam

from collage_agent.optim.arithmetic import Arithmetic, Scalar, State
from collage_agent.optim.rules.rule import Group, Moment

__all__ = ["AdamRule"]


@dataclass(frozen=True)
class AdamRule:
    """Adam, with decay either decoupled from the gradient (AdamW) or added to it.

    m = beta1 m + (1 - beta1) g;  v = beta2 v + ((1 - beta2) g) g; displacement = -lr / (1 - beta1^t) * m /
    (sqrt(v) / sqrt(1 - beta2^t) + eps) - (lr * weight_decay) * parameter. The decay is part of the displacement:
    as a factor of its own, 1 - lr * weight_decay would be rounded away. References: Kingma and Ba 2015;
    Loshchilov and Hutter 2019; Reddi, Kale and Kumar 2018 (amsgrad).
    """

    decoupled: bool

    @property
    def moves_by_learning_rate(self) -> bool:
        return True

    def moments(self, group: Group) -> tuple[Moment, ...]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        averages = (Moment("exp_avg", decay=beta1), Moment("exp_avg_sq", second=True, decay=beta2))
        return (*averages, Moment("max_exp_avg_sq", second=True)) if group["amsgrad"] else averages

    def scalars(self, group: Group, step: int) -> dict[str, Scalar]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
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
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            decoupled_weight_decay=self.decoupled,
        )
        return True
