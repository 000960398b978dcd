"""u of optimizers whose tensors hang together: a copy of all of one takes the same step in fp64.

Such are Prodigy and D-Adaptation, whose step size is a number of all elements. The copy begins each measured step
with the live instance's numbers, so nothing adds up. At the first one of a launch a copy in the live dtypes takes
it, too, and must arrive where the live one does (`tests/agent/intent/test_whole_optimizer.py`).
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.error_guard import reraise_in_tests
from collage_agent.intent.before_after import BeforeAfter
from collage_agent.intent.foreign_optimizers import ForeignOptimizer
from collage_agent.intent.optimizer_clone import (
    clone_optimizer,
    clone_settings,
    clone_value,
    holds_values,
    uncompiled,
    undecorated_step,
    without_output,
)
from collage_agent.intent.shadow import Shadow
from collage_agent.intent.widening import Widening
from collage_agent.sample.state_mappings import state_of
from collage_agent.sample.stored_parts import PLAIN_TENSORS, Composition

__all__ = ["ELEMENTS_COPIED", "OptimizerCopy", "WholeOptimizer"]

_LOGGER = logging.getLogger("collage_agent")
ELEMENTS_COPIED: Final = 2**22
"""Elements of an optimizer that is copied, at most: 8 bytes each for θ, twice, for g and every state."""
_MAY_DIFFER: Final = 0.05
"""Share of the moved elements that a copy in the live dtypes may leave elsewhere: sums may be added in another
order."""
_CONTAINERS: Final = (dict, OrderedDict, defaultdict, list, tuple, set, deque)
_UNCHANGING: Final = (
    *(Tensor, torch.Generator, torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
    *(str, bytes, int, float, complex, type(None), Enum, logging.Logger),
)


class WholeOptimizer(BeforeAfter):
    """Only before and after on a sample, unless `copied`, which an optimizer's groups share, has taken the step."""

    def __init__(self, shadow: Shadow, reason: str, copied: OptimizerCopy) -> None:
        super().__init__(reason, shadow.composition, shadow.stochastic, shadow.unexplained)
        self.source = "whole-optimizer"
        self.shadow = shadow
        self.copied = copied

    def give_up(self, reason: str) -> None:
        """From now on there is no u."""
        self.source, self.reason = "before-after", f"{self.reason}; {reason}"


