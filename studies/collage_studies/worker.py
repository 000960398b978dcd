"""One training of the demo, or one trial of a study, in a process of its own. It prints lines of JSON.

`python -m collage_studies.worker TASK`
"""

from __future__ import annotations

import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import msgspec

from collage_studies.recipe import Plan, Recipe
from collage_studies.study import RecordLine, ReportTarget, Trial

__all__ = ["DemoTask", "FinalLine", "ProgressLine", "TrialTask"]


class _Task(msgspec.Struct, frozen=True, tag=True):
    @property
    def command(self) -> list[str]:
        """What runs it."""
        return [sys.executable, "-m", "collage_studies.worker", msgspec.json.encode(self, enc_hook=str).decode()]


class DemoTask(_Task, frozen=True, tag=True):
    """What a worker trains for the demo, and where it reports to."""

    plan: Plan
    recipe: Recipe
    group: str
    server_url: str
    folder: Path
    loses_residuals: bool = False

    @property
    def name(self) -> str:
        """The run's name."""
        return f"{self.plan.name}{', resumed' if self.loses_residuals else ''}"


class TrialTask(_Task, frozen=True, tag=True):
    """A trial of a study by name, and where it reports to."""

    study: str
    trial: Trial
    reporting: ReportTarget

    @property
    def name(self) -> str:
        """The trial's name."""
        return self.trial.name


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


def main(argument: str) -> None:
    """Run the task that `argument` holds as JSON, on one thread."""
    import torch

    torch.set_num_threads(1)
    task: DemoTask | TrialTask = msgspec.json.decode(
        argument, type=DemoTask | TrialTask, dec_hook=lambda kind, it: kind(it)
    )
    _print(_run_job(task) if isinstance(task, DemoTask) else _run_trial(task))


def _run_job(job: DemoTask) -> FinalLine:
    from collage_studies.corpus import standard_library
    from collage_studies.training import train

    outcome = train(
        job.plan,
        job.recipe,
        standard_library(),
        lambda *values: _print(ProgressLine(*values)),
        name=job.name,
        group=job.group,
        server_url=job.server_url,
        folder=job.folder,
        loses_residuals=job.loses_residuals,
    )
    return msgspec.convert(outcome, FinalLine, from_attributes=True)


def _run_trial(task: TrialTask) -> RecordLine:
    from collage_studies.catalogue import study_named

    started = time.process_time()
    record = study_named(task.study).run(task.trial, task.reporting)
    versions = {name: version(name) for name in ("collage-monitor", "torch")} | {
        "Python": platform.python_version()
    }
    seconds = round(time.process_time() - started, 2)
    return RecordLine(msgspec.structs.replace(record, versions=versions, cpu_seconds=seconds))


def _print(line: ProgressLine | FinalLine | RecordLine) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
