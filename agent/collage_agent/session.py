"""The process's current run, and the functions through which a training loop speaks to it.

It holds the run, the watches and what belongs to them between calls. The functions are the user's interface: names,
arguments and defaults are fixed by the API pages (`tests/agent_delivery/test_session.py`).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import nn

from collage_agent.handle import Optimizers, Watch
from collage_agent.handle import watch as attach_watch
from collage_agent.launch.identity import make_identity
from collage_agent.launch.termination import ExitStatus, TerminationHandler, takes_exit_hooks
from collage_agent.measurement import Measurement
from collage_agent.run import Run
from collage_agent.run_settings import Mode, Resume, read_settings, watch_defaults
from collage_agent.transport import Transport
from collage_agent.transport.alert_listener import AlertCallback, AlertListener
from collage_agent.watch_options import WatchArguments, checks_names, shows_options
from collage_agent.watching.average_finder import AverageFinder
from collage_agent.watching.average_watch import AverageWatch
from collage_agent.watching.tensor_watch import watch_tensor
from collage_monitor.environment import CHECK_STEPS

__all__ = [
    "AverageWatch",
    "Watch",
    "current_run",
    "finish",
    "init",
    "log",
    "on_alert",
    "watch",
    "watch_average",
    "watch_tensor",
]

_LOG = logging.getLogger("collage_agent")


class _WatchRecord:
    """A watch with its targets: names and shapes of its layers, their tensors and optimizers.

    Identities hold for as long as the watch is not removed: until then it keeps the optimizers alive.
    """

    def __init__(self, handle: Watch, model: nn.Module) -> None:
        self._handle = weakref.ref(handle)
        optimizers = handle.optimizers
        groups = [group for one in optimizers for group in one.param_groups]
        self._optimizers = {id(one) for one in optimizers}
        self._kinds = {type(one) for one in optimizers}
        self._parameters = {id(entry) for group in groups for entry in group["params"]}
        named = [(name, entry) for name, entry in model.named_parameters() if handle.options.selects(name)]
        own = [(name, entry) for name, entry in named if id(entry) in self._parameters]
        self._layers = {(name, tuple(entry.shape)) for name, entry in own or named}

    @property
    def handle(self) -> Watch | None:
        """The watch, as long as something references it, such as its run."""
        return self._handle()

    def succeeds(self, other: _WatchRecord) -> bool:
        """Whether the other watch is over, and this one watches its layers.

        Over: removed, or its parameters have another optimizer now. A model with the same layers beside one that is
        still watched is another model.
        """
        if not self._layers & other._layers:
            return False
        if other.handle is None or other.handle.removed:
            return True
        return bool(self._parameters & other._parameters) and not self._optimizers & other._optimizers

    def resembles(self, other: _WatchRecord) -> bool:
        """Whether the other, running watch may belong to the same training before it was rebuilt."""
        return (
            self._layers == other._layers
            and self._kinds == other._kinds
            and not self._optimizers & other._optimizers
        )


class _WatchReporter:
    """Passes one watch's reports to the run under which it was made, or to the next run if there was none.

    `possible_predecessor` is a watch that resembles this one, and its last step when this one was made.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self.index = 0
        self.measured: Callable[[Measurement], None] = _keep_nothing
        """Once there is a run, its own `measured`: the one door between measuring and delivering."""
        self.first_step: int | None = None
        self.possible_predecessor: tuple[Watch, int] | None = None

    def report_to(self, run: Run, handle: Watch, predecessor: _WatchRecord | None) -> None:
        """From now on report to `run`; a watch that has begun before starts there with its next step."""
        self.run = run
        self._place(run.attach(handle, predecessor.handle if predecessor is not None else None), run)
        if self.first_step is not None:
            run.started(self.first_step if handle.step is None else handle.step + 1, self.index)

    def worker_cpu_seconds(self) -> float:
        """CPU that delivering has used."""
        return self.run.worker_cpu_seconds() if self.run else 0.0

    def losses_not_finite(self) -> dict[str, int]:
        """See `Run.losses_not_finite`; nothing without a run."""
        return self.run.losses_not_finite() if self.run else {}

    def last_step_shown(self) -> int | None:
        """See `Run.last_step_shown`; 0 without a run."""
        return self.run.last_step_shown(self.index) if self.run else 0

    def started(self, first_step: int) -> None:
        """Pass on the first step."""
        self.first_step = first_step
        if self.run:
            self._take_over(self.run, first_step)
            self.run.started(first_step, self.index)

    def _take_over(self, run: Run, first_step: int) -> None:
        """End the watch that resembles this one if this one continues from a checkpoint of the same training.

        So it is if the other has taken no step since, and this one's first follows a step that the other has taken.
        A model that begins with step 1 is another one.
        """
        candidate, self.possible_predecessor = self.possible_predecessor, None
        if candidate is not None:
            watch, step = candidate
            if 1 < first_step <= step + 1 and watch.step == step:
                watch.remove()
                self._place(run.take_over(self.index, watch), run)

    def _place(self, index: int, run: Run) -> None:
        self.index = index
        self.measured = partial(run.measured, watch_index=index)


