"""The process's current run, and the functions through which a training loop speaks to it."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from collage_agent.launch.identity import make_identity
from collage_agent.launch.termination import TerminationHandler
from collage_agent.measurement import Measurement
from collage_agent.options import DEFAULTS, Exclude
from collage_agent.run import Run
from collage_agent.settings import read_settings, watch_defaults
from collage_agent.transport import Transport
from collage_agent.watch import Optimizers, Watch
from collage_agent.watch import watch as attach_watch

__all__ = ["current_run", "finish", "init", "log", "watch"]


class _WatchReporter:
    """Takes what one watch reports to the run under which it was made, or to the next one if there was none."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.index = 0
        self.first_step: int | None = None

    def belongs_to(self, run: Run, handle: Watch) -> None:
        """From now on report to `run`; a watch that has begun before starts there with its next step."""
        self.run = run
        self.index = run.attach(handle)
        if self.first_step is not None:
            run.started((handle.step or 0) + 1)

    def worker_cpu_seconds(self) -> float:
        """CPU that delivering has used."""
        return self.run.worker_cpu_seconds() if self.run else 0.0

    def started(self, first_step: int) -> None:
        """Pass on the first step."""
        self.first_step = first_step
        if self.run:
            self.run.started(first_step)

    def measured(self, measurement: Measurement) -> None:
        """Pass on a measurement."""
        if self.run:
            self.run.measured(measurement, self.index)


class _Session:
    """What this process has: at most one unfinished run, and watches that wait for one."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.runs_begun = 0
        self.waiting: list[tuple[weakref.ref[Watch], _WatchReporter]] = []
        self.handlers_registered = False
        self.termination = TerminationHandler(self.flush_before_death)

    def flush_before_death(self, seconds: float) -> None:
        """Send or keep what is queued; the run stays open for a resumed attempt."""
        if self.run is not None:
            self.run.stop(seconds)

    def begin(self, run: Run) -> None:
        self.run = run
        self.runs_begun += 1
        for reference, reporter in self.waiting:
            if (handle := reference()) is not None:
                reporter.belongs_to(run, handle)
        self.waiting.clear()

    def register_handlers(self) -> None:
        if self.handlers_registered:
            return
        self.handlers_registered = True
        atexit.register(_at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork_in_child)


_SESSION = _Session()


def init(
    project: str | None = None,
    name: str | None = None,
    *,
    run_id: str | None = None,
    resume: str = "allow",
    group: str | None = None,
    tags: Iterable[str] = (),
    notes: str = "",
    seed: int | None = None,
    config: Any = None,
    server_url: str | None = None,
    token: str | None = None,
    mode: str = "online",
    dir: str | Path | None = None,
    transport: Transport | None = None,
) -> Run:
    """Begin a run; `with init(...) as run:` also ends it. An unfinished earlier run of this process is finished.

    Returns at once: the server is spoken to in the background, and while it is away reports are kept on disk.
    Arguments left out come from the environment: COLLAGE_PROJECT, RUN_NAME, RUN_ID, RUN_GROUP, TAGS, SERVER_URL,
    TOKEN, MODE, DIR. `resume` says what to do when the server knows `run_id`: "allow", "must" or "never"; it is
    asked in the background, and its refusal ends the sending with one log line. `mode` "offline" keeps everything
    on disk for the next online run in the same folder; "disabled" reports nothing (watches still measure).

    Raises:
        ValueError: an argument that cannot be used; the message names it and says what to pass.
    """
    settings = read_settings(
        project=project,
        name=name,
        run_id=run_id,
        resume=resume,
        group=group,
        tags=tags,
        notes=notes,
        seed=seed,
        config=config,
        server_url=server_url,
        token=token,
        mode=mode,
        folder=dir,
    )
    if _SESSION.run is not None:
        _SESSION.run.finish()
    _SESSION.register_handlers()
    if settings.mode != "disabled":
        _SESSION.termination.install()
    run = Run(settings, make_identity(settings.run_id, nth_run=_SESSION.runs_begun), transport)
    _SESSION.begin(run)
    return run


def watch(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    every: int = 10,
    sample: int | Literal["all"] = 4096,
    layers: str | Sequence[str] | Exclude | None = None,
    strategy: str | None = None,
    oracle: bool = False,
    windows: Sequence[int] = (),
    budget: float | None = 0.01,
    first_step: int | None = None,
) -> Watch:
    """Measure what becomes of the optimizer's updates, every `every` steps; report it to the current run, if any.

    `optimizer` is one, or several over different parameters (a sequence, or the values of a mapping, such as one
    for each parameter that steps in the backward pass): then steps are iterations, and one report holds them all.
    `sample` elements of each tensor are looked at, "all" for whole tensors. `layers` are regular expressions for
    the names to watch, or Exclude(...). `strategy` is the label that you believe in; the observed one stands beside
    it. `oracle` keeps an fp64 optimizer beside yours on a small sample. `budget` bounds the agent's CPU over the
    rest of the step's. `first_step` is the number of the next optimizer step. COLLAGE_EVERY, COLLAGE_SAMPLE and
    COLLAGE_BUDGET replace the defaults.

    Raises:
        ValueError, TypeError: an argument that cannot be used.
    """
    defaults = watch_defaults()
    run = _SESSION.run
    reporter = _WatchReporter()
    handle = attach_watch(
        model,
        optimizer,
        every=defaults.every if every == DEFAULTS["every"] else every,
        sample=defaults.sample if sample == DEFAULTS["sample"] else sample,
        layers=layers,
        strategy=strategy,
        oracle=oracle,
        windows=tuple(windows),
        budget=defaults.budget if budget == DEFAULTS["budget"] else budget,
        first_step=first_step,
        reporter=reporter,
        seed=run.settings.seed or 0 if run is not None else 0,
        worker_cpu_seconds=reporter.worker_cpu_seconds,
    )
    if run is not None:
        reporter.belongs_to(run, handle)
    else:
        _SESSION.waiting.append((weakref.ref(handle), reporter))
    return handle


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Record scalars, such as `loss`, `validation_loss`, `tokens` (since the start of the run, over all ranks).

    Values are numbers or one-element tensors, which are cloned where they are and read later: nothing here waits
    for a device. `step` None: the watched optimizer's last completed step; without a watch, one more than before.
    Without a run nothing happens.
    """
    if _SESSION.run is not None:
        _SESSION.run.log(values, step)


def finish() -> None:
    """End the current run: send what is left within a deadline, print the verdict and the run's address."""
    if _SESSION.run is not None:
        _SESSION.run.finish()
        _SESSION.run = None
        _SESSION.termination.uninstall()


def current_run() -> Run | None:
    """The run that `init` began and nobody has finished; None without one."""
    return _SESSION.run


def _at_exit() -> None:
    if _SESSION.run is not None:
        failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        interactive = hasattr(sys, "ps1") or "IPython" in sys.modules
        _SESSION.run.finish("failed" if failed and not interactive else "finished")


def _after_fork_in_child() -> None:
    # A child that somebody ends dies at once, as it would without the agent.
    _SESSION.termination.uninstall()
    if _SESSION.run is not None:
        _SESSION.run.begin_in_child_process()
