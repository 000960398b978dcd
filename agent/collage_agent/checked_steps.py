"""The first steps of a training as a check: judged after so many, written to a file, and the training is ended.

`collage-monitor cure --check` and `check -- PROGRAM` set the variables; a process without them never imports this.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any, Final

import msgspec
from torch.optim.optimizer import Optimizer

from collage_agent.error_guard import Guard
from collage_agent.handle import Watch
from collage_agent.watching.resume_check import largest_step_count
from collage_monitor.environment import CHECK_REPORT, CHECK_STEPS

__all__ = ["CheckedSteps", "begin_check"]

_RANK: Final = "RANK"


class CheckedSteps(msgspec.Struct, frozen=True):
    """The outcome of a launch's first steps on one rank: their number, the observed strategy, the verdict."""

    steps: int
    last_step: int
    strategy: str
    health: str
    text: str
    rank: int = 0


class _Check:
    """The watches of this process. All of them must reach the last step; one that has taken twice as many steps no
    longer waits. Rank 0 writes `report`, rank 1 the same with ".1" before its suffix, and so on."""

    def __init__(self, steps: int, report: Path) -> None:
        rank = os.environ.get(_RANK, "0")
        self._rank = int(rank) if rank.isdecimal() else 0
        self._wanted = steps
        self._report = report.with_suffix(f".{self._rank}{report.suffix}") if self._rank else report
        self._taken: dict[int, int] = {}
        self._begun: dict[int, int | None] = {}
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
            # torch's set_optimizer_state_dict takes a step with a rate of 0 first, so that there are states.
            stepping[-1].register_load_state_dict_post_hook(lambda optimizer: self._loaded(key, optimizer))

    def _loaded(self, key: int, optimizer: Optimizer) -> None:
        self._taken[key] = 0
        self._begun[key] = largest_step_count(optimizer)

    def _stepped(self, key: int) -> None:
        self._taken[key] += 1
        if min(self._taken.values()) >= self._wanted or self._taken[key] >= 2 * self._wanted:
            self._write()
            raise SystemExit(0)

    def _write(self) -> None:
        """Write the verdict of each watch; never raises into the training."""
        if self._is_written:
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
        strategy, taken, begun = watch.info.observed_strategy, self._taken[key], self._begun.get(key)
        last = watch.step or 0 if begun is None else begun + taken
        return CheckedSteps(taken, last, strategy, judged.health, judged.text, self._rank)


_check: _Check | None = None


def begin_check(watch: Watch) -> None:
    """Count the steps of a watch that has just begun; after as many as the variables say the process ends."""
    global _check
    if _check is None:
        values: Any = os.environ
        _check = _Check(int(values[CHECK_STEPS]), Path(values[CHECK_REPORT]))
    _check.add(watch)
