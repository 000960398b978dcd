"""A run as the training process has it: it takes measurements and scalars, and never blocks training.

`session.py` makes it for `init`. It numbers steps and attempts, and says at the end where to look; sending is
`transport/pipeline.py`'s. The public methods of a `Run` are fixed.
"""

from __future__ import annotations

import html
import itertools
import logging
import math
import operator
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, Literal, TextIO

import torch

from collage_agent.error_guard import Guard
from collage_agent.launch.identity import Identity
from collage_agent.launch.termination import ExitStatus, is_failure
from collage_agent.measurement import Measurement, StepSource
from collage_agent.mirrors.mirroring import MirroredRun, Mirrors
from collage_agent.run_settings import Settings
from collage_agent.transport import Transport
from collage_agent.transport.http import dashboard_of
from collage_agent.transport.pipeline import DeliveryPipeline
from collage_agent.transport.queue import (
    AttemptStart,
    Item,
    LoggedScalars,
    MeasuredStep,
    WatchChange,
    cuda_event_on,
    not_finite_since,
)
from collage_agent.transport.report_counts import given_up
from collage_monitor.environment import CHECK_REPORT
from collage_monitor.errors import CollageError, NotFound
from collage_monitor.local import local_server

__all__ = ["Run"]

_LOG = logging.getLogger("collage_agent")
_LOSSES = ("loss", "validation_loss")


@dataclass
class _WatchSlot:
    """A watch of the run, and how far earlier watches of the same layers came.

    `last_shown_step` is their last step that the run still shows; `hidden_through` is the last step of `watch`
    before the newest attempt began.
    """

    watch: StepSource
    last_shown_step: int = 0
    hidden_through: int = 0
    step_known: bool = True
    """False: nobody knows the numbers of its steps."""

    def replace_watch(self, watch: StepSource) -> None:
        """Another watch takes over from this one."""
        step = self.watch.step or 0
        if step > self.hidden_through:
            self.last_shown_step = max(self.last_shown_step, step)
        self.watch, self.hidden_through, self.step_known = watch, 0, True

    def begin_attempt(self, first_step: int) -> None:
        """A new attempt begins at `first_step`."""
        step = self.watch.step or 0
        self.last_shown_step = min(max(self.last_shown_step, step), first_step - 1)
        self.hidden_through = step


