"""Gives every mirror a row for each measured step, events, and its own thread to write them in.

The training thread does nothing here. The worker makes rows of the totals that it sends anyway, and puts them
into a bounded queue for each mirror; a tracker that is slow or fails holds up neither reports nor another mirror.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from collage_monitor.diagnosis import EDQ_TOLERANCE
from collage_monitor.extensions import extensions
from collage_monitor.metrics import preferred_state, split_key
from collage_monitor.onset import Onset, describe, find_onset
from collage_monitor.statistics import Totals, finished, merge_shards, metric_keys
from collage_monitor.totals_table import Table
from collage_monitor.wire import Incident

__all__ = [
    "MeasuredTotals",
    "Mirror",
    "MirrorEvent",
    "MirrorRow",
    "MirroredRun",
    "Mirrors",
    "OnsetFinder",
]

_LOG = logging.getLogger("collage_agent")
_SERIES: Final = (
    "edq_ratio",
    "edq_oracle_ratio",
    "lost_update_ratio",
    "update_error_ratio",
    "update_to_weight_ratio",
    "residual_dropped_ratio",
    "decay_ratio",
    "grad_norm",
    "intended_norm",
    "effective_norm",
)
"""Mirrored of the whole model, where they are defined; with `_LABELLED` and `_SCALARS` fifteen series at most."""
_LABELLED: Final = ("lost_window_ratio", "cast_changed_ratio")
"""Of each the one with the last label: the longest window, the narrowest copy."""
_SCALARS: Final = ("bytes_per_parameter", "agent_overhead_ratio")
_WORST: Final = 3
"""Layers named in a row: those with the lowest EDQ."""
_QUEUE_ITEMS: Final = 2_000
_FAILURES_ALLOWED: Final = 3
"""In a row; then a mirror is left."""
_FEWEST_POINTS: Final = 24
_MOST_POINTS: Final = 256
_LOOK_EVERY: Final = 8
"""Measured steps between two looks for an onset."""


@dataclass(frozen=True)
class MeasuredTotals:
    """A measured step of one watch: totals [statistic][layer], the same merged over layers, the agent's scalars."""

    step: int
    time: float
    table: Table[NDArray[np.float64]]
    model: Totals
    scalars: Mapping[str, float]


@dataclass(frozen=True)
class MirrorRow:
    """A measured step: series by name, and (layer, EDQ) of up to three layers, the worst first."""

    step: int
    time: float
    values: Mapping[str, float]
    worst: tuple[tuple[str, float], ...] = ()

    @property
    def worst_in_words(self) -> str:
        """'head.weight (EDQ 0.791), …'"""
        return ", ".join(f"{name} (EDQ {value:.3f})" for name, value in self.worst)


@dataclass(frozen=True)
class MirrorEvent:
    """An event of the run: EDQ changed at once ("onset"), or an alert fired. `time` is Unix time in seconds."""

    kind: str
    step: int
    time: float
    text: str


@dataclass(frozen=True)
class MirroredRun:
    """The facts about the run that a mirror may use. `where`: what follows the mirror's name and a colon; "" if
    nothing does."""

    run_id: str
    name: str
    project: str
    group: str | None
    address: Callable[[], str]
    """Where the run can be looked at. May ask the disk: not for the training thread."""
    ending: threading.Event
    """Set once no more rows will come."""
    where: str = ""


class Mirror(Protocol):
    """Writes to one tracker. All but `find` runs in a thread of the mirror's own, in order, and may block or raise.

    The training's own rows must stay as they are: none lost, moved or delayed.
    """

    package: ClassVar[str]
    """What is imported; `init` refuses the mirror where it is not installed."""

    def __init__(self, run: MirroredRun) -> None:
        """Keep the facts about the run; open nothing yet."""

    def find(self) -> None:
        """Look for the training's own run in the tracker, without waiting: called on the training thread, at `init`
        and at its first step."""

    def write(self, row: MirrorRow) -> None:
        """Write a row."""

    def tell(self, event: MirrorEvent) -> None:
        """Write an event."""

    def close(self) -> None:
        """Nothing more will come: leave the training's run open, and close the mirror's own."""


