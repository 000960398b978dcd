"""Run several trainings, a limited number at a time, and hand on their progress as it comes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import click
import msgspec

from collage_studies.worker import Done, Job, Step, line_of

__all__ = ["Team"]


class Team:
    """Runs jobs as processes with one thread each; leaving the context ends those that still run.

    `err` sends what the trainings print to standard error, so that standard output holds data only.
    """

    def __init__(
        self, progress: Callable[[Job, Step | Done], None], at_once: int = 2, *, err: bool = False
    ) -> None:
        self._progress = progress
        self._err = err
        self._pool = ThreadPoolExecutor(at_once)
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._ended = False

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
            for process in self._processes:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Run the jobs and return their results, in order.

        Raises:
            click.ClickException: a training failed; standard error shows why.
        """
        return list(self._pool.map(self._train, jobs))

    def _train(self, job: Job) -> Done:
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
                if isinstance(line, Done):
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
