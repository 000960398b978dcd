"""Lion: the direction is the sign of an interpolation between gradient and moving average."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from collage_agent.optim.arithmetic import Arithmetic, Scalar, State
from collage_agent.optim.rules.rule import Group, Moment

__all__ = ["LionRule"]


@dataclass(frozen=True)
class LionRule:
    """Lion with decoupled decay.

    displacement = -lr * sign(beta1 m + (1 - beta1) g) - (lr * weight_decay) * parameter, from the average before
    this step;  m = beta2 m + (1 - beta2) g. Reference: Chen et al. 2023, algorithm 2.
    """

    @property
    def moves_by_learning_rate(self) -> bool:
        return True

    def moments(self, group: Group) -> tuple[Moment, ...]:
        return (Moment("exp_avg", decay=float(group["betas"][1])),)

    def scalars(self, group: Group, step: int) -> dict[str, Scalar]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        numbers: dict[str, Scalar] = {
            "beta1": beta1,
            "one_minus_beta1": 1 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1 - beta2,
            "negative_lr": -lr,
        }
        if weight_decay != 0:
            numbers["decay"] = lr * weight_decay
        return numbers

    def displacement(
        self,
        arithmetic: Arithmetic,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        scalars: Mapping[str, Scalar],
    ) -> Tensor:
        increment = arithmetic.product(gradient, scalars["one_minus_beta1"])
        direction = arithmetic.product(state["exp_avg"], scalars["beta1"]).add_(increment)
        displacement = direction.sign_().mul_(scalars["negative_lr"])
        if "decay" in scalars:
            displacement.sub_(arithmetic.product(parameter, scalars["decay"]))
        arithmetic.average(
            state, "exp_avg", scalars["beta2"], arithmetic.product(gradient, scalars["one_minus_beta2"])
        )
        return displacement

    def torch_step(self, group: Group, parameter: Tensor, gradient: Tensor, state: State) -> bool:
        return False
