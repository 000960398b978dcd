"""Probe runs: clones of the user's optimizer that step random tensors on the host, and how runs are compared.

The self-test, the observation of storage and the check of betas all step such clones. They work on random numbers
of their own, so the training's stay untouched.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final

import torch
from collage_optim.tensor_step import local_part
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.optimizer_clone import (
    clone_group,
    clone_optimizer,
    clone_value,
    uncompiled,
    undecorated_step,
)
from collage_agent.intent.weight_bits import UnsignedBits
from collage_agent.intent.widening import Widening, widened
from collage_agent.sample.state_mappings import flat_state, nested_state, state_of, step_of
from collage_agent.sample.stored_parts import PLAIN, Composition

__all__ = ["HOST", "ProbeRun", "STEPS", "TOLERANCE", "gradients_of", "same_displacements", "same_scalars"]

HOST: Final = torch.device("cpu")
STEPS: Final = 16
TOLERANCE: Final = 1e-9
_NOISY_STEPS: Final = 8
_SMALLEST_RATE: Final = 1e-4
_PROBE_RATE: Final = 1e-3
_LOOKED_AT: Final = 64
"""Parameters of a group, and elements of a state."""


class ProbeRun:
    """A clone that steps its own tensors; `displacements` are those of the last step."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        start: Sequence[Tensor],
        widening: Widening | None = None,
        composition: Composition = PLAIN,
        first: int = 0,
    ) -> None:
        """composition: says where the optimizer looks for gradients. first: the place of the first tensor among
        those that other runs step together: states that a constructor makes may differ by place."""
        self.parameters = [tensor.clone() for tensor in start]
        self._composition = composition
        self._widening = widening
        self._clone = clone_optimizer(optimizer)
        self._step = undecorated_step(optimizer)
        numbers = _narrow_floats(vars(self._clone))
        if widening is not None and numbers:
            vars(self._clone).update(widened(numbers))
            widening.narrowed = True
        own = clone_group(_on_host(group), type(optimizer), HOST)
        rate = own.get("lr", 1.0)
        # None: the optimizer works its rate out itself.
        if rate is not None and float(rate) < _SMALLEST_RATE:
            # Some optimizers refuse a number if their own rate is a tensor.
            own["lr"] = torch.full_like(rate, _PROBE_RATE) if isinstance(rate, Tensor) else _PROBE_RATE
        own["params"] = self.parameters
        self._clone.param_groups = [own]
        # States in a dtype without comparisons are none that a constructor's can be known by.
        with suppress(RuntimeError, NotImplementedError):
            made = list(_as_built(optimizer, group, self.parameters, first))
            self._clone.state.update(zip(self.parameters, made, strict=False))

    @property
    def optimizer(self) -> Optimizer:
        """The clone of the user's optimizer."""
        return self._clone

    @property
    def group(self) -> dict[str, Any]:
        """The clone's only parameter group."""
        return self._clone.param_groups[0]

    def step(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Take a step with these gradients, and return the displacements."""
        before = [parameter.clone() for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            self._composition.give(parameter, gradient.clone())
        with uncompiled(type(self._clone)), self._widening or UnsignedBits():
            self._step(self._clone)
        return [parameter - start for parameter, start in zip(self.parameters, before, strict=True)]

    def state(self, index: int) -> dict[str, Any]:
        """The state of the tensor; its tensors are the run's own."""
        return dict(flat_state(self._clone.state, self.parameters, index))

    def take_over(self, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]], other: ProbeRun) -> None:
        """Continue from these values, with the run state that `other` keeps in its group and its instance."""
        for mine, value in zip(self.parameters, parameters, strict=True):
            mine.copy_(value)
        fresh = clone_optimizer(other._clone)
        fresh.param_groups = [{**_settings_of(other._clone.param_groups[0]), "params": self.parameters}]
        fresh.state = defaultdict(dict)
        others: dict[Any, Any] = other._clone.state
        for key, value in others.items():
            if not isinstance(key, Tensor):
                fresh.state[key] = clone_value(value)
        for mine, state in zip(self.parameters, states, strict=True):
            if state:
                fresh.state[mine] = nested_state(state)
        self._clone = fresh

    def scalars(self, index: int = 0) -> dict[str, float]:
        """Every float that the run keeps in its group, its instance and the state of one tensor."""
        group = self._clone.param_groups[0]
        found = dict(_floats("group", {key: value for key, value in group.items() if key != "params"}))
        attributes = {k: v for k, v in vars(self._clone).items() if k not in ("state", "param_groups", "defaults")}
        found.update(_floats("instance", attributes))
        found.update(_floats("state", self.state(index)))
        return found


