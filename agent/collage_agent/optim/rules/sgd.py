"""Stochastic gradient descent with momentum, Nesterov's or plain, and decay added to the gradient."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.optim.sgd import sgd

from collage_agent.optim.arithmetic import Arithmetic, Scalar, State
from collage_agent.optim.rules.rule import Group, Moment

__all__ = ["SGDRule"]


@dataclass(frozen=True)
class SGDRule:
    """SGD as torch.optim.SGD defines it.

    g = g + weight_decay * parameter;  b = momentum b + (1 - dampening) g, without dampening at the first step;
    displacement = -lr * (g + momentum b) with Nesterov's momentum, -lr * b with plain momentum, -lr * g without.
    Reference: Sutskever et al. 2013.
    """

    @property
    def moves_by_learning_rate(self) -> bool:
        return False

    def moments(self, group: Group) -> tuple[Moment, ...]:
        momentum = float(group["momentum"])
        return (Moment("momentum_buffer", decay=momentum),) if momentum != 0 else ()

    def scalars(self, group: Group, step: int) -> dict[str, Scalar]:
        numbers: dict[str, Scalar] = {"negative_lr": -float(group["lr"])}
        if group["weight_decay"] != 0:
            numbers["coupled_decay"] = float(group["weight_decay"])
        if group["momentum"] != 0:
            numbers["momentum"] = float(group["momentum"])
            numbers["one_minus_dampening"] = 1.0 if step == 1 else 1 - float(group["dampening"])
            if group["nesterov"]:
                numbers["nesterov_momentum"] = float(group["momentum"])
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
        direction = gradient
        if "momentum" in scalars:
            increment = arithmetic.product(gradient, scalars["one_minus_dampening"])
            direction = arithmetic.average(state, "momentum_buffer", scalars["momentum"], increment)
        if "nesterov_momentum" in scalars:
            direction = arithmetic.product(direction, scalars["nesterov_momentum"]).add_(gradient)
        return arithmetic.product(direction, scalars["negative_lr"])

    def torch_step(self, group: Group, parameter: Tensor, gradient: Tensor, state: State) -> bool:
        # torch keeps no buffer before the first step, and copies the gradient into it then.
        buffers: list[Tensor | None] = [state.get("momentum_buffer") if state["step"] > 0 else None]
        sgd(
            [parameter],
            [gradient],
            buffers,
            foreach=False,
            fused=False,
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
            lr=float(group["lr"]),
            dampening=float(group["dampening"]),
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if buffers[0] is not None and group["momentum"] != 0:
            state["momentum_buffer"] = buffers[0]
        state["step"] += 1
        return True
