"""Trainings in processes of their own, a limited number at a time: `python -m collage_studies.worker JOB` is one.

It prints lines of JSON. So the parent needs no torch in memory, and each training has its own CPU clock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec

from collage_studies.recipe import Plan, Recipe

__all__ = ["FinalLine", "Job", "ProgressLine", "WorkerPool", "line_of"]

_LOOK_SECONDS: Final = 0.5
"""How often the pool looks whether a signal has come. Python notices one that arrives just before the main thread
goes to wait only when the wait is over, and a wait for a training may take hours."""


@dataclass(frozen=True)
class Job:
    """What a worker trains, and where it reports to."""

    plan: Plan
    recipe: Recipe
    group: str
    server_url: str
    folder: Path


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


def line_of(text: str | bytes) -> ProgressLine | FinalLine | None:
    """A worker's line, or None if something else printed it."""
    try:
        return msgspec.json.decode(text, type=ProgressLine | FinalLine)
    except msgspec.DecodeError:
        return None


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
        group=job.group,
        server_url=job.server_url,
        folder=job.folder,
    )
    _print(msgspec.convert(outcome, FinalLine, from_attributes=True))


def _print(line: ProgressLine | FinalLine) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


class WorkerPool:
    """Runs jobs as processes with one thread each; leaving the context ends those that still run.

    `err` sends what the trainings print to standard error, so that standard output holds data only.
    """

    def __init__(
        self, progress: Callable[[Job, ProgressLine | FinalLine], None], at_once: int = 2, *, err: bool = False
    ) -> None:
        self._progress = progress
        self._err = err
        self._pool = ThreadPoolExecutor(at_once)
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._ended = False

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
            for process in self._processes:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def run(self, jobs: Sequence[Job]) -> list[FinalLine]:
        """Run the jobs and return their results, in order.

        Raises:
            click.ClickException: a training failed; standard error shows why.
        """
        futures = [self._pool.submit(self._train, job) for job in jobs]
        running = set(futures)
        while running:
            done, running = wait(running, _LOOK_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
        return [future.result() for future in futures]

    def _train(self, job: Job) -> FinalLine:
        done = None
        said = []
        process = self._start(job)
        assert process.stdout is not None
        with process:
            for text in process.stdout:
                line = line_of(text)
                if line is None:
                    said.append(text)
                    continue
                self._progress(job, line)
                if isinstance(line, FinalLine):
                    done = line
        # Print what the agent says at the end of a run in one piece, not between the lines of another training.
        click.echo("".join(f"    {text}" for text in said), nl=False, err=self._err)
        if process.returncode != 0 or done is None:
            raise click.ClickException(
                f"the training {job.plan.name!r} ended with status {process.returncode}; see its last lines above"
            )
        return done

    def _start(self, job: Job) -> subprocess.Popen[str]:
        argument = msgspec.json.encode(job, enc_hook=str).decode()
        # Two processes with two threads each on two cores are far slower than with one.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._lock:
            if self._ended:
                raise click.ClickException("interrupted")
            process = subprocess.Popen(
                [sys.executable, "-m", "collage_studies.worker", argument],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
            )
            self._processes.append(process)
        return process


if __name__ == "__main__":
    main(sys.argv[1])