def _keep_nothing(measurement: Measurement) -> None:
    """Without a run nothing is reported."""


class _Session:
    """The state of this process: at most one unfinished run, and watches that wait for one."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.runs_begun = 0
        self.waiting: list[tuple[_WatchRecord, _WatchReporter]] = []
        self.records: list[_WatchRecord] = []
        """Under the current run, oldest first, without those from which others went on."""
        self.handlers_registered = False
        self.told_of_watches: Run | None = None
        self.told_of_log = False
        self.termination = TerminationHandler(self.flush_before_death)
        self.exit_status = ExitStatus()
        self.alert_callbacks: list[AlertCallback] = []
        self.alert_seconds = 30.0
        self.listener: AlertListener | None = None
        self.averages = AverageFinder(self.seed)

    def seed(self) -> int:
        """The seed of the samples of the current run's watches."""
        return self.run.settings.seed or 0 if self.run is not None else 0

    def flush_before_death(self, seconds: float) -> None:
        """Send or keep what is queued; the run stays open for a resumed attempt."""
        if self.run is not None:
            self.run.stop(seconds)

    def begin(self, run: Run) -> None:
        self.end_watches()
        self.run = run
        self.runs_begun += 1
        for record, reporter in self.waiting:
            self.join(run, record, reporter)
        self.waiting.clear()
        self.listen()

    def listen(self) -> None:
        """Listen for the current run's alerts, if a callback is set and the run is sent to a server."""
        if self.listener is not None:
            self.listener.stop()
            self.listener = None
        run = self.run
        callbacks = [*self.alert_callbacks, *(run.mirrors.callbacks if run is not None else ())]
        if run is None or not callbacks or not run.is_sent:
            return
        self.listener = AlertListener(
            run.settings.address,
            lambda: run.settings.token,
            run.run_id,
            callbacks,
            every_seconds=self.alert_seconds,
            over=lambda: run.is_over,
        )
        self.listener.start()

    def end_watches(self) -> None:
        """The run is over, and so are its watches: what they measured stays, in the next run others measure."""
        for record in self.records:
            if record.handle is not None:
                record.handle.remove()
        self.records = []

    def replace_watches(self, begun: Watch) -> None:
        """End the watches of which this one has all optimizers."""
        taken = set(map(id, begun.optimizers))
        for record in (*self.records, *(record for record, _ in self.waiting)):
            handle = record.handle
            if handle is not None and not handle.removed and taken >= set(map(id, handle.optimizers)):
                handle.remove()
                _LOG.warning("watch: an earlier watch of these optimizers ends; the new one takes its place")

    def join(self, run: Run, record: _WatchRecord, reporter: _WatchReporter) -> None:
        """Let a watch report to the run, if anybody still holds it."""
        handle = record.handle
        if handle is None:
            return
        if run.settings.second_role is not None:
            self.refuse_watch(run)
            return
        if (folder := run.saved_folder) is not None:
            handle.compare_with_saved(folder)
        predecessor = next((other for other in reversed(self.records) if record.succeeds(other)), None)
        reporter.report_to(run, handle, predecessor)
        if predecessor is None:
            alike = (other.handle for other in reversed(self.records) if record.resembles(other))
            reporter.possible_predecessor = next(
                ((other, other.step) for other in alike if other and other.step), None
            )
        self.records = [other for other in self.records if other is not predecessor] + [record]

    def refuse_watch(self, run: Run) -> None:
        """A second writer's measurements stay in this process."""
        if run is not self.told_of_watches:
            self.told_of_watches = run
            _LOG.warning(
                "watch: this process writes to run %s as its %s, so what it watches is not reported; watch in the "
                "training, or begin a run of its own (said once)",
                run.run_id,
                run.settings.role,
            )

    def register_handlers(self) -> None:
        if self.handlers_registered:
            return
        self.handlers_registered = True
        if takes_exit_hooks():
            self.exit_status.begin_noting()
        atexit.register(_at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork_in_child)


