"""One trial of a study in a process of its own. It prints its record.

`python -m collage_studies.worker TASK`
"""

from __future__ import annotations

import platform
import sys
import time
from importlib.metadata import version

import msgspec
from collage_demo.worker import Task, print_line

from collage_studies.study import RecordLine, ReportTarget, Trial

__all__ = ["TrialTask"]


class TrialTask(Task, frozen=True):
    """A trial of a study by name, and where it reports to."""

    study: str
    trial: Trial
    reporting: ReportTarget

    @property
    def module(self) -> str:
        """The module that a worker process runs: this one."""
        return "collage_studies.worker"

    @property
    def name(self) -> str:
        """The trial's name."""
        return self.trial.name


def main(argument: str) -> None:
    """Run the trial that `argument` holds as JSON, on one thread."""
    import torch

    from collage_studies.catalogue import study_named

    torch.set_num_threads(1)
    task = msgspec.json.decode(argument, type=TrialTask, dec_hook=lambda kind, it: kind(it))
    started = time.process_time()
    record = study_named(task.study).run(task.trial, task.reporting)
    versions = {name: version(name) for name in ("collage-monitor", "torch")} | {
        "Python": platform.python_version(),
        "products": "in fp32",
    }
    seconds = round(time.process_time() - started, 2)
    print_line(RecordLine(msgspec.structs.replace(record, versions=versions, cpu_seconds=seconds)))


if __name__ == "__main__":
    main(sys.argv[1])
