"""The first steps of a training as a check: judged after so many, written to a file, and the training is ended.

`collage-monitor cure --check` and `preflight` set the variables; a process without them never imports this.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any, Final

import msgspec
from torch.optim.optimizer import Optimizer

from collage_agent.guard import Guard
from collage_agent.handle import Watch
from collage_monitor.environment import CHECK_REPORT, CHECK_STEPS

__all__ = ["CheckedSteps", "begin_check"]

_RANK: Final = "RANK"


class CheckedSteps(msgspec.Struct, frozen=True):
    """What the first steps of a launch showed: how many, the observed strategy, and the verdict."""

    steps: int
    last_step: int
    strategy: str
    health: str
    text: str


class _Check:
    """The watches of this process. All of them must reach the last step; one that has taken twice as many steps no
    longer waits."""

    def __init__(self, steps: int, report: Path) -> None:
        self._wanted, self._report = steps, report
        self._taken: dict[int, int] = {}
        self._watches: dict[int, Watch] = {}
        self._guard = Guard()
        self._is_written = False
        atexit.register(self._write)

    def add(self, watch: Watch) -> None:
        """Count the watch's steps from now on."""
        stepping = [optimizer for optimizer in watch.optimizers if isinstance(optimizer, Optimizer)]
        if stepping:
            key = len(self._watches)
            self._watches[key], self._taken[key] = watch, 0
            # After the hooks of the watch: a step is counted when it is measured.
            stepping[-1].register_step_post_hook(lambda *_: self._stepped(key))

    def _stepped(self, key: int) -> None:
        self._taken[key] += 1
        if min(self._taken.values()) >= self._wanted or self._taken[key] >= 2 * self._wanted:
            self._write()
            raise SystemExit(0)

    def _write(self) -> None:
        """Write the verdict of the watch that is worst off, of rank 0 alone; never raises into the training."""
        if self._is_written or os.environ.get(_RANK, "0") != "0":
            return
        self._is_written = True
        try:
            found = [self._checked(key) for key, taken in self._taken.items() if taken]
            if found:
                self._report.write_bytes(msgspec.json.encode(found))
        except Exception as error:
            self._guard.caught("writing what the check found", error)

    def _checked(self, key: int) -> CheckedSteps:
        watch = self._watches[key]
        judged = watch.judgement()
        strategy = watch.info.observed_strategy
        return CheckedSteps(self._taken[key], watch.step or 0, strategy, judged.health, judged.text)


_check: _Check | None = None


def begin_check(watch: Watch) -> None:
    """Count the steps of a watch that has just begun; after as many as the variables say the process ends."""
    global _check
    if _check is None:
        values: Any = os.environ
        _check = _Check(int(values[CHECK_STEPS]), Path(values[CHECK_REPORT]))
    _check.add(watch)
