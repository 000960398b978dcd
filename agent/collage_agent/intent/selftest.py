"""The self-test at attach: how may this optimizer be stepped in fp64 beside the live one?

Clones of the user's optimizer step random fp64 tensors on the host: whole, sampled, pooled and each alone. It is
elementwise if samples move exactly as they do inside their tensors, and separable if single tensors move as they do
together. If neither, all tensors together must repeat their steps. The probe covers only the branches that its
steps take.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.intent.optimizer_clone import clone_value, isolated
from collage_agent.intent.probe_runs import HOST, STEPS, ProbeRun, gradients_of, same_displacements, same_scalars
from collage_agent.intent.widening import Widening
from collage_agent.sample.stored_parts import PLAIN, Composition

__all__ = ["SelfTestResult", "run_selftest"]

_SHAPES: Final = ((24, 16), (40,))
_MATRIX_SHAPES: Final = ((24, 16), (8, 5))
_LONGEST: Final = 24
_RIGHT_ANGLES: Final = (10, 14)
_SCALES: Final = (1.0, 0.01, 0.01, 0.01)
_NEARLY_ALL: Final = 0.9
_CANNOT_RUN: Final = "cannot step probe tensors"
_NOT_SEPARABLE: Final = "is not separable"
_STILL: Final = "does not move probe tensors"
_DECOUPLED: Final = Composition(gradient="decoupled_grad")
_NO_DENSE: Final = "does not support dense gradients"
_SPARSE: Final = Composition(sparse=True)
_NOT_FINITE: Final = "makes weights NaN or infinite though gradients are finite, in fp64 too"
_COARSE: Final = "computes in fp32 inside an operation of its own, where a small update is itself lost"


@dataclass(frozen=True)
class SelfTestResult:
    """The result of the self-test.

    kind: "shadow": elementwise; "whole-tensor": each tensor by itself; "whole-optimizer": all tensors together;
    "before-after": none of these. widens: its own code casts down, so its steps are taken under `Widening`. bits:
    it takes weights apart into bits. reason: why it is not elementwise (nor separable). composition: says which
    gradient of a parameter is used; its storage plays no role here.
    """

    kind: Literal["shadow", "whole-tensor", "whole-optimizer", "before-after"]
    widens: bool = False
    reason: str = ""
    bits: bool = False
    composition: Composition = PLAIN


def run_selftest(optimizer: Optimizer, group: dict[str, Any]) -> SelfTestResult:
    """How the optimizer may be shadowed with the settings of `group`.

    Touches neither the optimizer nor any random state; synchronises no device.
    """
    with isolated(HOST):
        found = _tested(optimizer, group, PLAIN)
        if _STILL in found.reason:
            # TransformerEngine and Megatron step p.decoupled_grad and leave p.grad empty.
            other = _tested(optimizer, group, _DECOUPLED)
            return other if _STILL not in other.reason and _CANNOT_RUN not in other.reason else found
        if _NO_DENSE in found.reason:
            return _tested(optimizer, group, _SPARSE)
        return found


def _tested(optimizer: Optimizer, group: dict[str, Any], composition: Composition) -> SelfTestResult:
    name = type(optimizer).__name__
    failure, widens, bits = _first_that_runs(_elementwise_failure, optimizer, group, composition)
    if failure is None:
        growing = _growing(optimizer, group, composition, widens)
        return SelfTestResult("shadow", widens, composition=replace(composition, growing=growing), bits=bits)
    if any(known in failure for known in (_CANNOT_RUN, _STILL, _COARSE)):
        return SelfTestResult("before-after", reason=f"{name} {failure}", composition=composition)
    whole, widens, bits = _first_that_runs(_separable_failure, optimizer, group, composition)
    if whole is None:
        composition = replace(composition, growing=_growing(optimizer, group, composition, widens))
        return SelfTestResult("whole-tensor", widens, f"{name} {failure}", bits, composition)
    both = failure if whole == failure else f"{failure}; it {whole}"
    if whole.startswith(_NOT_SEPARABLE):
        together, widens, bits = _first_that_runs(
            partial(_separable_failure, apart=False), optimizer, group, composition
        )
        if together is None:
            composition = replace(composition, growing=_growing(optimizer, group, composition, widens))
            return SelfTestResult("whole-optimizer", widens, f"{name} {both}", bits, composition)
        both = f"{both}; it {together}"
    return SelfTestResult("before-after", reason=f"{name} {both}", composition=composition)


def _first_that_runs(
    test: Any, optimizer: Optimizer, group: dict[str, Any], composition: Composition
) -> tuple[str | None, bool, bool]:
    """The test's failure, None if it passed; whether casts had to be kept from rounding; whether bits had to stand
    for numbers.

    Tried with tensors of one and two dimensions, with matrices only, then with shapes such as the group's own; with
    casts kept in fp64, then as it is.
    """
    first: str | None = None
    for widening in (Widening(), None):
        for shapes in dict.fromkeys((_SHAPES, _MATRIX_SHAPES, _shapes_of(group))):
            try:
                failure = test(optimizer, group, shapes, widening, composition)
            except Exception as error:
                failure = f"{_CANNOT_RUN}: {type(error).__name__}: {error}"
            if failure is None or not (_CANNOT_RUN in failure or _STILL in failure):
                narrowed = widening is not None and widening.narrowed
                return failure, narrowed, widening is not None and widening.bits.met
            first = first or failure
    return first, False, False


def _shapes_of(group: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Shapes of two of the group's tensors, equal where all are, at most _LONGEST a dimension; the default if it
    has none."""
    shapes = list(dict.fromkeys(tuple(parameter.shape) for parameter in group["params"]))
    few = [tuple(_shortened(size, shape) for size in shape) for shape in (*shapes[:2], *shapes[:1])[:2]]
    return tuple(few) or _SHAPES


