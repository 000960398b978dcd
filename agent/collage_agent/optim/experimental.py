"""Experiments with eight bits: two ways to keep a weight in three bytes, and AdamW on them. They may change.

`Bf16WithInt8` keeps a bfloat16 number and, in an int8, what it lacks in 256ths of its ulp: 2**-15 in three bytes,
and the high part feeds a matrix product as it is. `E4m3Triple` keeps an expansion of three float8_e4m3fn numbers
under one power-of-two scale a tensor: 2**-14, and needs joining before use. They are no strategies: of those a
stored weight is a sum of numbers, which every reader of states, the agent too, relies on.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from collage_agent.numerics.expansions import join, split
from collage_agent.numerics.formats import ulp
from collage_agent.optim.arithmetic import Working
from collage_agent.optim.options import checked_adam_options
from collage_agent.optim.rules import AdamRule

__all__ = ["EXPERIMENTAL_STORAGES", "Bf16WithInt8", "E4m3Triple", "ExperimentalStorage", "ThreeByteAdamW"]

_STEPS_IN_AN_ULP = 256.0
_LARGEST_E4M3 = 448.0


class Bf16WithInt8(NamedTuple):
    """value = high + low * ulp(high) / 256; three bytes an element; relative error at most 2**-15."""

    high: Tensor
    low: Tensor

    @classmethod
    def store(cls, value: Tensor) -> "Bf16WithInt8":
        """Round fp32 of any shape. Half an ulp is 128 steps; int8 holds 127 upwards. No synchronisation."""
        high = value.to(torch.bfloat16)
        unit = ulp(high).to(torch.float32) / _STEPS_IN_AN_ULP
        steps = torch.round((value - high.to(torch.float32)) / unit)
        return cls(high, steps.clamp_(-128, 127).to(torch.int8))

    def load(self) -> Tensor:
        """The value kept, as fp32."""
        unit = ulp(self.high).to(torch.float32) / _STEPS_IN_AN_ULP
        return self.high.to(torch.float32) + self.low.to(torch.float32) * unit


class E4m3Triple(NamedTuple):
    """value = (first + second + third) * scale; three bytes an element and four for the tensor."""

    first: Tensor
    second: Tensor
    third: Tensor
    scale: Tensor

    @classmethod
    def store(cls, value: Tensor) -> "E4m3Triple":
        """Round fp32 of any shape, under the power of two that brings its largest element just below 448."""
        largest = value.abs().amax() if value.numel() else torch.zeros((), device=value.device)
        exponent = torch.ceil(torch.log2(largest.clamp(min=2.0**-100) / _LARGEST_E4M3))
        scale = torch.exp2(exponent)
        first, second, third = split(value / scale, torch.float8_e4m3fn, 3)
        return cls(first, second, third, scale)

    def load(self) -> Tensor:
        """The value kept, as fp32."""
        return join(self.first, self.second, self.third, dtype=torch.float32) * self.scale


ExperimentalStorage = Bf16WithInt8 | E4m3Triple

EXPERIMENTAL_STORAGES: dict[str, type[Bf16WithInt8] | type[E4m3Triple]] = {
    "experimental-bf16-int8": Bf16WithInt8,
    "experimental-e4m3-triple": E4m3Triple,
}
"""Name to what keeps a weight: `store` makes it, `load` reads it."""


class ThreeByteAdamW(Optimizer):
    """AdamW on bfloat16 parameters whose stored weights take three bytes; the averages are fp32.

    storage: a name of EXPERIMENTAL_STORAGES. Its parts are in the state under weight_NAME; the registered parameter
    is the part `high` where there is one, and otherwise the rounded weight, two further bytes. A step goes tensor
    by tensor, in fp32. Raises ValueError for options out of range and for parameters that are not bfloat16.
    """

    _rule = AdamRule(decoupled=True)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        storage: str = "experimental-bf16-int8",
    ) -> None:
        options = checked_adam_options(lr, betas, eps, weight_decay, {})
        super().__init__(params, {**options, "amsgrad": False, "storage": storage})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, unless it cannot be kept in three bytes."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wrong = {parameter.dtype for parameter in group["params"]} - {torch.bfloat16}
        if not wrong and group["storage"] in EXPERIMENTAL_STORAGES:
            return
        self.param_groups.pop()
        if wrong:
            raise ValueError(f"three bytes are for bfloat16 parameters, not {wrong.pop()}: use CollageAdamW")
        raise ValueError(f"Invalid storage: {group['storage']!r}; use one of {', '.join(EXPERIMENTAL_STORAGES)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform a single optimization step; with a closure, evaluate it first and return the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter, parameter.grad)
        return loss

    def _step(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for moment in self._rule.moments(group):
                state[moment.name] = torch.zeros_like(parameter, dtype=torch.float32)
            self._keep(group, parameter, parameter.to(torch.float32))
        state["step"] += 1
        scalars = self._rule.scalars(group, int(state["step"].item()))
        value = self._kept(group, parameter).load()
        gradient = gradient.to(torch.float32)
        value += self._rule.displacement(Working(), value, gradient, state, scalars)
        self._keep(group, parameter, value)

    def _keep(self, group: dict[str, Any], parameter: Tensor, value: Tensor) -> None:
        kept = EXPERIMENTAL_STORAGES[group["storage"]].store(value)
        parts = kept._asdict()
        parameter.copy_(parts.pop("high") if "high" in parts else kept.load())
        self.state[parameter].update({f"weight_{name}": part for name, part in parts.items()})

    def _kept(self, group: dict[str, Any], parameter: Tensor) -> ExperimentalStorage:
        storage, state = EXPERIMENTAL_STORAGES[group["storage"]], self.state[parameter]
        return storage(*(parameter if name == "high" else state[f"weight_{name}"] for name in storage._fields))

    def stored_parameter(self, p: Tensor) -> Tensor:
        """The exact value kept for parameter p, as a new fp64 tensor of its shape. No synchronisation."""
        group = next(each for each in self.param_groups if any(p is member for member in each["params"]))
        value = self._kept(group, p).load() if self.state.get(p) else p
        return value.detach().to(torch.float64, copy=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, in the dtypes of the checkpoint, which torch would cast to bfloat16."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for group in self.param_groups:
            for parameter in group["params"]:
                for name, value in state_dict["state"].get(next(saved), {}).items():
                    device = value.device if name == "step" else parameter.device
                    self.state[parameter][name] = value.to(device, copy=True)