class Run:
    """One run of this process; made by `collage_agent.init`. A Reporter for a single watch.

    No call blocks, synchronises a device or raises, but for `finish` and `stop`, which block until their deadline.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        transport: Transport | None = None,
        exit_status: ExitStatus | None = None,
    ) -> None:
        """exit_status: the state known so far of how the process ends; any report says that it goes on."""
        self.settings = settings
        self._exit_status = ExitStatus() if exit_status is None else exit_status
        self._identity = identity
        self._given_transport = transport
        self._guard = Guard()
        self._slots: dict[int, _WatchSlot] = {}
        self._numbers = itertools.count()
        self._first_step: int | None = None
        self._counted_step = 0
        self._not_finite: dict[str, float | torch.Tensor] = {}
        self._log_cpu_seconds = 0.0
        self._finished = False
        self._reports_run_state = identity.is_first_rank
        is_mirrored = identity.is_first_rank and identity.role is None and settings.mode != "disabled"
        written = settings.mirrors if is_mirrored else ()
        self.mirrors = Mirrors(
            written,
            MirroredRun(self.run_id, self.name, self.project, settings.group, lambda: self.address, Event()),
        )
        """Trackers to which this process's numbers are written, too."""
        self._pipeline: DeliveryPipeline | None = None
        if settings.mode != "disabled":
            # Ranks register the run in any order, so only a single process can ask for a new one.
            resume = "allow" if settings.resume == "never" and identity.world_size > 1 else settings.resume
            self._pipeline = DeliveryPipeline(
                settings,
                identity,
                transport,
                resume=resume,
                on_unreachable=self._announce_unreachable,
                mirrors=self.mirrors,
            )
            try:
                self._pipeline.begin()
            except Exception as error:
                # Training goes on, even where no thread can be started.
                self._guard.caught("starting to deliver", error)
                self._pipeline = None
        if settings.mode == "offline" and self._reports_run_state and CHECK_REPORT not in os.environ:
            _say(f"offline: reports are kept in {self._spool_folder}. {_TO_VIEW}")

    @property
    def run_id(self) -> str:
        """The run's id, shared by all ranks."""
        return self._identity.run_id

    @property
    def project(self) -> str:
        """The project that the run belongs to."""
        return self.settings.project

    @property
    def name(self) -> str:
        """The run's label; its id when none was given."""
        return self.settings.name or self.run_id

    @property
    def saved_folder(self) -> Path | None:
        """Where this rank keeps summaries of the run's checkpoints; None: it keeps none."""
        if self.settings.mode == "disabled":
            return None
        return self.settings.folder / "saved" / self.run_id / f"rank{self._identity.rank}"

    @property
    def is_sent(self) -> bool:
        """Whether it is sent to a server, not only kept on disk or passed to the caller's transport."""
        return self.settings.mode == "online" and self._given_transport is None

    @property
    def is_over(self) -> bool:
        """Whether it was finished or stopped."""
        return self._finished

    @property
    def address(self) -> str:
        """Where the run can be looked at: the dashboard's page where `collage-monitor up` runs, else the API."""
        return self._page() or f"{self.settings.address}/api/v1/runs/{self.run_id}"

    def _page(self) -> str | None:
        if (found := local_server()) is None or found.server_url != self.settings.address:
            return None
        return f"{found.dashboard_url}/run/{self.run_id}"

    @property
    def reports_made(self) -> int:
        """Reports of this process so far: those sent, spooled, pending and dropped, together."""
        return self._pipeline.counts.made if self._pipeline else 0

    @property
    def reports_pending(self) -> int:
        """Reports of this process on their way to the server or to the disk."""
        return self._pipeline.counts.pending if self._pipeline else 0

    @property
    def reports_sent(self) -> int:
        """Reports of this process that the server has acknowledged."""
        return self._pipeline.counts.sent if self._pipeline else 0

    @property
    def reports_spooled(self) -> int:
        """Reports of this process that wait on disk for the server."""
        return self._pipeline.counts.spooled if self._pipeline else 0

    @property
    def reports_dropped(self) -> dict[str, int]:
        """Reports of this process that were given up, by reason."""
        return self._pipeline.counts.dropped if self._pipeline else {}

    def worker_cpu_seconds(self) -> float:
        """CPU spent on delivering so far: the worker thread's, and that of `log` on the training thread."""
        return self._log_cpu_seconds + (self._pipeline.cpu_seconds if self._pipeline else 0.0)

    def attach(self, watch: StepSource, earlier: StepSource | None = None) -> int:
        """Use this watch's step in `log`, too; it takes over from `earlier`, if that is given.

        Returns its number among the run's watches, which is that of the earlier one.
        """
        for index, slot in self._slots.items():
            if earlier is not None and slot.watch is earlier:
                slot.replace_watch(watch)
                return index
        index = next(self._numbers)
        self._slots[index] = _WatchSlot(watch)
        return index

    def take_over(self, index: int, earlier: StepSource) -> int:
        """Let the watch `index` go on in the place of `earlier`; the answer is the number of that place."""
        return self.attach(self._slots.pop(index).watch, earlier)

    def last_step_shown(self, watch_index: int = 0) -> int | None:
        """The last step that the run shows of this watch's layers, for optimizers without a count of their steps.

        0: none. None: the run was named, and may show steps of other processes; then the watch must not report, and
        values logged at its steps are refused.
        """
        slot = self._slots.get(watch_index)
        if slot is None or slot.last_shown_step or self.settings.run_id is None:
            return slot.last_shown_step if slot is not None else 0
        slot.step_known = False
        return None

    def started(self, first_step: int, watch_index: int = 0) -> None:
        """A watched optimizer is about to take its first step.

        If an earlier watch of the same layers has already reached this step, training went back to a checkpoint: a
        new attempt begins, so that repeated steps do not count twice.
        """
        if self._first_step is None:
            self.mirrors.find()
            self._first_step = first_step
            self._put(AttemptStart(first_step))
        elif watch_index in self._slots and first_step <= self._slots[watch_index].last_shown_step:
            self._first_step = first_step
            self._identity = self._identity.in_next_attempt()
            for slot in self._slots.values():
                slot.begin_attempt(first_step)
            self._put(AttemptStart(first_step, self._identity))

    def measured(self, measurement: Measurement, watch_index: int = 0) -> None:
        """Leave a measurement for the worker."""
        self._exit_status.failed = False
        if self._pipeline is not None and not self._finished:
            try:
                ready = cuda_event_on(measurement.totals.device)
                self._pipeline.queue.put(MeasuredStep(measurement, watch_index, ready))
            except Exception as error:
                self._guard.caught("reporting a measured step", error)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Record scalars at a step; see `collage_agent.log`."""
        self._exit_status.failed = False
        if self._pipeline is None or self._finished:
            return
        began = time.thread_time()
        self._look()
        try:
            self._log(values, step)
        except Exception as error:
            self._guard.refused("log", error)
        finally:
            self._log_cpu_seconds += time.thread_time() - began

    def finish(self, state: Literal["finished", "failed"] = "finished", *, seconds: float | None = None) -> None:
        """Flush within a deadline, mark the run, print the verdict and the run's address; once."""
        if self._finished:
            return
        self._look()
        self._finished = True
        settled = True
        try:
            if self._pipeline is not None:
                settled = self._pipeline.finish(state if self._reports_run_state else None, seconds)
            if self._reports_run_state:
                self._print_farewell(settled)
        except Exception as error:
            self._guard.caught("finish", error)

    def stop(self, seconds: float) -> None:
        """Send or keep what is queued and report no more; the run stays open, because the job may be resumed."""
        self._finished = True
        if self._pipeline is not None:
            self._pipeline.finish(None, seconds)

    def begin_in_child_process(self) -> None:
        """After a fork: a stream of its own, made when the child reports something; the parent keeps the run."""
        pipeline, self._pipeline, self.mirrors = self._pipeline, None, Mirrors()
        self._reports_run_state = False
        if pipeline is None or self._finished:
            return
        pipeline.forget()
        self._identity = self._identity.in_child_process()
        self._pipeline = DeliveryPipeline(
            self.settings,
            self._identity,
            self._given_transport,
            resume="allow",
            on_unreachable=self._announce_unreachable,
        )
        if self._first_step is not None:
            self._pipeline.queue.put(AttemptStart(self._first_step))

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed = is_failure(error.code) if isinstance(error, SystemExit) else error is not None
        self.finish("failed" if failed else "finished")

    def __repr__(self) -> str:
        return f"<Run {self.run_id} of project {self.project!r}, {self.settings.mode}>"

    def _repr_html_(self) -> str:
        name, project = html.escape(self.name), html.escape(self.project)
        if not self.reports_sent:
            return f"run {name} of project {project}: nothing was sent yet"
        link = f'run <a href="{html.escape(self.address)}">{name}</a> of project {project}'
        return link + (_CURVES.format(html.escape(page)) if (page := self._page()) else "")

    def _put(self, item: Item) -> None:
        if self._pipeline is not None and not self._finished:
            self._pipeline.queue.put(item)

    def _look(self) -> None:
        """Tell the server, too, of steps that no hook sees."""
        for index, slot in self._slots.items():
            try:
                layout = slot.watch.look()
            except Exception as error:
                self._guard.caught("looking for unseen steps", error)
            else:
                if layout is not None:
                    self._put(WatchChange(layout, index))

    def _log(self, values: Mapping[str, Any], step: int | None) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(f"values={type(values).__name__}: pass a mapping of names to numbers")
        if isinstance(step, torch.Tensor):
            # Reading a number from a tensor would wait for the device.
            raise TypeError("step: pass a number, not a tensor")
        counted = step is None and not self._slots
        if step is None and self._slots and not any(slot.step_known for slot in self._slots.values()):
            raise ValueError(
                "the watched optimizer keeps no step count; pass step=… here, or first_step=… to watch"
            )
        if step is not None:
            place: int | None = operator.index(step)
            if place is not None and place < 0:
                raise ValueError(f"step={step}: steps are counted from 0")
        elif counted:
            place = self._counted_step + 1
        else:
            place = self._step_of_watches()
        self._counted_step = max(self._counted_step, place or 0)
        if skipped := self._skipped_so_far():
            # No step was measured that could tell.
            values = {**values, "skipped_steps": skipped}
        for item in LoggedScalars.of(values, place, time.time(), counted):
            self._put(item)
            for name in _LOSSES:
                with suppress(TypeError, ValueError):
                    if name in item.values:
                        since = self._not_finite.get(name, math.nan)
                        self._not_finite[name] = not_finite_since(item.values[name], place or 0, since)

    def losses_not_finite(self) -> dict[str, int]:
        """The losses that are not finite, and since which step. Waits for a device on which they are."""
        since = {name: float(step) for name, step in self._not_finite.items()}
        return {name: int(step) for name, step in since.items() if not math.isnan(step)}

    def _skipped_so_far(self) -> float:
        found = [getattr(slot.watch, "skipped_so_far", 0.0) for slot in self._slots.values()]
        return max(found, default=0.0)

    def _step_of_watches(self) -> int | None:
        """The last step of the running watches, otherwise of the ended ones."""
        numbered = [slot.watch for slot in self._slots.values() if slot.step_known]
        going_on = [watch for watch in numbered if not getattr(watch, "removed", False)]
        for watches in (going_on, numbered):
            if steps := [step for watch in watches if (step := watch.step) is not None]:
                return max(steps)
        return None

    @property
    def _spool_folder(self) -> str:
        return str(self.settings.folder / "spool" / self.run_id)

    def _where_to_look(self) -> str:
        if self._given_transport is not None:
            return f" ({self.run_id}) is sent"
        server = self.settings.address
        dashboard = dashboard_of(server)
        if dashboard is not None:
            return f": {dashboard}/run/{self.run_id}"
        return (
            f" ({self.run_id}) is at {server}; to look at it: collage-monitor serve dashboard --server-url {server}"
        )

    def _announce_unreachable(self, error: CollageError) -> None:
        if isinstance(error, NotFound):
            _say(f"{error}. Reports wait in {self._spool_folder}; what is left there `collage-monitor sync` sends.")
        elif self._reports_run_state:
            _say(f"{error}. Reports are kept in {self._spool_folder} until it takes them. {_TO_VIEW}")
        else:
            _LOG.warning("%s; reports are kept in %s", error, self._spool_folder)

    def _print_farewell(self, settled: bool) -> None:
        for slot in self._slots.values():
            _write(f"{slot.watch}\n", sys.stdout)
        if self._pipeline is None:
            return
        if waiting := self.reports_spooled:
            if CHECK_REPORT not in os.environ:  # `check` reads its own, and removes their folder.
                reports = "report waits" if waiting == 1 else "reports wait"
                _say(f"run {self.name}: {waiting} {reports} in {self._spool_folder}. {_TO_VIEW}", sys.stdout)
        elif self.reports_sent:
            _say(f"run {self.name}{self._where_to_look()}", sys.stdout)
        else:
            _say(f"run {self.name}: nothing was sent", sys.stdout)
        if not settled:
            _say("the deadline passed before every report was sent or kept; the rest is lost")
        for line in self.mirrors.missing():
            _say(line)
        if dropped := self.reports_dropped:
            _say(f"reports given up: {given_up(dropped)}")


_CURVES = '<iframe src="{}?embed=curves" title="its curves" width="100%" height="480" style="border: 0"></iframe>'
_TO_VIEW = "`collage-monitor up` starts a server, `collage-monitor sync` sends it what is left there."


def _say(text: str, stream: TextIO | None = None) -> None:
    """One notice for the person at the terminal."""
    _write(f"collage: {text}\n", stream or sys.stderr)


def _write(text: str, stream: TextIO) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError, AttributeError):  # A closed terminal is no reason to fail.
        _LOG.info("%s", text)
