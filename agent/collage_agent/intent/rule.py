"""u of our own optimizers: their rule in fp64 on the joined values, weight = p + low part or master weight."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.optim import CollageOptimizer, known_strategy
from collage_agent.sample.stored import OURS

__all__ = ["Rule"]


class Rule:
    """u from `exact_displacement` of a CollageOptimizer; same calls as `Shadow`, no clone and no self-test."""

    kind: Final = "rule"
    kept: Final = OURS

    def __init__(self, optimizer: CollageOptimizer) -> None:
        self.stochastic: bool | None = any(_stochastic(group) for group in optimizer.param_groups)
        self._displacement = optimizer.exact_rule()

    def refresh(self, optimizer: Optimizer) -> None:
        """Nothing is kept from one step to the next."""

    def displacement(
        self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor, out: Tensor
    ) -> bool:
        """Write u [n] fp64 of the step to `out`; `parameter` is left as it was. True: there is a u.

        `state` holds joined averages [n] fp64 and `step`, the number of steps taken; it is advanced in place.
        Synchronises only if `step` is a tensor on a device.
        """
        step = int(state.get("step", 0)) + 1
        intended, after = self._displacement(group, state, parameter, gradient, step)
        state.update(after)
        state["step"] = step
        out.copy_(intended)
        return True


def _stochastic(group: dict[str, Any]) -> bool:
    known = known_strategy(str(group.get("strategy")))
    return known is not None and known.stochastic
