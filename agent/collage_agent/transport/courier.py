"""The worker's errand: introduce run, attempt and stream, and turn queue items into batches to deliver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from collage_agent.launch.identity import Identity
from collage_agent.settings import DeliveryLimits, Settings
from collage_agent.transport.delivery import Delivery
from collage_agent.transport.envelope import Body, Envelope
from collage_agent.transport.reports import Item, Logged, Measured, ReportMaker, Started
from collage_monitor.wire import AttemptCreate, Report, ReportBatch, RunCreate, RunUpdate, StreamCreate

__all__ = ["Courier"]


class Courier:
    """Belongs to one stream and to the worker thread; every public call settles what it is given.

    The attempt begins with the watched optimizer's first step. Until then scalars are held, because that step
    decides which older points the attempt hides; without a watch the second logged step begins it.
    """

    def __init__(
        self, settings: Settings, identity: Identity, delivery: Delivery, dropped_elsewhere: Callable[[], int]
    ) -> None:
        self.maker = ReportMaker()
        self._settings = settings
        self._limits: DeliveryLimits = settings.limits
        self._identity = identity
        self._delivery = delivery
        self._dropped_elsewhere = dropped_elsewhere
        self._first_step: int | None = None
        self._last_step = 0
        self._held: list[Logged] = []
        self._told_dropped = 0

    def introduce_run(self, resume: Literal["allow", "must", "never"]) -> None:
        """Create the run on the server, or resume it."""
        settings = self._settings
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

    def take(self, items: Iterable[Item]) -> None:
        """Send what the training thread left, in order."""
        ready: list[Measured | Logged] = []
        for item in items:
            if isinstance(item, Started):
                ready += self._begin(item.first_step)
            elif isinstance(item, Measured):
                ready += self._begin(item.measurement.step)
                ready.append(item)
            elif self._first_step is None:
                ready += self._hold(item)
            else:
                ready.append(self._placed(item))
        self._send_items(ready)

    def finish(self, state: Literal["finished", "failed"] | None) -> None:
        """Send what was held, and mark the run as `state` (None leaves it: another process speaks for the run)."""
        if self._held:
            self._send_items(self._begin(min(item.step or 0 for item in self._held)))
        dropped = self.dropped
        if self._first_step is not None and dropped > self._told_dropped and self._delivery.stopped is None:
            report = self.maker.scalars_report(self._last_step, time.time(), {"reports_dropped": float(dropped)})
            self._send(ReportBatch(reports=[report]))
        if state is not None:
            self._send(RunUpdate(state=state))

    @property
    def dropped(self) -> int:
        """Reports given up since the start, for whatever reason."""
        return self._dropped_elsewhere() + self._delivery.dropped.total()

    def _begin(self, first_step: int) -> list[Measured | Logged]:
        """Begin the attempt, once; returns the scalars that waited for it."""
        if self._first_step is not None:
            return []
        self._first_step = max(0, first_step)
        self._send(AttemptCreate(launch_id=self._identity.launch_id, first_step=self._first_step))
        self._introduce_stream()
        held, self._held = self._held, []
        return [self._placed(item) for item in held]

    def _hold(self, item: Logged) -> list[Measured | Logged]:
        self._held.append(item)
        steps = {held.step for held in self._held if held.counted}
        if len(steps) > 1:
            return self._begin(min(step for step in steps if step is not None))
        del self._held[: -self._limits.queue_items]
        return []

    def _placed(self, item: Logged) -> Logged:
        """The item with a step: what was logged before the first step belongs just before it."""
        assert self._first_step is not None
        if item.step is None or (item.counted and item.step < self._first_step):
            return replace(item, step=max(0, self._first_step - 1))
        return item

    def _send_items(self, items: list[Measured | Logged]) -> None:
        if not items:
            return
        measured = (item for item in items if isinstance(item, Measured))
        grew = [self.maker.declare(item.measurement.layout, item.watch_index) for item in measured]
        if any(grew):
            self._introduce_stream()
        reports = self.maker.reports(items)
        if not reports:
            return
        self._last_step = max(self._last_step, reports[-1].step)
        dropped = self.dropped
        if dropped > self._told_dropped:
            reports[-1].scalars["reports_dropped"] = float(dropped)
            self._told_dropped = dropped
        for batch in _batches(reports, self._limits):
            self._send(ReportBatch(reports=batch))

    def _introduce_stream(self) -> None:
        identity = self._identity
        self._send(
            StreamCreate(
                stream_id=identity.stream_id,
                launch_id=identity.launch_id,
                rank=identity.rank,
                world_size=identity.world_size,
                process_id=identity.process_id,
                layers=list(self.maker.layers),
                statistics=self.maker.statistics,
                watch=self.maker.watch,
            )
        )

    def _send(self, body: Body) -> None:
        identity = self._identity
        self._delivery.send(Envelope(self._settings.project, identity.run_id, identity.stream_id, body))


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