@dataclass
class MirrorCounts:
    """The outcome of rows and events; `left`: the mirror has stopped."""

    written: int = 0
    failed: int = 0
    dropped: int = 0
    left: bool = False


class Mirrors:
    """The mirrors of a run. Their input comes from the worker; nothing here waits or raises."""

    def __init__(self, written: Sequence[str] = (), run: MirroredRun | None = None) -> None:
        """written: a mirror each, "NAME" or "NAME:WHERE", of a `run`; on the training thread."""
        self._ending = threading.Event() if run is None else run.ending
        self._threads: list[_MirrorThread] = []
        self._onsets = OnsetFinder()
        self._step = 0
        self._failed = False
        for name, _, where in (entry.partition(":") for entry in written):
            try:
                assert run is not None, "mirrors are those of a run"
                mirror = extensions("collage_agent.mirrors")[name](replace(run, where=where))
                self._threads.append(_MirrorThread(name, mirror))
            except Exception as error:
                _LOG.warning("mirror %s cannot be made (%s); training and reports are not affected", name, error)
        self.find()

    @property
    def counts(self) -> dict[str, MirrorCounts]:
        """The outcome of rows and events, by mirror."""
        return {thread.mirror_name: thread.counts for thread in self._threads}

    @property
    def callbacks(self) -> Sequence[Callable[[Incident], object]]:
        """The function to call for each alert on the run."""
        return [self.alert] if self._threads else []

    def missing(self) -> Iterator[str]:
        """A sentence for each mirror that lacks something."""
        for name, counts in self.counts.items():
            if lost := counts.failed + counts.dropped:
                yield f"mirror {name}: {lost} of {lost + counts.written} rows and events are missing there"

    def find(self) -> None:
        """Let each mirror look for the training's own run. On the training thread."""
        for thread in self._threads:
            thread.find()

    def take(self, measured: Sequence[MeasuredTotals]) -> None:
        """Leave a row of a measured step for the mirrors, and an event if EDQ has changed at once."""
        if not self._threads or not measured:
            return
        try:
            row = _row_of(measured)
            self._step = row.step
            self._put(row)
            if (onset := self._onsets.take(row.step, row.values.get("edq_ratio", np.nan))) is not None:
                self._put(MirrorEvent("onset", onset.first_changed, row.time, describe(onset, "EDQ")))
        except Exception:
            if not self._failed:
                self._failed = True
                _LOG.exception("a step could not be mirrored; reports go on (said once)")

    def alert(self, incident: Incident) -> None:
        """Leave an alert that has fired for the mirrors; from any thread."""
        step = self._step if incident.step is None else incident.step
        text = f"{incident.alert} ({incident.severity}): {incident.text}"
        self._put(MirrorEvent("alert", step, incident.started_at, text))

    def close(self) -> None:
        """Let each mirror write its pending rows, and close. Returns at once."""
        self._ending.set()
        for thread in self._threads:
            thread.put(None)

    def join(self, deadline: float) -> None:
        """Wait until every mirror has closed, until `deadline` on the monotonic clock at the longest."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _put(self, item: MirrorRow | MirrorEvent) -> None:
        for thread in self._threads:
            thread.put(item)


class OnsetFinder:
    """Finds changes of EDQ while the steps come. For a long run it keeps every second, fourth … point."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._edq: list[float] = []
        self._every = 1
        self._seen = 0
        self._last: Onset | None = None

    def take(self, step: int, edq: float) -> Onset | None:
        """The newest change, once; a look costs some milliseconds, so only each _LOOK_EVERY-th point is one."""
        self._seen += 1
        if self._seen % self._every:
            return None
        self._steps.append(step)
        self._edq.append(edq)
        if len(self._steps) > _MOST_POINTS:
            self._steps, self._edq, self._every = self._steps[1::2], self._edq[1::2], 2 * self._every
        if len(self._steps) % _LOOK_EVERY or len(self._steps) < _FEWEST_POINTS:
            return None
        found = find_onset(self._steps, np.array(self._edq), least=EDQ_TOLERANCE)
        if found is None or (self._last is not None and found.last_before < self._last.settled):
            return None
        self._last = found
        return found


