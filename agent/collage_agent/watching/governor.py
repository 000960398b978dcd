"""The governor keeps the agent's CPU within its budget: it measures less often, then on a smaller sample.

The hooks ask it before each step. A budget of None switches it off; what it decides never changes a weight or the
meaning of a number, only how often there is one (`tests/agent/watching/test_governor.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

import torch

__all__ = ["Governor"]

_STEPS_BEFORE_JUDGING: Final = 4
_WARM_UP_STEPS: Final = 2
_STEPS_BETWEEN_MORE: Final = 100
_MAXIMUM_DOUBLINGS: Final = 6
_SMALLEST_SAMPLE: Final = 1024
_ROOM_TO_SPARE: Final = 0.25


class Governor:
    """Counts the CPU of the hooks and of the worker against the rest of the process.

    `interval` = every · 2^doublings: steps divisible by it are measured, and the first one of a launch is, too:
    only at that step can one see what a checkpoint did not restore. With budget None nothing is changed. `cycle`:
    the period of the cost in steps, the least time to judge it by; doublings stretch it.
    """

    def __init__(
        self,
        every: int,
        sample: int | Literal["all"],
        budget: float | None,
        worker_cpu_seconds: Callable[[], float] | None = None,
        *,
        cycle: int = 0,
    ) -> None:
        self.doublings = 0
        self.sample = sample
        self._every = every
        self._budget = budget
        self._judged_after = max(_STEPS_BEFORE_JUDGING, -(-cycle // every))
        self._worker_cpu_seconds = worker_cpu_seconds
        self.wall_seconds = 0.0
        self._hook_seconds = 0.0
        self._attached_at = time.process_time()
        self._measured = 0
        self._launched = False
        self._first_step: int | None = None
        self._last_judged = (0, 0.0, self._attached_at)

    @property
    def interval(self) -> int:
        """Steps from one measured step to the next."""
        return self._every << self.doublings

    def measure_next_step(self) -> None:
        """A launch begins, or states were loaded: the next step is measured."""
        self._launched = True

    def is_due(self, step: int) -> bool:
        """Whether the step about to be taken is measured; several optimizers ask for the same one."""
        if self._launched:
            self._launched, self._first_step = False, step
        return step % self.interval == 0 or step == self._first_step

    def counterfactuals_due(self, step: int) -> bool:
        """Whether this measured step measures counterfactuals: about one step in 100, fewer with doublings."""
        return step % (self._every * -(-_STEPS_BETWEEN_MORE // self._every) << self.doublings) == 0

    @property
    def agent_cpu_seconds(self) -> float:
        """CPU that the agent has used since attach: its hooks and its worker thread."""
        worker = self._worker_cpu_seconds
        return self._hook_seconds + (0.0 if worker is None else worker())

    @property
    def overhead_ratio(self) -> float:
        """CPU of the agent over the rest of the process's CPU, since attach."""
        return _over_rest(self.agent_cpu_seconds, time.process_time() - self._attached_at)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Count the CPU time spent inside as the agent's, and the wall time as `wall_seconds`.

        Torch's own threads, which work or wait for work meanwhile, are included: the CPU that the process used,
        bounded by the number of threads.
        """
        cpu, process, wall = time.thread_time(), time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            of_this_thread = time.thread_time() - cpu
            self._hook_seconds += min(time.process_time() - process, of_this_thread * torch.get_num_threads())
            self.wall_seconds += time.perf_counter() - wall

    def adjust(self) -> bool:
        """Fit interval and sample to the cost, after a measured step; True if `sample` has just become smaller."""
        self._measured += 1
        count, agent_then, process_then = self._last_judged
        agent, process = self.agent_cpu_seconds, time.process_time()
        if self._measured == _WARM_UP_STEPS:
            self._last_judged = (self._measured, agent, process)
        if self._budget is None or self._measured < count + self._judged_after:
            return False
        self._last_judged = (self._measured, agent, process)
        ratio = _over_rest(agent - agent_then, process - process_then)
        if ratio > self._budget:
            return self._do_less()
        if ratio < self._budget * _ROOM_TO_SPARE and self.doublings:
            self.doublings -= 1
        return False

    def _do_less(self) -> bool:
        if self.doublings < _MAXIMUM_DOUBLINGS:
            self.doublings += 1
            return False
        if self.sample == "all" or self.sample <= _SMALLEST_SAMPLE:
            return False
        self.sample = max(self.sample // 2, _SMALLEST_SAMPLE)
        return True


def _over_rest(agent: float, process: float) -> float:
    rest = process - agent
    return agent / rest if rest > 0 else 0.0
