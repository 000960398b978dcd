"""Iterations of a training loop: which steps belong together, of several optimizers or inside one another.

`hooks.py` counts by it. A number that an iteration got is in reports and logs: how they are numbered is held by
`tests/loops/test_several.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Final

from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

__all__ = ["Iterations", "inside_own_step", "makes_states_only"]

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
        self._members = members
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
        if self._members == 1:
            self.step += 1
            if self.measured:
                self.end()
            return
        if member in self._stepped:
            self.end()
        if not self._stepped:
            self.step += 1
        self._stepped.add(member)
        if len(self._stepped) == self._members:
            self.end()

    def end(self) -> None:
        """The iteration is over, however many have stepped in it."""
        self._stepped.clear()
        if self.measured:
            self.measured = False
            assert self.step is not None
            self._over(self.step)


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