class OptimizerCopy:
    """Copies of one live optimizer: `begin` before a measured step, `step` after it, `release` when it is measured.

    Runs inside `isolated` and raises nothing. Synchronises a device once in a launch, and where the optimizer's own
    step does.
    """

    def __init__(self, *, is_verbose: bool = False) -> None:
        """is_verbose: a step prints or logs, which at measured steps would be once too often."""
        self.refused: str | None = None
        """Why the optimizer is not copied; once said, it stays."""
        self._is_verbose = is_verbose
        self._is_checked = False
        self._wide: _Copy | None = None
        self._narrow: _Copy | None = None

    def begin(self, optimizer: Any, compositions: Sequence[Composition]) -> None:
        """Copy what the step about to be taken reads; `compositions`: of the parameter groups."""
        optimizer = optimizer.given if isinstance(optimizer, ForeignOptimizer) else optimizer
        try:
            self.refused = _why_not(optimizer, compositions)
            if self.refused is None:
                self._wide = _Copy(optimizer, compositions, wide=True)
                self._narrow = None if self._is_checked else _Copy(optimizer, compositions, wide=False)
        except Exception as error:
            reraise_in_tests(error)
            self._failed(optimizer, f"{type(error).__name__}: {error}")

    def step(self, scale: Tensor | None) -> None:
        """The live step was taken: the copies take it too. `scale`: what the gradients are to be divided by."""
        if self._wide is None:
            return
        try:
            with without_output() if self._is_verbose else nullcontext():
                self._wide.step(scale)
                if self._narrow is not None and scale is None:
                    self._narrow.step(None)
                    differs = self._narrow.differs()
                    self._is_checked = differs is not None
                    if differs:
                        self._failed(self._wide.clone, "it does not move the weights as the optimizer does")
        except Exception as error:
            reraise_in_tests(error)
            self._failed(self._wide.clone, f"{type(error).__name__}: {error}")
        self._narrow = None

    def stepped(self, parameter: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """(u fp64, its states after the step in fp64) of a live parameter, in its shape."""
        assert self._wide is not None
        return self._wide.displacement(parameter), self._wide.state(parameter)

    def release(self) -> None:
        """Free the copies."""
        self._wide = self._narrow = None

    def _failed(self, optimizer: object, reason: str) -> None:
        self.refused = f"a copy of all of {type(optimizer).__name__} cannot step for it: {reason}"
        _LOGGER.warning("%s; training is not affected", self.refused)


class _Copy:
    """A clone with all parameters, gradients and states of a live optimizer; `wide`: in fp64."""

    def __init__(self, optimizer: Optimizer, compositions: Sequence[Composition], *, wide: bool) -> None:
        dtypes = {tensor.dtype for tensor, _ in _gradients(optimizer, compositions)}
        self._native = dtypes.pop() if len(dtypes) == 1 else None
        self._is_wide = wide
        copies = {id(tensor): self._numbers(tensor) for tensor in _tensors(_copied_parts(optimizer))}
        self._start: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.clone = clone_optimizer(optimizer, copies)
        self.clone.state = clone_value(optimizer.state, copies=copies)
        for group in optimizer.param_groups:
            for live in group["params"]:
                copied = copies[id(live)]
                copied.requires_grad_(live.requires_grad)
                vars(copied).update(_tags(live))
                self._start[id(live)] = live, copied, copied.detach().clone()
            settings = clone_settings(group, copies)
            self.clone.param_groups.append({**settings, "params": [copies[id(live)] for live in group["params"]]})
        self._gradients = [
            (composition, copies[id(live)], composition.gradient_of(live).detach().clone())  # type: ignore[union-attr]
            for composition, live in _stepped(optimizer, compositions)
        ]
        self._step = undecorated_step(optimizer)

    def _numbers(self, tensor: Tensor) -> Tensor:
        wide = self._is_wide and tensor.is_floating_point()
        return tensor.detach().to(torch.float64 if wide else tensor.dtype, copy=True)

    def step(self, scale: Tensor | None) -> None:
        for composition, copied, gradient in self._gradients:
            own = gradient.double() if self._is_wide else gradient
            composition.give(copied, own if scale is None else own.div_(scale))
        with (
            uncompiled(type(self.clone)),
            Widening(self._native) if self._is_wide else nullcontext(),
        ):
            self._step(self.clone)

    def displacement(self, parameter: Tensor) -> Tensor:
        _, copied, start = self._start[id(parameter)]
        return copied.detach() - start

    def state(self, parameter: Tensor) -> Mapping[str, Any]:
        return state_of(self.clone, self._start[id(parameter)][1])

    def differs(self) -> bool | None:
        """Whether the live step has moved the weights otherwise than this one; None: neither has moved any."""
        others, moved = [], []
        for live, copied, start in self._start.values():
            others.append(live.ne(copied).logical_and_(live.eq(live)).sum().cpu())
            moved.append(live.ne(start).logical_or_(copied.ne(start)).sum().cpu())
        most = int(torch.stack(moved).sum())
        return int(torch.stack(others).sum()) > _MAY_DIFFER * most if most else None


def _why_not(optimizer: Optimizer, compositions: Sequence[Composition]) -> str | None:
    """Why no copy would step as the live optimizer does; None if nothing is known against it. Reads no value."""
    name = type(optimizer).__name__
    if any(composition.residual or composition.master or composition.sparse for composition in compositions):
        return f"{name} keeps weights in parts, and its tensors hang together"
    gradients = list(_gradients(optimizer, compositions))
    if any(gradient.layout != torch.strided for gradient, _ in gradients):
        return f"{name} steps a sparse gradient, and its tensors hang together"
    parts = _copied_parts(optimizer)
    for key, value in parts.items():
        if getattr(getattr(value, "func", value), "__self__", None) is optimizer:
            return f"{name} keeps a method of its own ({key}), through which a copy would step the live weights"
    tensors = list({id(tensor): tensor for tensor in (*_tensors(parts), *(each for each, _ in gradients))}.values())
    shapes = {weight.shape for _, weight in gradients}
    for tensor in tensors:
        if type(tensor) not in PLAIN_TENSORS or tensor.is_complex() or tensor.layout != torch.strided:
            return f"{name} keeps a {type(tensor).__name__} of {tensor.dtype} that cannot be copied in fp64"
        whole = not tensor.is_floating_point() and (tensor.dtype.itemsize < 4 or tensor.shape in shapes)
        if tensor.numel() > 1 and tensor.dtype != torch.bool and (whole or tensor.dtype.itemsize == 1):
            return f"{name} keeps codes ({tensor.dtype}), which say something else in fp64"
    if _overlap(tensors):
        return f"{name} keeps two tensors in the same memory"
    shared = next((part for part in _reachable(parts, set()) if not _is_copied(part)), None)
    return None if shared is None else f"{name} keeps a {type(shared).__name__}, which cannot be copied"


def _copied_parts(optimizer: Optimizer) -> dict[str, Any]:
    """What a clone takes over of an optimizer, by name."""
    kind = type(optimizer)
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.endswith("_hooks") and not (callable(value) and hasattr(kind, name))
    }


def _stepped(optimizer: Optimizer, compositions: Sequence[Composition]) -> Iterator[tuple[Composition, Tensor]]:
    for group, composition in zip(optimizer.param_groups, compositions, strict=True):
        for live in group["params"]:
            if composition.gradient_of(live) is not None:
                yield composition, live


def _gradients(optimizer: Optimizer, compositions: Sequence[Composition]) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients that the step reads, each with its parameter."""
    for composition, live in _stepped(optimizer, compositions):
        gradient = composition.gradient_of(live)
        assert gradient is not None
        yield gradient, live


def _parts(value: Any) -> Iterator[Any]:
    """What a container, or an object that holds values, consists of."""
    if isinstance(value, Mapping):
        yield from value
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif holds_values(value):
        yield from vars(value).values()


def _reachable(value: Any, seen: set[int]) -> Iterator[Any]:
    """This and all that it consists of, each once; `seen`: ids."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    for part in _parts(value):
        yield from _reachable(part, seen)


def _tensors(value: Any) -> list[Tensor]:
    return [part for part in _reachable(value, set()) if isinstance(part, Tensor)]


def _is_copied(value: Any) -> bool:
    """Whether `clone_value` copies it, or a step cannot change it."""
    return type(value) in _CONTAINERS or isinstance(value, _UNCHANGING) or callable(value) or holds_values(value)


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether two of them share a byte, which a copy of each would not."""
    spans = []
    for tensor in tensors:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + (last + 1) * tensor.element_size()))
    spans.sort()
    return any(one[0] == other[0] and other[1] < one[2] for one, other in itertools.pairwise(spans))


def _tags(parameter: Tensor) -> dict[str, Any]:
    """Plain attributes of a parameter, by which an optimizer may tell it from others."""
    return {name: value for name, value in vars(parameter).items() if isinstance(value, bool | int | float | str)}
