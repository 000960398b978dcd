"""One trial in a process of its own, `python -m collage_studies.trial_process TASK`. It prints its record last."""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version

import msgspec

from collage_studies.study import RecordLine, Reporting, Trial

__all__ = ["TrialTask"]


@dataclass(frozen=True)
class TrialTask:
    """A trial of a study by name, and where it reports to."""

    study: str
    trial: Trial
    reporting: Reporting

    @property
    def name(self) -> str:
        """The trial's name."""
        return self.trial.name

    @property
    def command(self) -> list[str]:
        """What runs it."""
        argument = msgspec.json.encode(self, enc_hook=str).decode()
        return [sys.executable, "-m", "collage_studies.trial_process", argument]


def main(argument: str) -> None:
    """Run the trial that `argument` holds as JSON."""
    import torch

    from collage_studies.catalogue import study_named

    torch.set_num_threads(1)
    task = msgspec.json.decode(argument, type=TrialTask, dec_hook=lambda kind, value: kind(value))
    started = time.process_time()
    record = study_named(task.study).run(task.trial, task.reporting)
    record = msgspec.structs.replace(
        record, versions=_versions(), cpu_seconds=round(time.process_time() - started, 2)
    )
    sys.stdout.write(msgspec.json.encode(RecordLine(record)).decode() + "\n")


def _versions() -> dict[str, str]:
    return {
        "collage-monitor": version("collage-monitor"),
        "torch": version("torch"),
        "Python": platform.python_version(),
    }


if __name__ == "__main__":
    main(sys.argv[1])
