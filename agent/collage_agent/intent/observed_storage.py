"""Observes how an optimizer keeps 16-bit weights: with a residual, a master weight, stochastic rounding, or none.

A clone steps weights of a known gap, with updates of an eighth of it. Plain rounding loses nearly all of them, so
the tensors that make the displacement match the intended one are those that store the weight; no names are needed.
If the weights move as if nothing were lost, and no composition explains it, the storage is not understood.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from collage_optim.names import dtype_name
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.optimizer_clone import clone_optimizer, clone_value, isolated
from collage_agent.intent.probe_runs import HOST, ProbeRun
from collage_agent.intent.selftest import SelfTestResult
from collage_agent.intent.shadow import Shadow
from collage_agent.intent.widening import Widening, widened
from collage_agent.sample.quantised_states import is_quantised, reading
from collage_agent.sample.remainder_codes import codes_of
from collage_agent.sample.stored_parts import PLAIN, Composition, elementwise_state

__all__ = ["ObservedStorage", "observe_storage"]

_SHAPE: Final = (64, 64)
_STEPS: Final = 10
_SETTLING: Final = 3
_GAPS_A_STEP: Final = 1 / 8
_GAPS_OF_DECAY: Final = 1 / 16
_MATCHES: Final = 0.05
"""Σ(e − u)² over Σ u² below which e is u: Kahan sums leave 1e-3 and less, plain rounding 1, noise more."""
_FOLLOWS: Final = 1e-3
_BINADES_BELOW: Final = 12
_SURELY_LOST: Final = 0.45
_ENOUGH: Final = 0.3
_NEARLY_ALL: Final = 0.9
_MANY_STEPS: Final = 40
_WITHIN_A_GAP: Final = 0.1
"""Σ(E − U)² over Σ U² of so many steps below which something follows u: 0.02 and less where all of it is kept, 0.2
where moves are drawn at random, 1 where small updates are lost."""
_LONGEST_SECONDS: Final = 1.0


@dataclass(frozen=True)
class ObservedStorage:
    """The parts of the stored weight, and whether weights are rounded at random; None: not known.

    failure: why the clone's fp64 steps differ from the live optimizer's after all; None if they do not.
    unexplained: a state that keeps part of the weights in an unknown way; None if there is none.
    """

    composition: Composition = PLAIN
    stochastic: bool | None = None
    failure: str | None = None
    unexplained: str | None = None


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


def observe_storage(optimizer: Optimizer, group: dict[str, Any], found: SelfTestResult) -> ObservedStorage:
    """Watch a clone step probe weights in the 16-bit dtype of the group's, if it has any; 10 to 100 ms.

    Touches neither the optimizer nor any random state; synchronises no device. If the clone cannot run, the storage
    is unknown.
    """
    dtypes = [parameter.dtype for parameter in group["params"]]
    # Probe 16-bit weights if there are any: they show how a mixed group keeps its weights.
    narrow = [dtype for dtype in dtypes if dtype.itemsize == 2]
    dtype = max(narrow or dtypes, key=dtypes.count, default=torch.float32)
    decayed = group
    group = {**group, "weight_decay": 0.0} if isinstance(group.get("weight_decay"), int | float) else group
    with isolated(HOST):
        try:
            generator = torch.Generator().manual_seed(0)
            weights = _weights(optimizer, group, found, dtype, generator)
            failure = None
            if found.kind != "before-after" and not type(optimizer).__module__.startswith("torch.optim"):
                exact = _far_below_the_updates(weights) if found.bits and dtype.itemsize == 2 else weights.float()
                failure = _unlike_the_shadow(optimizer, group, found, exact)
            if dtype.itemsize != 2:
                return ObservedStorage(found.composition, False, failure)
            steps = _record(optimizer, group, weights, found.composition)
            again = _record(optimizer, group, weights, found.composition)
            random = not torch.equal(steps[_SETTLING].after, again[_SETTLING].after)
            if found.kind == "before-after" or failure is not None:
                composition = _only_master(steps, found.composition)
                unknown = _told(steps, _changing_integers(steps)) if composition.is_plain else None
                return ObservedStorage(composition, None if random else False, failure, unknown)
            composition = _composition(steps, found)
            moves = composition.is_plain and _rounds(steps, found)
            unexplained = None
            if moves and not random:
                unexplained = _unexplained(
                    _record(optimizer, group, weights, found.composition, _MANY_STEPS), found
                )
            if (random and moves) or not composition.is_plain:
                apart = _decays_apart(optimizer, decayed, replace(found, composition=composition), weights)
                composition = replace(composition, decays_apart=apart)
            return ObservedStorage(composition, random and moves, failure, unexplained)
        except Exception:
            return ObservedStorage(found.composition)


def _decays_apart(optimizer: Optimizer, group: dict[str, Any], found: SelfTestResult, weights: Tensor) -> bool:
    """Whether a decay by a small part of a gap is lost where updates of that size are not.

    Asked with gradients of 0: then the step is the decay. In fp64 it must be lr·λ of the weight.
    """
    if not group.get("weight_decay") or type(optimizer).__module__.startswith("torch.optim"):
        return False
    try:
        plain = replace(found.composition, residual=None, master=None)
        exact = ProbeRun(optimizer, group, [weights.double()], Widening() if found.widens else None, plain)
        rate = float(exact.group["lr"]) * float(group["weight_decay"])
        [moved] = exact.step([torch.zeros_like(weights, dtype=torch.float64)])
        if not torch.allclose(moved, weights.double() * -rate, rtol=_FOLLOWS, atol=0.0):
            return False
        small = torch.finfo(weights.dtype).eps * _GAPS_OF_DECAY / float(exact.group["lr"])
        run = ProbeRun(optimizer, {**group, "weight_decay": small}, [weights], composition=found.composition)
        run.step([torch.zeros_like(weights)])
        state, own = run.state(0), found.composition
        beside = state.get(own.residual or "")
        master = state.get(own.master or "")
        kept = [] if beside is None else [bool(beside.any())]
        kept += [] if master is None else [not torch.equal(master.double(), weights.double())]
        return torch.equal(run.parameters[0], weights) and not any(kept)
    except Exception:
        return False


def _weights(
    optimizer: Optimizer,
    group: dict[str, Any],
    found: SelfTestResult,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """Weights of one binade, in `dtype`, whose gap is eight times the median update."""
    start = torch.randn(_SHAPE, generator=generator, dtype=torch.float64)
    trial = ProbeRun(optimizer, group, [start], Widening() if found.widens else None, found.composition)
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


def _record(
    optimizer: Optimizer, group: dict[str, Any], weights: Tensor, composition: Composition, count: int = _STEPS
) -> list[_Step]:
    run = ProbeRun(optimizer, group, [weights], composition=composition)
    steps: list[_Step] = []
    started = time.thread_time()
    for gradient in _gradients(torch.Generator().manual_seed(1), count):
        if time.thread_time() - started > _LONGEST_SECONDS:
            raise TimeoutError(f"{type(optimizer).__name__} took {len(steps)} probe steps in {_LONGEST_SECONDS} s")
        gradient = gradient.to(weights.dtype)
        start = _settings(run)
        before, state = run.parameters[0].clone(), _readings(run)
        run.step([gradient])
        steps.append(_Step(*start, before, gradient, state, run.parameters[0].clone(), _readings(run)))
    return steps


def _settings(run: ProbeRun) -> tuple[Optimizer, dict[str, Any]]:
    """Copies of the run state on the instance, for all tensors together, and in the group."""
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
    """The composition whose displacements match the intended ones, if those of the weight alone do not."""
    last = steps[-1]
    floats = [
        key
        for key, value in elementwise_state(last.after, last.state_after).items()
        if value.is_floating_point() and not is_quantised(value)
    ]
    gap = _gap(last.after)
    plain = found.composition
    candidates = [plain]
    for key in floats:
        if bool((last.state_after[key].double().abs() <= gap).double().mean() > _NEARLY_ALL):
            candidates += [replace(plain, residual=key), replace(plain, residual=key, sign=-1)]
        if torch.equal(last.state_after[key].to(last.after.dtype), last.after):
            candidates.append(replace(plain, master=key))
    for key in _changing_integers(steps):
        for code in codes_of(last.state_after[key].dtype, last.after.dtype):
            counted = replace(plain, residual=key, code=code, counts=last.state_after[key].dtype)
            candidates += [replace(counted, sign=sign) for sign in (1, -1)]
    if len(candidates) == 1:
        return plain
    scores = [_mismatch(steps, found, composition) for composition in candidates]
    best = min(range(len(candidates)), key=scores.__getitem__)
    return candidates[best] if scores[best] < _MATCHES <= scores[0] else plain


def _changing_integers(steps: Sequence[_Step]) -> list[str]:
    """The states of one integer an element that a step changes, codes of quantised states left out."""
    last = steps[-1]
    found = elementwise_state(last.after, last.state_after)
    return [
        key
        for key, value in found.items()
        if not (value.is_floating_point() or is_quantised(value) or value.dtype == torch.bool)
        and not torch.equal(value, last.state.get(key, torch.zeros_like(value)))
    ]


def _unexplained(steps: Sequence[_Step], found: SelfTestResult) -> str | None:
    """The states that seem to keep the lost part; None if the movement of the weights needs no such state.

    Weights without such a state cannot follow small u to within their gap, step after step. Suspects are states
    that change differently from exact arithmetic, and states that fp64 weights do not have.
    """
    moves = list(_displacements(steps, found, found.composition))
    intended, moved = (torch.stack(parts) for parts in zip(*moves, strict=True))
    small = (intended.abs() < _SURELY_LOST * _gap(steps[0].before)).all(0)
    intended, moved = intended.sum(0)[small], moved.sum(0)[small]
    if not (moved - intended).square().sum() < _WITHIN_A_GAP * intended.square().sum():
        return None
    last = steps[-1]
    shadow = Shadow(last.optimizer, found.composition, widens=found.widens)
    state = widened({key: clone_value(value) for key, value in last.state.items()})
    shadow.step(last.group, state, last.before.double(), last.gradient.double())
    suspects = _changing_integers(steps)
    for key, value in elementwise_state(last.after, last.state_after).items():
        if value.is_floating_point() and not is_quantised(value):
            expected = state.get(key)
            tolerance = 4 * torch.finfo(value.dtype).eps
            if expected is None or not torch.allclose(
                value.double(), expected.double(), rtol=tolerance, atol=tolerance * float(value.abs().max())
            ):
                suspects.append(key)
    return _told(steps, suspects) or (
        "weights move as if nothing were rounded away, and no state of their shape says why: something of them is "
        "kept where it is not seen"
    )


def _told(steps: Sequence[_Step], suspects: Sequence[str]) -> str | None:
    """The sentence that names these states; None: there are none."""
    if not suspects:
        return None
    states = steps[-1].state_after
    names = " and ".join(f"{key} ({str(states[key].dtype).removeprefix('torch.')})" for key in suspects)
    return (
        f"weights move as if nothing were rounded away, and {names} "
        f"{'changes' if len(suspects) == 1 else 'change'} at each step: how that completes them is not understood"
    )


def _only_master(steps: Sequence[_Step], plain: Composition) -> Composition:
    """A state of more bits that rounds to the weight after every step is a master weight, whatever u may be."""
    for key, value in elementwise_state(steps[0].after, steps[0].state_after).items():
        if value.dtype.itemsize > steps[0].after.dtype.itemsize and all(
            torch.equal(step.state_after[key].to(step.after.dtype), step.after) for step in steps
        ):
            return replace(plain, master=key)
    return plain


def _mismatch(steps: Sequence[_Step], found: SelfTestResult, composition: Composition) -> float:
    """Σ(e − u)² over Σ u² of the median step, if the weight were stored so.

    The median: at every sixth step a lookahead writes weights without their residual.
    """
    ratios = [
        float((e - u).square().sum() / u.square().sum()) if bool(u.any()) else math.inf
        for u, e in _displacements(steps, found, composition)
    ]
    return statistics.median(ratios)


def _displacements(
    steps: Sequence[_Step], found: SelfTestResult, composition: Composition
) -> Iterator[tuple[Tensor, Tensor]]:
    """u and e of each step but the first, fp64, for a stored weight of this composition."""
    shadow = Shadow(steps[0].optimizer, composition, widens=found.widens)
    for step in steps[1:]:
        shadow.refresh(step.optimizer)
        stored = _stored(step.before, step.state, composition)
        state = widened({key: clone_value(value) for key, value in step.state.items()})
        moved = stored.clone()
        shadow.step(step.group, state, moved, step.gradient.double())
        yield moved - stored, _stored(step.after, step.state_after, composition) - stored


def _stored(weight: Tensor, state: dict[str, Any], composition: Composition) -> Tensor:
    if composition.master is not None:
        master: Tensor = state[composition.master]
        return master.double()
    if composition.residual is not None:
        return weight.double() + composition.residual_of(weight, state[composition.residual])
    return weight.double()


def _rounds(steps: Sequence[_Step], found: SelfTestResult) -> bool:
    """Whether updates that rounding to nearest must lose move weights about as often as they should on average."""
    moved, expected = 0, 0.0
    gap = _gap(steps[0].before)
    for u, e in _displacements(steps, found, found.composition):
        small = u.abs() < _SURELY_LOST * gap
        moved += int((e[small] != 0).sum())
        expected += float((u[small].abs() / gap[small]).sum())
    return moved > _ENOUGH * expected > 0


def _unlike_the_shadow(
    optimizer: Optimizer, group: dict[str, Any], found: SelfTestResult, weights: Tensor
) -> str | None:
    """Why fp64 steps differ from the optimizer's on weights that can hold its updates; None if they do not."""
    steps = _record(optimizer, group, weights, found.composition)
    mismatch = _mismatch(steps, found, found.composition)
    if mismatch < _FOLLOWS:
        return None
    kind = dtype_name(weights.dtype)
    return f"{type(optimizer).__name__} does not step {kind} weights as its clone steps fp64 ones"


def _far_below_the_updates(weights: Tensor) -> Tensor:
    """The weights, made so small that their dtype holds the updates, because some code works only in their
    dtype."""
    return weights * 2.0**-_BINADES_BELOW


def _gap(weights: Tensor) -> Tensor:
    """The distance from each weight to the next, away from zero, fp64."""
    information = torch.finfo(weights.dtype)
    _, exponent = torch.frexp(weights.double())
    return torch.ldexp(torch.full_like(weights, information.eps, dtype=torch.float64), exponent - 1)
