"""Iterations of a training loop: which steps belong together, of several optimizers or inside one another.

Or in one backward pass, in which parameters are stepped one by one.

`hooks.py` counts by it. A number that an iteration got is in reports and logs: how they are numbered is held by
`tests/loops/test_several.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

__all__ = ["BackwardSteps", "Iterations", "inside_own_step", "makes_states_only"]

_HOOKS_FILE: Final = torch_optimizer.__file__
_LOADS_STATES: Final = "torch.distributed.checkpoint.state_dict"


class Iterations:
    """Counts iterations from the steps of `members` optimizers; with one of them each step is an iteration.

    An iteration is over when all have stepped, or when one of them steps again: then the others had no gradient.
    `steps_before_watch` is called before the first iteration: how many were taken before the watch began. `over`
    is called with the number of each iteration in which `measured` was set, after it. Every call takes a constant
    time.
    """

    def __init__(self, members: int, steps_before_watch: Callable[[], int], over: Callable[[int], None]) -> None:
        self.step: int | None = None
        self.measured = False
        self.members = members
        self._steps_before_watch, self._over = steps_before_watch, over
        self._stepped: set[int] = set()

    def begin_step(self, member: int) -> int:
        """Number of the iteration to which the step that `member` is about to take belongs."""
        if self.step is None:
            self.step = self._steps_before_watch()
        if self._stepped:
            if member not in self._stepped:
                return self.step
            self.end()
        return self.step + 1

    def end_step(self, member: int) -> None:
        """`member` has stepped. The number counts as reached as soon as the first has."""
        if self.step is None:
            return
        if self.members == 1:
            self.step += 1
            if self.measured:
                self.end()
            return
        if member in self._stepped:
            self.end()
        if not self._stepped:
            self.step += 1
        self._stepped.add(member)
        if len(self._stepped) == self.members:
            self.end()

    def end(self) -> None:
        """The iteration is over, however many have stepped in it."""
        self._stepped.clear()
        if self.measured:
            self.measured = False
            assert self.step is not None
            self._over(self.step)


class Announced(Protocol):
    """What measures the steps of one parameter."""

    def before_by_hand(self) -> None:
        """The parameter has its gradient and is about to be stepped."""

    def after_by_hand(self) -> None:
        """It has been stepped."""


class BackwardSteps:
    """Notices that parameters are stepped in the backward pass, as gradient release does: one pass is one step.

    It looks at each parameter on which other hooks wait for the gradient, before these, until a step is taken
    outside. `members` makes what measures each parameter's steps, by its identity, and `undo` takes that back after
    a first pass without a step; `over` is called at the end of each pass with one. None of this waits. Where there
    are no such hooks it leaves none: some libraries refuse parameters with any.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        members: Callable[[], Mapping[int, Announced]],
        undo: Callable[[], None],
        over: Callable[[], None],
        caught: Callable[[str, Exception], object],
    ) -> None:
        self.seen = False
        self._parameters = parameters
        self._doubted = self._sure = False
        self._make, self._undo, self._end_of_pass, self._caught = members, undo, over, caught
        self._members: Mapping[int, Announced] = {}
        self._open: list[tuple[Tensor, Announced | None, int]] = []
        self._handles: list[Any] = []

    def look(self) -> None:
        """Wait on the parameters, if others wait there; not while a backward pass goes on, but after it."""
        if self._handles or not any(_hooks_on(parameter) for parameter in self._parameters[:1]):
            return
        if _in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        else:
            self._wait()

    def _wait(self) -> None:
        if not self._handles:
            self._handles = [self._first_of(parameter) for parameter in self._parameters if _hooks_on(parameter)]

    def begins_outside(self) -> None:
        """A step begins that others tell of: if it is none of the backward pass, no others are."""
        self.look() if _in_backward() else self.stop()

    def _first_of(self, parameter: Tensor) -> Any:
        register: Any = parameter.register_post_accumulate_grad_hook
        handle = register(self._gradient_is_there)
        hooks = _hooks_on(parameter)
        # Torch calls them in the order of the plain dictionary below, in which each stays where it was put.
        for key, hook in [(key, hook) for key, hook in hooks.items() if key != handle.id]:
            del hooks[key]
            hooks[key] = hook
        return handle

    def _gradient_is_there(self, parameter: Tensor) -> None:
        try:
            if not self.seen and not self._doubted and len(_hooks_on(parameter)) > 1:
                self.seen, self._members = True, self._make()
            if not self._open:
                torch.autograd.Variable._execution_engine.queue_callback(self._over)
            member = self._members.get(id(parameter))
            self._open.append((parameter, member, parameter._version))
            if member is not None:
                member.before_by_hand()
        except Exception as error:
            self._caught("looking at a parameter in the backward pass", error)

    def _over(self) -> None:
        """The pass is over: what was stepped in it has another version, or its gradient was freed."""
        try:
            passed, self._open = self._open, []
            stepped = [entry for entry in passed if entry[0]._version != entry[2] or entry[0].grad is None]
            for _, member, _ in stepped:
                if member is not None:
                    member.after_by_hand()
            if stepped and self.seen:
                self._sure = True
                self._end_of_pass()
            elif stepped:
                self.seen = self._sure = True
                self._members = self._make()
            elif self.seen and not self._sure:
                # Others only looked, or gather gradients of several passes.
                self.seen, self._doubted, self._members = False, True, {}
                self._undo()
        except Exception as error:
            self._caught("looking at the end of the backward pass", error)

    def stop(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._members = [], {}


def _hooks_on(parameter: Tensor) -> dict[Any, Any]:
    return parameter._post_accumulate_grad_hooks or {}


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def inside_own_step(optimizer: Optimizer) -> bool:
    """Whether the calling hook runs in a step that the optimizer's own step called.

    Read from the stack frames: a counter alone would stay up after a step that raised.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        code = frame.f_code
        if (
            code.co_name == "wrapper"
            and code.co_filename == _HOOKS_FILE
            and frame.f_locals.get("self") is optimizer
        ):
            steps += 1
        frame = frame.f_back
    return steps > 1


def makes_states_only(optimizer: Optimizer) -> bool:
    """Whether the calling hook runs in a step that torch takes by itself, at a rate of 0 and from gradients of 0.

    By it `get_optimizer_state_dict` and `set_optimizer_state_dict` find states: it is none of the training.

    It is taken only by an optimizer without any.
    """
    if optimizer.state:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _LOADS_STATES:
        frame = frame.f_back
    return frame is not None
