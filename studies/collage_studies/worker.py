"""A training of the demo in a process of its own, `python -m collage_studies.worker JOB`. It prints JSON lines."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from collage_studies.recipe import Plan, Recipe

__all__ = ["FinalLine", "Job", "ProgressLine"]


@dataclass(frozen=True)
class Job:
    """What a worker trains, and where it reports to."""

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

    @property
    def command(self) -> list[str]:
        """What trains it."""
        return [sys.executable, "-m", "collage_studies.worker", msgspec.json.encode(self, enc_hook=str).decode()]


class ProgressLine(msgspec.Struct, frozen=True, tag="step"):
    """A line of progress."""

    step: int
    loss: float
    validation_loss: float


class FinalLine(msgspec.Struct, frozen=True, tag="done"):
    """The last line: the fields of `training.Outcome`."""

    run_id: str
    steps: int
    tokens_per_cpu_second: float
    reports_sent: int
    reports_dropped: int


def main(argument: str) -> None:
    """Train the job that `argument` holds as JSON."""
    import torch

    from collage_studies.corpus import standard_library
    from collage_studies.training import train

    torch.set_num_threads(1)
    job = msgspec.json.decode(argument, type=Job, dec_hook=lambda kind, value: kind(value))
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
    _print(msgspec.convert(outcome, FinalLine, from_attributes=True))


def _print(line: ProgressLine | FinalLine) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
