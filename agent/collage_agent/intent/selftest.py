"""The self-test at attach: may this optimizer be stepped on a sample of its elements, pooled into one tensor?

Clones of the user's optimizer step random fp64 tensors on the host, whole and sampled. It is elementwise if the
samples move exactly as they do inside the whole tensors. The probe sees only the branches that its steps take.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.clone import clone_group, clone_optimizer, clone_value, isolated, undecorated_step

__all__ = ["failure_of"]

STEPS: Final = 16
TOLERANCE: Final = 1e-9
_NOISY_STEPS: Final = 8
_SHAPES: Final = ((24, 16), (40,))
_MATRIX_SHAPES: Final = ((24, 16), (8, 5))
_SMALLEST_RATE: Final = 1e-4
_PROBE_RATE: Final = 1e-3
_HOST: Final = torch.device("cpu")


def failure_of(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Why the optimizer cannot be shadowed on samples with the settings of `group`; None if it can.

    Touches neither the optimizer nor any random state; synchronises no device.
    """
    try:
        with isolated(_HOST):
            generator = torch.Generator().manual_seed(0)
            failure = _probe(optimizer, group, _SHAPES, generator)
            if failure is not None and failure.startswith(_CANNOT_RUN):
                failure = _probe(optimizer, group, _MATRIX_SHAPES, generator)
    except Exception as error:
        failure = f"{_CANNOT_RUN}: {type(error).__name__}: {error}"
    return None if failure is None else f"{type(optimizer).__name__} {failure}"


_CANNOT_RUN: Final = "cannot step probe tensors"


class _Run:
    """A clone that steps its own tensors; `displacements` are those of the last step."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], start: list[Tensor]) -> None:
        self.parameters = [tensor.clone() for tensor in start]
        self._clone = clone_optimizer(optimizer)
        self._step = undecorated_step(optimizer)
        own = clone_group(_on_host(group), type(optimizer), _HOST)
        if float(own.get("lr", 1.0)) < _SMALLEST_RATE:
            own["lr"] = _PROBE_RATE
        own["params"] = self.parameters
        self._clone.param_groups = [own]

    def step(self, gradients: list[Tensor]) -> list[Tensor]:
        before = [parameter.clone() for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self._step(self._clone)
        return [parameter - start for parameter, start in zip(self.parameters, before, strict=True)]

    def state(self, index: int) -> dict[str, Any]:
        return dict(self._clone.state.get(self.parameters[index], {}))

    def take_over(self, parameters: list[Tensor], states: list[dict[str, Any]], other: _Run) -> None:
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
                fresh.state[mine] = state
        self._clone = fresh

    def scalars(self) -> dict[str, float]:
        """Every float that the run keeps in its group, its instance and its first tensor's state."""
        group = self._clone.param_groups[0]
        found = dict(_floats("group", {key: value for key, value in group.items() if key != "params"}))
        attributes = {k: v for k, v in vars(self._clone).items() if k not in ("state", "param_groups", "defaults")}
        found.update(_floats("instance", attributes))
        found.update(_floats("state", self.state(0)))
        return found


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings and run state without its parameters, as they are: no switch is cleared."""
    return {key: clone_value(value) for key, value in group.items() if key != "params"}


def _probe(
    optimizer: Optimizer, group: dict[str, Any], shapes: tuple[tuple[int, ...], ...], generator: torch.Generator
) -> str | None:
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    chosen = [torch.randperm(tensor.numel(), generator=generator)[: tensor.numel() // 2] for tensor in start]
    gradients = _gradients(shapes, generator)
    sampled_start = [tensor.reshape(-1)[index] for tensor, index in zip(start, chosen, strict=True)]
    try:
        whole, again = _Run(optimizer, group, start), _Run(optimizer, group, start)
        first = next(gradients)
        moved = whole.step(first)
        repeated = again.step(first)
    except Exception as error:
        return f"{_CANNOT_RUN}: {type(error).__name__}: {error}"
    synced = _Run(optimizer, group, sampled_start)
    free = _Run(optimizer, group, sampled_start)
    pooled = _Run(optimizer, group, [torch.cat(sampled_start)])
    gradient, step = first, 1
    while True:
        samples = [g.reshape(-1)[index] for g, index in zip(gradient, chosen, strict=True)]
        expected = [u.reshape(-1)[index] for u, index in zip(moved, chosen, strict=True)]
        if not _agree(repeated, moved):
            return "does not repeat its own steps (random, or its state is shared)"
        if not (_agree(synced.step(samples), expected) and _agree(free.step(samples), expected)):
            return "is not elementwise: a sample does not move as it does inside its tensor"
        if not _agree(pooled.step([torch.cat(samples)]), [torch.cat(expected)]):
            return "is not elementwise: tensors pooled into one do not move as they do apart"
        if not (_same_scalars(whole, free) and _same_scalars(whole, pooled)):
            return "is not elementwise: it keeps a number that depends on all elements"
        if step == STEPS:
            return None
        before = [parameter.clone() for parameter in whole.parameters]
        states = [_sample_state(whole.state(i), before[i], chosen[i]) for i in range(len(before))]
        if None in states:
            return "is not elementwise: it keeps a state of another shape than the parameter"
        values = [tensor.reshape(-1)[index] for tensor, index in zip(before, chosen, strict=True)]
        synced.take_over(values, [state for state in states if state is not None], whole)
        gradient, step = next(gradients), step + 1
        moved, repeated = whole.step(gradient), again.step(gradient)


def _gradients(shapes: tuple[tuple[int, ...], ...], generator: torch.Generator) -> Iterator[list[Tensor]]:
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


def _sample_state(state: dict[str, Any], parameter: Tensor, index: Tensor) -> dict[str, Any] | None:
    sampled = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() > 1:
            if value.shape != parameter.shape:
                return None
            sampled[key] = value.reshape(-1)[index]
        else:
            sampled[key] = clone_value(value)
    return sampled


def _agree(values: list[Tensor], expected: list[Tensor]) -> bool:
    for value, wanted in zip(values, expected, strict=True):
        if not bool((value - wanted).abs().max() <= TOLERANCE * wanted.abs().max()):
            return False
    return True


def _same_scalars(one: _Run, other: _Run) -> bool:
    expected, found = one.scalars(), other.scalars()
    return expected.keys() == found.keys() and all(
        math.isclose(value, found[key], rel_tol=TOLERANCE, abs_tol=TOLERANCE) or math.isnan(value)
        for key, value in expected.items()
    )


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