_SESSION = _Session()


@checks_names
def init(
    project: str | None = None,
    name: str | None = None,
    *,
    run_id: str | None = None,
    resume: Resume = "allow",
    group: str | None = None,
    tags: Iterable[str] | None = None,
    notes: str = "",
    seed: int | None = None,
    config: Any = None,
    mirrors: Iterable[str] | None = None,
    server_url: str | None = None,
    token: str | None = None,
    mode: Mode | None = None,
    dir: str | Path | None = None,
    transport: Transport | None = None,
    role: str = "trainer",
) -> Run:
    """Begin a run; `with init(...) as run:` also ends it. An unfinished earlier run of this process is finished.

    Returns at once: a background thread talks to the server, and keeps reports on disk while it is away.
    Arguments left out come from the environment: COLLAGE_PROJECT, COLLAGE_RUN_NAME, COLLAGE_RUN_ID,
    COLLAGE_RUN_GROUP, COLLAGE_TAGS, COLLAGE_MIRRORS, COLLAGE_SERVER_URL, COLLAGE_TOKEN, COLLAGE_MODE, COLLAGE_DIR.
    `resume` says what to do when the server knows `run_id`: "allow", "must" or "never"; it is asked in the
    background, and its refusal ends the sending with one log line. `mode` is "online" by default; "offline" keeps
    everything on disk for the next online run in the same folder; "disabled" reports nothing (watches still
    measure). `mirrors` names trackers to which the run's numbers are written, too: "wandb", "mlflow", "trackio",
    "tensorboard", or one that another package adds, each with ":WHERE" behind it if it takes that.

    `role` other than "trainer", such as "evaluator": this process logs to the run of another one by its `run_id`,
    under names that begin with the role and a slash, at any steps, also after the run has ended. It changes nothing
    else of the run, and what it watches is not reported. Reports wait while the server does not know the run.

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
        mirrors=mirrors,
        server_url=server_url,
        token=token,
        mode=mode,
        dir=dir,
        role=role,
    )
    if _SESSION.run is not None:
        _SESSION.run.finish()
    _SESSION.register_handlers()
    if settings.mode != "disabled" and takes_exit_hooks():
        _SESSION.termination.install()
    identity = make_identity(settings.run_id, nth_run=_SESSION.runs_begun, role=settings.second_role)
    run = Run(settings, identity, transport, _SESSION.exit_status)
    _SESSION.begin(run)
    return run


@shows_options
def watch(model: nn.Module, optimizer: Optimizers, **options: Unpack[WatchArguments]) -> Watch:
    """Measure how the optimizer's updates arrive, and report it to the current run, if there is one.

    optimizer: one, or several over different parameters (a sequence, or the values of a mapping, such as one for
    each parameter that steps in the backward pass): then steps are iterations, and one report holds them all. Other
    objects and step functions are measured between `handle.before()` and `handle.after()`.

    Options:
        every: measure the steps divisible by it, and the first one of an optimizer that has states already.
        sample: elements looked at in each tensor; "all": whole tensors, and no budget.
        layers: regular expression(s) for the names to watch, or Exclude(...).
        strategy: the label that you believe in; the observed one stands beside it.
        oracle: keep an fp64 optimizer running beside yours, on a small sample.
        windows: numbers of steps over which u is added up, in bursts that take about a quarter of the steps.
        budget: bounds the agent's CPU over the rest of the process's; None: no governor.
        first_step: number of the next optimizer step; None: read from the optimizer.
        casts: formats of low-precision copies of the weights, such as "mxfp8": what reaches them.
        expect: what this training must keep: a strategy's name, or {"strategy", "weights", "states": a dtype,
            "min_edq", "max_lost": a number}, any of them; see docs/reference/watch-options.md.
        on_breach: "warn": say so, once; "raise" ExpectationBroken in the training; "exit" with status 3.
    COLLAGE_EVERY, _SAMPLE, _BUDGET, _EXPECT and _ON_BREACH replace defaults, never what was passed.

    Raises:
        ValueError, TypeError: an argument that cannot be used.
    """
    run = _SESSION.run
    reporter = _WatchReporter()
    handle = attach_watch(
        model,
        optimizer,
        reporter=reporter,
        seed=_SESSION.seed(),
        worker_cpu_seconds=reporter.worker_cpu_seconds if run is None else run.worker_cpu_seconds,
        last_step_shown=reporter.last_step_shown,
        **{**watch_defaults(), **options},
    )
    _SESSION.replace_watches(handle)
    record = _WatchRecord(handle, model)
    if run is not None:
        _SESSION.join(run, record, reporter)
    else:
        _SESSION.waiting.append((record, reporter))
    _SESSION.averages.watch_began(handle)
    if CHECK_STEPS in os.environ:
        from collage_agent.checked_steps import begin_check

        begin_check(handle)
    return handle


def watch_average(
    average: object,
    model: nn.Module,
    decay: float | None = None,
    *,
    every: int | None = None,
    sample: int | Literal["all"] | None = None,
) -> AverageWatch:
    """Measure how the updates of an average of the model's weights arrive, compared with an fp64 average.

    average: torch's AveragedModel, diffusers' EMAModel, timm's ModelEma…, a copy of the model, or the averaged
    tensors by name or in the order of the model's parameters. Updates of the first three are noticed, and these
    averages are found where their model is watched: this call is for the others, and to say the decay. For other
    averages, call `before()` and `after()` of the returned handle around each update; otherwise the update is
    noticed at the optimizer's next step.
    decay: d of a ← d·a + (1 − d)·θ; None: the average's own, where it can be known.
    every, sample: as of `watch`, in updates; None: those of the model's watch, of the sample 1,024 at most.

    Reported with the watch of the model, once there is one.

    Raises:
        TypeError, ValueError: an argument that cannot be used, or an average that is none of this model's.
    """
    return _SESSION.averages.watch(average, model, decay, every=every, sample=sample)


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Record scalars, such as `loss`, `validation_loss`, `tokens` (since the start of the run, over all ranks).

    Values are numbers or one-element tensors, which are cloned where they are and read later: nothing here waits
    for a device. `step` None: the watched optimizer's last completed step; without a watch, one more than before.
    Without a run nothing happens.
    """
    if _SESSION.run is not None:
        _SESSION.run.log(values, step)
    elif not _SESSION.runs_begun and not _SESSION.told_of_log:
        _SESSION.told_of_log = True
        _LOG.warning(
            "log: no run has begun, so this is kept nowhere: call collage_agent.init(...) first (said once)"
        )


