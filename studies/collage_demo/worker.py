"""One training of the demo in a process of its own. It prints lines of JSON.

`python -m collage_demo.worker TASK`

`pool.py` starts it and reads its lines; both are one version, so their form is free.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from collage_demo.recipe import Plan, Recipe

__all__ = ["DemoTask", "FinalLine", "ProgressLine", "Task", "print_line"]


class Task(msgspec.Struct, frozen=True):
    """The task of a process, passed as JSON in its only argument."""

    @property
    def module(self) -> str:
        """Run as a program, it does the task."""
        raise AssertionError("each kind of task names its module")

    @property
    def name(self) -> str:
        """Names it in messages."""
        raise AssertionError("each kind of task has a name")

    @property
    def command(self) -> list[str]:
        """The program and its arguments."""
        return [sys.executable, "-m", self.module, msgspec.json.encode(self, enc_hook=str).decode()]


class DemoTask(Task, frozen=True):
    """A worker's training for the demo, and the address of its reports."""

    plan: Plan
    recipe: Recipe
    group: str
    server_url: str
    folder: Path
    loses_residuals: bool = False

    @property
    def module(self) -> str:
        """The module that a worker process runs: this one."""
        return "collage_demo.worker"

    @property
    def name(self) -> str:
        """The run's name."""
        return f"{self.plan.name}{', resumed' if self.loses_residuals else ''}"


class ProgressLine(msgspec.Struct, frozen=True, tag="step"):
    """A line of progress."""

    step: int
    loss: float
    validation_loss: float


class FinalLine(msgspec.Struct, frozen=True, tag="done"):
    """The last line of a training of the demo: the fields of `training.Outcome`."""

    run_id: str
    steps: int
    tokens_per_cpu_second: float
    reports_sent: int
    reports_dropped: int


def print_line(line: msgspec.Struct) -> None:
    """Hand a line to the process that started this one."""
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def main(argument: str) -> None:
    """Train the task that `argument` holds as JSON, on one thread."""
    import torch

    from collage_demo.corpus import standard_library
    from collage_demo.training import train

    torch.set_num_threads(1)
    task = msgspec.json.decode(argument, type=DemoTask, dec_hook=lambda kind, it: kind(it))
    outcome = train(
        task.plan,
        task.recipe,
        standard_library(),
        lambda *values: print_line(ProgressLine(*values)),
        name=task.name,
        group=task.group,
        server_url=task.server_url,
        folder=task.folder,
        loses_residuals=task.loses_residuals,
    )
    print_line(msgspec.convert(outcome, FinalLine, from_attributes=True))


if __name__ == "__main__":
    main(sys.argv[1])