class _MirrorThread(threading.Thread):
    """One mirror's thread and its queue: the oldest item is dropped first, and every failure is counted."""

    def __init__(self, name: str, mirror: Mirror) -> None:
        super().__init__(name=f"collage-mirror-{name}", daemon=True)
        self.mirror_name = name
        self.counts = MirrorCounts()
        self._mirror = mirror
        self._items: deque[MirrorRow | MirrorEvent | None] = deque()
        self._ready = threading.Condition(threading.Lock())
        self._failures = 0
        self._begun = False
        self._in_hand = 0
        self._given_up = False

    def find(self) -> None:
        try:
            self._mirror.find()
        except Exception as error:
            self._failed("looking for the training's run", error)

    def put(self, item: MirrorRow | MirrorEvent | None) -> None:
        """Leave an item, None for the end; the thread begins with the first."""
        with self._ready:
            if self.counts.left and item is not None:
                self.counts.dropped += 1
                return
            if len(self._items) >= _QUEUE_ITEMS:
                self._items.popleft()
                self.counts.dropped += 1
            self._items.append(item)
            begins, self._begun = not self._begun and item is not None, self._begun or item is not None
            self._ready.notify()
        if begins:
            self.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end; what is not written by then is counted as dropped."""
        if not self._begun:
            return
        super().join(timeout)
        with self._ready:
            if self.is_alive() and not self.counts.left:
                self.counts.left = self._given_up = True
                self.counts.dropped += self._in_hand + sum(item is not None for item in self._items)
                self._items.clear()
                self._items.append(None)

    def run(self) -> None:
        while (item := self._next()) is not None:
            self._in_hand = 1
            self._write(item)
            self._in_hand = 0
        try:
            self._mirror.close()
        except (Exception, SystemExit) as error:
            self._failed("closing", error)

    def _write(self, item: MirrorRow | MirrorEvent) -> None:
        if self.counts.left:
            self.counts.dropped += 1
            return
        try:
            self._mirror.write(item) if isinstance(item, MirrorRow) else self._mirror.tell(item)
        except (Exception, SystemExit) as error:
            if not self._given_up:
                self.counts.failed += 1
            self._failed("writing", error)
        else:
            self.counts.written += not self._given_up
            self._failures = 0

    def _next(self) -> MirrorRow | MirrorEvent | None:
        with self._ready:
            self._ready.wait_for(lambda: bool(self._items))
            return self._items.popleft()

    def _failed(self, doing: str, error: BaseException) -> None:
        self._failures += 1
        if self._failures == 1 and self.counts.failed <= 1:
            _LOG.warning(
                "mirror %s: %s failed (%s: %s); training and reports are not affected (said once)",
                self.mirror_name,
                doing,
                type(error).__name__,
                error,
            )
        if self._failures >= _FAILURES_ALLOWED and not self.counts.left:
            self.counts.left = True
            _LOG.warning("mirror %s: given up after %d failures in a row", self.mirror_name, self._failures)


def _row_of(measured: Sequence[MeasuredTotals]) -> MirrorRow:
    """The row of one measured step from the totals of its watches, in this process."""
    model = merge_shards([one.model for one in measured]) if len(measured) > 1 else measured[0].model
    values = {key: float(finished(key, model, ())) for key in _keys(model)}
    by_layer: dict[str, float] = {}
    for one in measured:
        values |= {name: one.scalars[name] for name in _SCALARS if name in one.scalars}
        layers = one.table.layers or ()
        edq = finished("edq_ratio", one.table, (len(layers),))
        by_layer |= dict(zip(layers, edq.tolist(), strict=True))
    known = [(name, value) for name, value in by_layer.items() if np.isfinite(value)]
    worst = tuple(sorted(known, key=lambda entry: entry[1])[:_WORST])
    finite = {key: value for key, value in values.items() if np.isfinite(value)}
    return MirrorRow(measured[-1].step, measured[-1].time, finite, worst)


def _keys(model: Totals) -> list[str]:
    """The series that these totals can make."""
    there = metric_keys(model)
    labelled = [key for name in _LABELLED for key in [key for key in there if split_key(key)[0] == name][-1:]]
    state = preferred_state(there)
    return [*(key for key in _SERIES if key in there), *([state] if state else []), *labelled]