def _as_built(
    optimizer: Optimizer, group: dict[str, Any], probes: Sequence[Tensor], first: int
) -> Iterator[dict[str, Any]]:
    """States for the probes, as the constructor of an optimizer makes them: one that takes its first step has no
    other place to make them.

    None where steps were taken, or where a state would have to be read on a device. An elementwise state has one
    value, or is a copy of the weight.
    """
    few = islice(group.get("params", ()), _LOOKED_AT) if optimizer.state else ()
    built = [(own, state) for own in few if (state := state_of(optimizer, own))][: first + len(probes)]
    if not built or any(_has_stepped(own, state) for own, state in built):
        return
    for place, probe in enumerate(probes, first):
        own, state = built[place % len(built)]
        yield {key: _for_probe(value, own, probe) for key, value in state.items()}


def _has_stepped(weight: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether steps have left something in a state, or nobody can tell without waiting."""
    if any(isinstance(value, Tensor) and not value.is_cpu for value in state.values()):
        return True
    if (count := step_of(state)) is not None and float(count) > 0:
        return True
    kept = [value for value in state.values() if isinstance(value, Tensor) and value.shape == weight.shape]
    return not all(_is_copy(value, weight) or bool((_few(value) == _few(value)[:1]).all()) for value in kept)


def _for_probe(value: Any, weight: Tensor, probe: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != weight.shape or value.dim() == 0:
        return clone_value(value)
    dtype = probe.dtype if probe.dtype == torch.float64 and value.is_floating_point() else value.dtype
    if _is_copy(value, weight):
        return probe.to(dtype, copy=True)
    return torch.full(probe.shape, _few(value)[0].item(), dtype=dtype)


def _is_copy(value: Tensor, weight: Tensor) -> bool:
    return torch.equal(_few(value), _few(weight).to(value.dtype))


def _few(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach()).flatten()[:_LOOKED_AT]


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group's unchanged settings and run state, without its parameters."""
    return {key: clone_value(value) for key, value in group.items() if key != "params"}


def gradients_of(shapes: Sequence[tuple[int, ...]], generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Gradients whose elements differ by many powers of ten: noise at first, then a steady direction."""

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    scales = [10.0 ** (2.0 * normal(shape)).clamp(-5, 3) for shape in shapes]
    directions = [normal(shape) for shape in shapes]
    for _ in range(_NOISY_STEPS):
        yield [scale * normal(shape) for scale, shape in zip(scales, shapes, strict=True)]
    while True:
        yield [
            scale * (direction + 0.1 * normal(shape))
            for scale, direction, shape in zip(scales, directions, shapes, strict=True)
        ]


def same_displacements(values: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether displacements equal the expected ones, relative to the largest of their tensor."""
    for value, wanted in zip(values, expected, strict=True):
        if not bool((value - wanted).abs().max() <= TOLERANCE * wanted.abs().max()):
            return False
    return True


def same_scalars(one: ProbeRun, other: ProbeRun, index: int = 0) -> bool:
    """Whether both keep the same floats; `index`: the tensor of `one` that `other` steps first."""
    expected, found = one.scalars(index), other.scalars()
    return expected.keys() == found.keys() and all(
        math.isclose(value, found[key], rel_tol=TOLERANCE, abs_tol=TOLERANCE) or math.isnan(value)
        for key, value in expected.items()
    )


def _narrow_floats(attributes: dict[str, Any]) -> dict[str, Any]:
    """The numbers that an instance keeps as tensors of less than 64 bits."""
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    }


def _floats(where: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, Tensor):
        if value.numel() == 1 and value.is_floating_point():
            yield where, float(value)
    elif isinstance(value, float):
        yield where, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _floats(f"{where}.{key}", entry)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _floats(f"{where}.{index}", entry)


def _on_host(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().cpu() if isinstance(value, Tensor) and key != "params" else value
        for key, value in group.items()
    }