def on_alert(callback: AlertCallback, *, every_seconds: float = 30.0) -> None:
    """Call `callback(incident)` once for each alert that fires on this process's run, the current and later ones.

    A thread of the agent asks the server every `every_seconds`, and the callback runs there: let it set a flag that
    the loop reads, to save a checkpoint or to stop. An error of the callback is logged and does not
    propagate. `incident` says `alert`, `severity`, `text`, `step`. Without a server nothing is ever called.

    Raises:
        TypeError, ValueError: what was passed cannot be called, or the time is not positive.
    """
    if not callable(callback):
        raise TypeError(f"callback={callback!r:.200}: pass a function of one argument, the incident")
    if not every_seconds > 0:
        raise ValueError(f"every_seconds={every_seconds!r}: pass a positive number of seconds")
    _SESSION.alert_callbacks.append(callback)
    _SESSION.alert_seconds = float(every_seconds)
    _SESSION.listen()


def finish() -> None:
    """End the current run: send what is left within a deadline, print the verdict and the run's address."""
    if _SESSION.run is not None:
        _SESSION.run.finish()
        _SESSION.end_watches()
        _SESSION.run = None
        _SESSION.listen()
        _SESSION.termination.uninstall()


def current_run() -> Run | None:
    """The run that `init` began, until it is finished; None without one."""
    return _SESSION.run


def _at_exit() -> None:
    _SESSION.termination.wait_if_terminating()
    if _SESSION.run is not None:
        failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or _SESSION.exit_status.failed
        interactive = hasattr(sys, "ps1") or "IPython" in sys.modules
        _SESSION.run.finish("failed" if failed and not interactive else "finished")


def _after_fork_in_child() -> None:
    # A child that somebody ends dies at once, as it would without the agent.
    _SESSION.termination.uninstall()
    if _SESSION.run is not None:
        _SESSION.run.begin_in_child_process()
