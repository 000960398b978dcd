"""One training in a process of its own: `python -m collage_studies.worker JOB`, lines of JSON on standard output.

The parent keeps no torch in memory, and every training has its CPU clock to itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from collage_studies.recipe import Plan, Recipe

__all__ = ["Done", "Job", "Step", "line_of"]


@dataclass(frozen=True)
class Job:
    """What a worker is asked to do."""

    plan: Plan
    recipe: Recipe
    group: str
    server_url: str
    folder: Path


class Step(msgspec.Struct, frozen=True, tag="step"):
    """A line while the training goes on."""

    step: int
    loss: float
    validation_loss: float


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The last line: what only the training process knows (`training.Outcome`)."""

    run_id: str
    steps: int
    tokens_per_cpu_second: float
    reports_sent: int
    reports_dropped: int


def line_of(text: str | bytes) -> Step | Done | None:
    """A worker's line, or None for a line that someone else printed."""
    try:
        return msgspec.json.decode(text, type=Step | Done)
    except msgspec.DecodeError:
        return None


def main(argument: str) -> None:
    """Train the job that `argument` describes in JSON."""
    import torch

    from collage_studies.corpus import standard_library
    from collage_studies.training import train

    torch.set_num_threads(1)
    job = msgspec.json.decode(argument, type=Job, dec_hook=lambda kind, value: kind(value))
    outcome = train(
        job.plan,
        job.recipe,
        standard_library(),
        lambda *values: _print(Step(*values)),
        group=job.group,
        server_url=job.server_url,
        folder=job.folder,
    )
    _print(msgspec.convert(outcome, Done, from_attributes=True))


def _print(line: Step | Done) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
