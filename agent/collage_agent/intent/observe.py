"""What an optimizer is seen to do with 16-bit weights: a residual, a master weight, stochastic rounding, or none.

A clone steps weights of a known gap, with updates of an eighth of it. Plain rounding loses nearly all of them, so
that whatever makes the displacement match the intended one is what the weight is stored in: found without a name.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.clone import clone_optimizer, clone_value, isolated
from collage_agent.intent.probing import HOST, ProbeRun
from collage_agent.intent.selftest import SelfTestResult
from collage_agent.intent.shadow import Shadow
from collage_agent.intent.widen import Widening, widened
from collage_agent.sample.quantised import is_quantised, reading
from collage_agent.sample.stored import PLAIN, Composition, elementwise_state

__all__ = ["Observed", "observe_storage"]

_SHAPE: Final = (64, 64)
_STEPS: Final = 10
_SETTLING: Final = 3
_GAPS_A_STEP: Final = 1 / 8
_MATCHES: Final = 0.05
"""Σ(e − u)² over Σ u² below which e is u: Kahan sums leave 1e-3 and less, plain rounding 1, noise more."""
_FOLLOWS: Final = 1e-3
_SURELY_LOST: Final = 0.45
_ENOUGH: Final = 0.3
_NEARLY_ALL: Final = 0.9
_LONGEST_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Observed:
    """What the stored weight is made of, and whether weights are rounded at random; None: not known.

    failure: why the clone's fp64 steps are not what the live optimizer does after all; None: they are.
    """

    kept: Composition = PLAIN
    stochastic: bool | None = None
    failure: str | None = None


@dataclass(frozen=True)
class _Step:
    """One step of a run: weights, states, gradient and settings before it, weights and states after it; copies."""

    optimizer: Optimizer
    group: dict[str, Any]
    before: Tensor
    gradient: Tensor
    state: dict[str, Any]
    after: Tensor
    state_after: dict[str, Any]


def observe_storage(optimizer: Optimizer, group: dict[str, Any], found: SelfTestResult) -> Observed:
    """Watch a clone step probe weights in the dtype of most of the group's; 10 to 100 ms.

    Touches neither the optimizer nor any random state; synchronises no device. What cannot be run is not known.
    """
    dtypes = [parameter.dtype for parameter in group["params"]]
    dtype = max(dtypes, key=dtypes.count, default=torch.float32)
    group = {**group, "weight_decay": 0.0} if isinstance(group.get("weight_decay"), int | float) else group
    with isolated(HOST):
        try:
            generator = torch.Generator().manual_seed(0)
            weights = _weights(optimizer, group, found, dtype, generator)
            failure = None
            if found.kind != "before-after" and not type(optimizer).__module__.startswith("torch.optim"):
                failure = _unlike_the_shadow(optimizer, group, found, weights.float())
            if dtype.itemsize != 2:
                return Observed(PLAIN, False, failure)
            steps = _record(optimizer, group, weights)
            random = not torch.equal(steps[_SETTLING].after, _record(optimizer, group, weights)[_SETTLING].after)
            if found.kind == "before-after" or failure is not None:
                return Observed(_only_master(steps), None if random else False, failure)
            kept = _composition(steps, found)
            return Observed(kept, random and kept == PLAIN and _rounds(steps, found), failure)
        except Exception:
            return Observed()


def _weights(
    optimizer: Optimizer,
    group: dict[str, Any],
    found: SelfTestResult,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """Weights of one binade, in `dtype`, whose gap is eight times the median update."""
    start = torch.randn(_SHAPE, generator=generator, dtype=torch.float64)
    trial = ProbeRun(optimizer, group, [start], Widening() if found.widens else None)
    moved = start
    for gradient in _gradients(torch.Generator().manual_seed(1), _SETTLING):
        moved = trial.step([gradient.double()])[0]
    information = torch.finfo(dtype if dtype.itemsize == 2 else torch.bfloat16)
    typical = max(float(moved.abs().median()), 1e-30)
    smallest = round(math.log2(information.tiny)) + 2
    exponent = max(round(math.log2(typical / _GAPS_A_STEP / information.eps)), smallest)
    mantissas = 1.05 + 0.9 * torch.rand(_SHAPE, generator=generator, dtype=torch.float64)
    return (mantissas * start.sign() * math.ldexp(1.0, exponent)).to(dtype)


def _gradients(generator: torch.Generator, steps: int) -> Iterator[Tensor]:
    """Gradients of a steady direction, so that updates keep their size from step to step."""
    direction = torch.randn(_SHAPE, generator=generator)
    for _ in range(steps):
        yield direction + 0.3 * torch.randn(_SHAPE, generator=generator)


def _record(optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> list[_Step]:
    run = ProbeRun(optimizer, group, [weights])
    steps: list[_Step] = []
    started = time.thread_time()
    for gradient in _gradients(torch.Generator().manual_seed(1), _STEPS):
        if time.thread_time() - started > _LONGEST_SECONDS:
            raise TimeoutError(f"{type(optimizer).__name__} took {len(steps)} probe steps in {_LONGEST_SECONDS} s")
        gradient = gradient.to(weights.dtype)
        start = _settings(run)
        before, state = run.parameters[0].clone(), _readings(run)
        run.step([gradient])
        steps.append(_Step(*start, before, gradient, state, run.parameters[0].clone(), _readings(run)))
    return steps


def _settings(run: ProbeRun) -> tuple[Optimizer, dict[str, Any]]:
    """What the run keeps on its instance, for all tensors together, and in its group; copied."""
    instance = clone_optimizer(run.optimizer)
    shared: dict[Any, Any] = run.optimizer.state
    own: dict[Any, Any] = instance.state
    own.update({key: clone_value(value) for key, value in shared.items() if isinstance(key, str)})
    return instance, {key: clone_value(value) for key, value in run.group.items() if key != "params"}


def _readings(run: ProbeRun) -> dict[str, Any]:
    """The state with its elementwise entries as numbers, copied."""
    state = run.state(0)
    elementwise = elementwise_state(run.parameters[0], state)
    return {
        key: reading(state, key).clone() if key in elementwise else clone_value(value)
        for key, value in state.items()
    }


def _composition(steps: Sequence[_Step], found: SelfTestResult) -> Composition:
    """The composition whose displacements match the intended ones, if any does better than the weight alone."""
    last = steps[-1]
    floats = [
        key
        for key, value in elementwise_state(last.after, last.state_after).items()
        if value.is_floating_point() and not is_quantised(value)
    ]
    gap = _gap(last.after)
    candidates = [PLAIN]
    for key in floats:
        if bool((last.state_after[key].double().abs() <= gap).double().mean() > _NEARLY_ALL):
            candidates += [Composition(residual=key), Composition(residual=key, sign=-1)]
        if torch.equal(last.state_after[key].to(last.after.dtype), last.after):
            candidates.append(Composition(master=key))
    if len(candidates) == 1:
        return PLAIN
    scores = [_mismatch(steps, found, kept) for kept in candidates]
    best = min(range(len(candidates)), key=scores.__getitem__)
    return candidates[best] if scores[best] < _MATCHES else PLAIN


def _only_master(steps: Sequence[_Step]) -> Composition:
    """A state of more bits that rounds to the weight after every step is a master weight, whatever u may be."""
    for key, value in elementwise_state(steps[0].after, steps[0].state_after).items():
        if value.dtype.itemsize > steps[0].after.dtype.itemsize and all(
            torch.equal(step.state_after[key].to(step.after.dtype), step.after) for step in steps
        ):
            return Composition(master=key)
    return PLAIN


def _mismatch(steps: Sequence[_Step], found: SelfTestResult, kept: Composition) -> float:
    """Σ(e − u)² over Σ u² of the median step, if the weight were stored so.

    The median: at every sixth step a lookahead writes weights without their residual.
    """
    ratios = [
        float((e - u).square().sum() / u.square().sum()) if bool(u.any()) else math.inf
        for u, e in _displacements(steps, found, kept)
    ]
    return statistics.median(ratios)


def _displacements(
    steps: Sequence[_Step], found: SelfTestResult, kept: Composition
) -> Iterator[tuple[Tensor, Tensor]]:
    """u and e of each step but the first, fp64, for a stored weight of this composition."""
    shadow = Shadow(steps[0].optimizer, kept, widens=found.widens)
    for step in steps[1:]:
        shadow.refresh(step.optimizer)
        stored = _stored(step.before, step.state, kept)
        state = widened({key: clone_value(value) for key, value in step.state.items()})
        moved = stored.clone()
        shadow.step(step.group, state, moved, step.gradient.double())
        yield moved - stored, _stored(step.after, step.state_after, kept) - stored


def _stored(weight: Tensor, state: dict[str, Any], kept: Composition) -> Tensor:
    if kept.master is not None:
        master: Tensor = state[kept.master]
        return master.double()
    if kept.residual is not None:
        residual: Tensor = state[kept.residual]
        return weight.double() + kept.sign * residual.double()
    return weight.double()


def _rounds(steps: Sequence[_Step], found: SelfTestResult) -> bool:
    """Whether updates that rounding to nearest must lose move weights about as often as they should on average."""
    moved, expected = 0, 0.0
    gap = _gap(steps[0].before)
    for u, e in _displacements(steps, found, PLAIN):
        small = u.abs() < _SURELY_LOST * gap
        moved += int((e[small] != 0).sum())
        expected += float((u[small].abs() / gap[small]).sum())
    return moved > _ENOUGH * expected > 0


def _unlike_the_shadow(
    optimizer: Optimizer, group: dict[str, Any], found: SelfTestResult, weights: Tensor
) -> str | None:
    """Why fp64 steps are not what the optimizer does to fp32 weights; None where they are."""
    steps = _record(optimizer, group, weights)
    mismatch = _mismatch(steps, found, PLAIN)
    if mismatch < _FOLLOWS:
        return None
    return f"{type(optimizer).__name__} does not step fp32 weights as its clone steps fp64 ones"


def _gap(weights: Tensor) -> Tensor:
    """The distance from each weight to the next, away from zero, fp64."""
    information = torch.finfo(weights.dtype)
    _, exponent = torch.frexp(weights.double())
    return torch.ldexp(torch.full_like(weights, information.eps, dtype=torch.float64), exponent - 1)
