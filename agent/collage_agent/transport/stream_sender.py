"""The messages of one stream: registrations of run, attempt and stream, then each step as a numbered report.

The pipeline's thread owns it. Order is fixed: run, attempt, stream, then reports from number 0 on; the server
refuses any other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from collage_agent.launch.identity import Identity
from collage_agent.mirrors.mirroring import MeasuredTotals
from collage_agent.run_settings import DeliveryLimits, Resume, Settings
from collage_agent.transport.envelope import Body, Envelope
from collage_agent.transport.queue import AttemptStart, Item, LoggedScalars, MeasuredStep, StepItems, WatchChange
from collage_agent.transport.report_maker import ReportMaker, SteadyTime
from collage_agent.transport.sender import Sender
from collage_monitor.wire import AttemptCreate, Report, ReportBatch, RunCreate, RunUpdate, StreamCreate

__all__ = ["StreamSender"]

_LOG = logging.getLogger("collage_agent")


class StreamSender:
    """Registers run, attempt and stream, and sends what the queue gives. Belongs to the worker thread.

    The attempt begins with the watched optimizer's first step, or with a logged one: logging hides only values
    logged under the same name. Values logged without a step, before the watched optimizer's first step, wait for it
    and get the step just before it. Without a watch they wait for the second such call. If training goes back to an
    earlier step, a new attempt begins with its own stream.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        sender: Sender,
        mirror: Callable[[list[MeasuredTotals]], None] = lambda measured: None,
    ) -> None:
        """mirror: is handed each measured step's totals; never raises."""
        self._settings = settings
        self._mirror = mirror
        self._limits: DeliveryLimits = settings.limits
        self._identity = identity
        self._sender = sender
        self._counts = sender.log.counts
        self._time = SteadyTime()
        self._prefix = f"{identity.role}/" if identity.role is not None else ""
        self._maker = ReportMaker(self._time, self._prefix)
        self._first_step: int | None = None
        self._watched_from: int | None = None
        self._last_step = 0
        self._last_time = 0.0
        self._counting = False
        self._waiting: list[StepItems] = []
        self._reported_dropped = 0
        self._failed = False

    def register_run(self, resume: Resume) -> None:
        """Create the run on the server, or resume it; a second writer leaves it unchanged."""
        settings = self._settings
        if self._identity.role is not None:
            return
        self._send(
            RunCreate(
                run_id=self._identity.run_id,
                name=settings.name,
                group=settings.group,
                tags=list(settings.tags),
                notes=settings.notes,
                seed=settings.seed,
                config=settings.config,
                resume=resume,
            )
        )

    def take(self, entries: Iterable[StepItems]) -> None:
        """Send the training thread's entries, in order."""
        ready: list[StepItems] = []
        for entry in entries:
            first = entry.items[0]
            if isinstance(first, AttemptStart):
                self._send_steps(ready)
                ready = self._start(first)
            elif isinstance(first, WatchChange):
                self._send_steps(ready)
                ready = []
                if self._maker.declare(first.layout, first.watch_index):
                    self._register_stream()
            elif any(isinstance(item, MeasuredStep) for item in entry.items) and self._watched_from is None:
                assert first.step is not None
                ready += [*self._start(AttemptStart(first.step)), entry]
            elif self._must_wait(first):
                ready += self._wait(entry)
            else:
                ready.append(entry)
        self._send_steps(ready)

    def finish(self, state: Literal["finished", "failed"] | None) -> None:
        """Send the waiting values, and mark the run as `state` (None leaves it to another process)."""
        self._send_steps(self._waited())
        dropped = self._dropped
        if self._first_step is not None and dropped > self._reported_dropped and self._sender.stopped is None:
            self._counts.add()
            name = f"{self._prefix}reports_dropped"
            report = self._maker.scalars_report(self._last_step, time.time(), {name: float(dropped)})
            self._send(ReportBatch(reports=[report]))
        if state is not None and self._identity.role is None:
            self._send(RunUpdate(state=state))

    @property
    def _dropped(self) -> int:
        return sum(self._counts.dropped.values())

    def _start(self, start: AttemptStart) -> list[StepItems]:
        """A watched optimizer takes its first step; returns the scalars that waited for it.

        Another identity is that of another attempt: its points hide the earlier ones from there on.
        """
        if start.identity is not None:
            self._identity = start.identity
            self._maker = ReportMaker(self._time, self._prefix)
            self._first_step = None
        elif self._watched_from is not None:
            return []
        self._watched_from = max(0, start.first_step)
        if self._first_step is None:
            self._register_attempt(self._watched_from)
        return self._waited()

    def _register_attempt(self, first_step: int) -> None:
        self._first_step = first_step
        identity = self._identity
        self._send(AttemptCreate(launch_id=identity.launch_id, first_step=first_step, role=identity.role))
        self._register_stream()

    def _must_wait(self, item: Item) -> bool:
        """Whether the step of scalars without one is still unknown."""
        return self._watched_from is None and (item.step is None or (_is_counted(item) and not self._counting))

    def _wait(self, entry: StepItems) -> list[StepItems]:
        """Keep scalars that must wait; returns those that no longer have to.

        Those without any step will all stand at one: only the last value of each name is kept.
        """
        step = entry.items[0].step
        mate = next((held for held in self._waiting if held.items[0].step == step), None)
        if mate is None:
            self._waiting.append(entry)
        else:
            mate.join(entry, self._limits.queue_steps)
            self._counts.add(-1)
        self._counting = len({held.items[0].step for held in self._waiting} - {None}) > 1
        return self._waited() if self._counting else []

    def _waited(self) -> list[StepItems]:
        """The values that waited, with times no earlier than those already sent."""
        waited, self._waiting = self._waiting, []
        for entry in waited:
            entry.items = [
                replace(item, time=max(item.time, self._last_time)) if isinstance(item, LoggedScalars) else item
                for item in entry.items
            ]
        return waited

    def _with_step(self, item: Item) -> Item:
        """The item with a step: values logged before the first step get the step just before it."""
        if not isinstance(item, LoggedScalars):
            return item
        begin = self._first_step if self._watched_from is None else self._watched_from
        assert begin is not None
        before = item.step is None or (item.counted and self._watched_from is not None and item.step < begin)
        return replace(item, step=max(0, begin - 1)) if before else item

    def _send_steps(self, entries: list[StepItems]) -> None:
        if not entries:
            return
        if self._first_step is None:
            self._register_attempt(
                min((step for entry in entries if (step := entry.items[0].step) is not None), default=0)
            )
        measured = [item for entry in entries for item in entry.items if isinstance(item, MeasuredStep)]
        grew = [self._maker.declare(item.measurement.layout, item.watch_index) for item in measured]
        if any(grew):
            self._register_stream()
        reports = [report for entry in entries for report in self._reports(entry)]
        if not reports:
            return
        self._last_step = max(self._last_step, reports[-1].step)
        self._last_time = entries[-1].time
        dropped = self._dropped
        if dropped > self._reported_dropped:
            reports[-1].scalars[f"{self._prefix}reports_dropped"] = float(dropped)
            self._reported_dropped = dropped
        for batch in _batches(reports, self._limits):
            self._send(ReportBatch(reports=batch))

    def _reports(self, entry: StepItems) -> list[Report]:
        """The reports of one step, counted; none where they cannot be made."""
        try:
            reports = self._maker.reports([self._with_step(item) for item in entry.items])
        except Exception:
            self._counts.drop("worker_error")
            if not self._failed:
                self._failed = True
                _LOG.exception("a step could not be reported; training goes on (said once)")
            return []
        self._mirror(self._maker.measured)
        if reports:
            self._counts.add(len(reports) - 1)
        else:
            self._counts.drop("no_number")
        return reports

    def _register_stream(self) -> None:
        identity = self._identity
        self._send(
            StreamCreate(
                stream_id=identity.stream_id,
                launch_id=identity.launch_id,
                rank=identity.rank,
                world_size=identity.world_size,
                process_id=identity.process_id,
                layers=list(self._maker.layers),
                statistics=self._maker.statistics,
                watch=self._maker.watch,
                measured_from=self._watched_from,
            )
        )

    def _send(self, body: Body) -> None:
        identity = self._identity
        self._sender.take(Envelope(self._settings.project, identity.run_id, identity.stream_id, body))


def _is_counted(item: Item) -> bool:
    return isinstance(item, LoggedScalars) and item.counted


def _batches(reports: list[Report], limits: DeliveryLimits) -> Iterable[list[Report]]:
    batch: list[Report] = []
    size = 0
    for report in reports:
        weight = 512 + len(report.statistics or b"") + len(report.model or b"")
        if batch and (len(batch) >= limits.batch_reports or size + weight > limits.batch_bytes):
            yield batch
            batch, size = [], 0
        batch.append(report)
        size += weight
    if batch:
        yield batch
