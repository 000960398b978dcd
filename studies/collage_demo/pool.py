"""Processes that train, a limited number at a time, each with its own CPU clock; the parent needs no torch.

The demo and the studies both run by it (`tests/demo/test_pool.py`).
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Final, Generic, TypeVar

import click
import msgspec

from collage_demo.worker import ProgressLine, Task

__all__ = ["WorkerPool", "line_of"]

Result = TypeVar("Result", bound=msgspec.Struct)
"""What a process prints as its last line."""
_LOOK_SECONDS: Final = 0.5
"""How often the pool looks whether a signal has come. Python notices one that arrives just before the main thread
goes to wait only when the wait is over, and a wait for a training may take hours."""


def line_of(text: str | bytes, result: type[Result]) -> ProgressLine | Result | None:
    """A process's line, progress or a result of this kind; None if something else printed it."""
    try:
        line: ProgressLine | Result = msgspec.json.decode(text, type=ProgressLine | result)
    except msgspec.DecodeError:
        return None
    return line


class WorkerPool(Generic[Result]):
    """Runs tasks as processes with one thread each; leaving the context ends those that still run.

    Each prints a line of the kind `result` as its last. `err` sends what the trainings print to standard error, so
    that standard output holds data only; with `quiet` it is shown only of one that failed.
    """

    def __init__(
        self,
        result: type[Result],
        progress: Callable[[Any, ProgressLine | Result], None],
        at_once: int = 2,
        *,
        err: bool = False,
        quiet: bool = False,
    ) -> None:
        self._result = result
        self._progress = progress
        self._err, self._quiet = err, quiet
        self._pool = ThreadPoolExecutor(at_once)
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._ended = False

    def __enter__(self) -> WorkerPool[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
            for process in self._processes:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def run(self, tasks: Sequence[Task]) -> list[Result]:
        """Run the tasks and return their last lines, in order.

        Raises:
            click.ClickException: one failed; standard error shows why.
        """
        futures = [self._pool.submit(self._watch, task) for task in tasks]
        running = set(futures)
        while running:
            done, running = wait(running, _LOOK_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
        return [future.result() for future in futures]

    def _watch(self, task: Task) -> Result:
        done: Result | None = None
        said = []
        process = self._start(task)
        assert process.stdout is not None
        with process:
            for text in process.stdout:
                line = line_of(text, self._result)
                if line is None:
                    said.append(text)
                    continue
                self._progress(task, line)
                if isinstance(line, self._result):
                    done = line
        # Print what the agent says at the end of a run in one piece, not between the lines of another training.
        failed = process.returncode != 0 or done is None
        if failed or not self._quiet:
            click.echo("".join(f"    {text}" for text in said), nl=False, err=self._err)
        if failed or done is None:
            raise click.ClickException(
                f"the training {task.name!r} ended with status {process.returncode}; see its last lines above"
            )
        return done

    def _start(self, task: Task) -> subprocess.Popen[str]:
        # Two processes with two threads each on two cores are far slower than with one.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._lock:
            if self._ended:
                raise click.ClickException("interrupted")
            process = subprocess.Popen(
                task.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
            )
            self._processes.append(process)
        return process