def _shortened(size: int, shape: tuple[int, ...]) -> int:
    """A size in the same proportion to the shape's largest, so that tall or wide shapes stay so."""
    largest = max(shape)
    return size if largest <= _LONGEST else max(-(-size * _LONGEST // largest), 1)


def _elementwise_failure(
    optimizer: Optimizer,
    group: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
    widening: Widening | None,
    composition: Composition,
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    chosen = [torch.randperm(tensor.numel(), generator=generator)[: tensor.numel() // 2] for tensor in start]
    sampled_start = _sampled(start, chosen)
    gradients = gradients_of(shapes, generator)

    def run(tensors: Sequence[Tensor]) -> ProbeRun:
        return ProbeRun(optimizer, group, tensors, widening, composition)

    whole, again, synced, free = run(start), run(start), run(sampled_start), run(sampled_start)
    pooled = run([torch.cat(sampled_start)])
    still, coarse = True, True
    for step in range(1, STEPS + 1):
        before = [parameter.clone() for parameter in whole.parameters]
        gradient = _gradient(step, next(gradients), before)
        if step > 1:
            states = [_sample_state(whole.state(i), before[i], chosen[i]) for i in range(len(before))]
            if None in states:
                return "is not elementwise: it keeps a state of another shape than the parameter"
            synced.take_over(_sampled(before, chosen), [state for state in states if state is not None], whole)
        moved, repeated = whole.step(gradient), again.step(gradient)
        still &= all(not bool(u.any()) for u in moved)
        coarse &= all(torch.equal(parameter, parameter.float().double()) for parameter in whole.parameters)
        samples, expected = _sampled(gradient, chosen), _sampled(moved, chosen)
        if not all(bool(u.isfinite().all()) for u in moved):
            return _NOT_FINITE
        if not same_displacements(repeated, moved):
            return "does not repeat its own steps (random, or its state is shared)"
        try:
            apart = same_displacements(synced.step(samples), expected) and same_displacements(
                free.step(samples), expected
            )
            together = same_displacements(pooled.step([torch.cat(samples)]), [torch.cat(expected)])
        except Exception as error:
            return f"is not elementwise: it cannot step a sample ({type(error).__name__}: {error})"
        if not apart:
            return "is not elementwise: a sample does not move as it does inside its tensor"
        if not together:
            return "is not elementwise: tensors pooled into one do not move as they do apart"
        if not (same_scalars(whole, free) and same_scalars(whole, pooled)):
            return "is not elementwise: it keeps a number that depends on all elements"
    if coarse:
        return _COARSE
    return _STILL if still else None


def _separable_failure(
    optimizer: Optimizer,
    group: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
    widening: Widening | None,
    composition: Composition,
    *,
    apart: bool = True,
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    gradients = gradients_of(shapes, generator)

    def run(tensors: Sequence[Tensor], first: int = 0) -> ProbeRun:
        return ProbeRun(optimizer, group, tensors, widening, composition, first)

    together, again = run(start), run(start)
    singles = start if apart else []
    synced, free = ([run([tensor], place) for place, tensor in enumerate(singles)] for _ in range(2))
    still, coarse = True, True
    for step in range(1, STEPS + 1):
        gradient = _gradient(step, next(gradients), together.parameters)
        if step > 1:
            for index, alone in enumerate(synced):
                alone.take_over([together.parameters[index]], [clone_value(together.state(index))], together)
        moved, repeated = together.step(gradient), again.step(gradient)
        still &= all(not bool(u.any()) for u in moved)
        coarse &= all(torch.equal(parameter, parameter.float().double()) for parameter in together.parameters)
        if not all(bool(u.isfinite().all()) for u in moved):
            return _NOT_FINITE
        if not same_displacements(repeated, moved):
            return "does not repeat its own steps (random, or its state is shared)"
        for index, expected in enumerate(moved if apart else ()):
            own = [gradient[index]]
            if not (
                same_displacements(synced[index].step(own), [expected])
                and same_displacements(free[index].step(own), [expected])
            ):
                return f"{_NOT_SEPARABLE}: a tensor does not move alone as it does among others"
            if not same_scalars(together, free[index], index):
                return f"{_NOT_SEPARABLE}: it keeps a number that depends on all tensors"
    if coarse:
        return _COARSE
    return _STILL if still else None


def _growing(optimizer: Optimizer, group: dict[str, Any], composition: Composition, widens: bool) -> frozenset[str]:
    """The states that sum up, as Adagrad's: no element of |s| ever shrinks, and they grow however small gradients
    are. A moving average would shrink then, and a maximum stand still."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPES[0], generator=generator, dtype=torch.float64)
    seen: list[dict[str, Tensor]] = []
    try:
        run = ProbeRun(optimizer, group, [start], Widening() if widens else None, composition)
        for scale in _SCALES:
            run.step([scale * torch.randn(start.shape, generator=generator, dtype=torch.float64)])
            kept = {key: value for key, value in run.state(0).items() if _is_like(value, start)}
            seen.append({key: value.abs() for key, value in kept.items()})
    except Exception:
        return frozenset()
    pairs = list(itertools.pairwise(seen))
    return frozenset(
        key for key in seen[-1] if all(key in old and _grows(old[key], new[key]) for old, new in pairs)
    )


def _grows(old: Tensor, new: Tensor) -> bool:
    # Beside a large sum the smallest squares are lost in fp64, too.
    return bool(new.ge(old).all()) and float(new.gt(old).double().mean()) > _NEARLY_ALL


def _is_like(value: object, start: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == start.shape and value.is_floating_point()


def _gradient(step: int, gradients: list[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a step; at some at right angles to the weights, row by row.

    Gradients of weights before a normalisation are like that, and some optimizers then take another branch.
    """
    if step not in _RIGHT_ANGLES:
        return gradients
    rows = [tensor.reshape(len(tensor) if tensor.dim() > 1 else 1, -1) for tensor in parameters]
    flat = [gradient.reshape(row.shape) for gradient, row in zip(gradients, rows, strict=True)]
    return [
        (g - (g * row).sum(1, keepdim=True) / (row * row).sum(1, keepdim=True) * row).view(tensor.shape)
        for g, row, tensor in zip(flat, rows, parameters, strict=True)
    ]


def _sampled(tensors: Sequence[Tensor], chosen: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.reshape(-1)[index] for tensor, index in zip(tensors, chosen, strict=True)]


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
