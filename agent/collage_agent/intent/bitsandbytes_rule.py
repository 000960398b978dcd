"""u of bitsandbytes' optimizers: their update rules in fp64, on states read as the numbers they stand for.

Their kernels compute in fp32 and take no other dtype: a clone of them is no shadow. The rules are short, and held
to the library's own steps at attach.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from collage_optim import CollageAdamW, CollageLion, CollageOptimizer, CollageSGD
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.optimizer_clone import clone_value, isolated
from collage_agent.intent.probe_runs import HOST, ProbeRun
from collage_agent.sample.quantised_states import reading
from collage_agent.sample.stored_parts import PLAIN, elementwise_state

__all__ = ["BitsandbytesRule", "follows_bitsandbytes_rule", "rule_mismatch"]

_TOLERANCE: Final = 1e-3
_PROBE_STEPS: Final = 4
_SMALL: Final = 2.0**-8

Group = dict[str, Any]
State = dict[str, Any]


def _adam(group: Group, state: State, weight: Tensor, gradient: Tensor, step: int) -> Tensor:
    first, second = group["betas"][:2]
    average = state["state1"] = first * state["state1"] + (1 - first) * gradient
    square = state["state2"] = second * state["state2"] + (1 - second) * gradient.square()
    scale = math.sqrt(1 - second**step)
    moved: Tensor = average / (square.sqrt() / scale + group["eps"]) * (-group["lr"] / (1 - first**step))
    return moved.sub_(weight, alpha=group["lr"] * group["weight_decay"])


def _momentum(group: Group, state: State, weight: Tensor, gradient: Tensor, step: int) -> Tensor:
    gradient = gradient + group["weight_decay"] * weight
    average: Tensor = gradient if step == 1 else group["betas"][0] * state["state1"] + gradient
    state["state1"] = average
    return average.mul(-group["lr"])


def _lion(group: Group, state: State, weight: Tensor, gradient: Tensor, step: int) -> Tensor:
    first, second = group["betas"][:2]
    direction = (first * state["state1"] + (1 - first) * gradient).sign()
    state["state1"] = second * state["state1"] + (1 - second) * gradient
    moved: Tensor = -group["lr"] * (direction + group["weight_decay"] * weight)
    return moved


def _rmsprop(group: Group, state: State, weight: Tensor, gradient: Tensor, step: int) -> Tensor:
    gradient = gradient + group["weight_decay"] * weight
    first = group["betas"][0]
    state["state1"] = first * state["state1"] + (1 - first) * gradient.square()
    moved: Tensor = gradient / (state["state1"].sqrt() + group["eps"]) * -group["lr"]
    return moved


def _adagrad(group: Group, state: State, weight: Tensor, gradient: Tensor, step: int) -> Tensor:
    gradient = gradient + group["weight_decay"] * weight
    state["state1"] = state["state1"] + gradient.square()
    moved: Tensor = gradient / (state["state1"].sqrt() + group["eps"]) * -group["lr"]
    return moved


_RULES: Final[dict[str, Callable[[Group, State, Tensor, Tensor, int], Tensor]]] = {
    "adagrad": _adagrad,
    "adam": _adam,
    "lion": _lion,
    "momentum": _momentum,
    "rmsprop": _rmsprop,
}


class BitsandbytesRule:
    """u by the rule that the optimizer names, for states in fp32 or in 8-bit blocks; same calls as `Shadow`."""

    kind: Final = "rule"
    stochastic: Final[bool | None] = False
    unexplained: Final[str | None] = None

    def __init__(self, optimizer: Optimizer) -> None:
        self._rule = _RULES[_rule_name(optimizer)]
        self.composition = replace(PLAIN, growing=frozenset({"state1"} if self._rule is _adagrad else ()))

    def follows(self, kind: type[CollageOptimizer]) -> bool:
        """Whether it is the rule of that class of ours, with the same options."""
        return self._rule is {CollageAdamW: _adam, CollageLion: _lion, CollageSGD: _momentum}.get(kind)

    def refresh(self, optimizer: Optimizer) -> None:
        """Nothing is kept from one step to the next."""

    def displacement(
        self, group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor, out: Tensor
    ) -> bool:
        """Write u [n] fp64 of the step to `out`; advance `state` in place: averages [n] fp64 and `step`. True."""
        step = int(state.get("step", 0)) + 1
        for key in ("state1", "state2"):
            state.setdefault(key, torch.zeros_like(parameter))
        out.copy_(self._rule(group, state, parameter, gradient, step))
        state["step"] = step
        return True


def follows_bitsandbytes_rule(optimizer: Optimizer) -> bool:
    """Whether it is one of bitsandbytes' whose rule is known, and not scaled by norms of whole tensors."""
    known = type(optimizer).__module__.startswith("bitsandbytes.") and _rule_name(optimizer) in _RULES
    return known and not getattr(getattr(optimizer, "args", None), "max_unorm", 0.0)


def rule_mismatch(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Why the rule differs from the library's steps on the host on fp32 tensors, quantised and not; None if it does
    not."""
    try:
        with isolated(HOST):
            generator = torch.Generator().manual_seed(0)
            for shape in ((64, 64), (40,)):
                # Small weights, because the rounding of large ones is large beside an update at a small rate.
                run = ProbeRun(optimizer, group, [_SMALL * torch.randn(shape, generator=generator)])
                for _ in range(_PROBE_STEPS):
                    if _misses(run, torch.randn(shape, generator=generator)):
                        return f"{type(optimizer).__name__} does not step as the rule it names"
    except Exception as error:
        return f"{type(optimizer).__name__} cannot step probe tensors: {type(error).__name__}: {error}"
    return None


def _misses(run: ProbeRun, gradient: Tensor) -> bool:
    parameter, stored = run.parameters[0], run.state(0)
    elementwise = elementwise_state(parameter, stored)
    state = {k: reading(stored, k).double() if k in elementwise else clone_value(v) for k, v in stored.items()}
    before = parameter.double()
    expected = torch.empty_like(before)
    BitsandbytesRule(run.optimizer).displacement(run.group, state, before, gradient.double(), expected)
    run.step([gradient])
    error = (run.parameters[0].double() - before - expected).abs().max()
    return not bool(error <= _TOLERANCE * expected.abs().max())


def _rule_name(optimizer: Optimizer) -> str:
    return str(getattr(optimizer, "optimizer_name", ""))
