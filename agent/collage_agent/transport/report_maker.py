"""Reports of one stream: what was measured and logged at a step, as numbered reports that fit into a request.

`stream_sender.py` asks for them. The form of a report is `wire.Report`, its number in the stream is what makes it
exactly once; how steps are split over reports is free.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from collage_agent.measurement import Layout
from collage_agent.mirrors.mirroring import MeasuredTotals
from collage_agent.transport.queue import (
    AttemptStart,
    Item,
    LoggedScalars,
    MeasuredStep,
    WatchChange,
    number_of,
)
from collage_monitor.statistics import reduce_shards
from collage_monitor.wire import LIMITS, Layer, Report, WatchInfo, array_to_bytes

__all__ = ["ReportMaker", "SteadyTime"]

_LOG = logging.getLogger("collage_agent")
_LARGEST_TOTALS_BYTES = 12 * 2**20
"""Of one report's totals. In a split step, layers of the earlier reports are NaN, and compress well."""
_CLOCK_WAS_SET_SECONDS = 1.0
"""A report this much older than the one before it means that the clock was set back."""


@dataclass
class _Draft:
    """A report in the making."""

    step: int
    time: float
    scalars: dict[str, float] = field(default_factory=dict)
    totals: NDArray[np.float64] | None = None
    model: NDArray[np.float64] | None = None


class SteadyTime:
    """Times of one stream that never go backwards, whatever is done to the machine's clock.

    Where the clock was set back, time goes on from the last report at the clock's pace: durations stay right.
    """

    def __init__(self) -> None:
        self._last = -math.inf
        self._offset = 0.0

    def of(self, time: float) -> float:
        """The time to report for a moment that the clock gave as `time`; Unix seconds."""
        steady = time + self._offset
        if steady < self._last - _CLOCK_WAS_SET_SECONDS:
            self._offset += self._last - steady
        self._last = max(self._last, time + self._offset)
        return self._last


class ReportMaker:
    """Layers and statistics of one stream, in the order in which they were first seen, and its next seq.

    Several watches share the stream: each fills its own rows and columns of the common table, NaN elsewhere.
    """

    def __init__(self, time: SteadyTime, prefix: str = "") -> None:
        """prefix: begins the name of whatever is logged."""
        self._prefix = prefix
        self.layers: list[Layer] = []
        self.watch: WatchInfo | None = None
        self._rows: dict[str, int] = {}
        self._columns: dict[tuple[object, ...], int] = {}
        self._names: set[str] = set()
        self._unreadable: set[str] = set()
        self._known: dict[int, Layout] = {}
        self._next_seq = 0
        self._time = time
        self.measured: list[MeasuredTotals] = []
        """Those of the last step, of each watch."""

    @property
    def statistics(self) -> list[str]:
        """Statistic keys in row order."""
        return list(self._rows)

    def declare(self, layout: Layout, watch_index: int) -> bool:
        """Take over rows and columns of a layout; True when the stream must be registered again."""
        if self._known.get(watch_index) is layout:
            return False
        self._known[watch_index] = layout
        before = (len(self.layers), len(self._rows), self.watch)
        for layer in layout.layers:
            column = _column_key(watch_index, layer)
            if column not in self._columns:
                self._columns[column] = len(self.layers)
                self.layers.append(msgspec.structs.replace(layer, name=self._free_name(layer.name)))
        for key in layout.statistics:
            self._rows.setdefault(key, len(self._rows))
        if self.watch is None or watch_index == 0:
            self.watch = layout.watch
        since = [known.watch.kept_since for known in self._known.values() if known.watch.kept_since is not None]
        self.watch = msgspec.structs.replace(self.watch, kept_since=max(since, default=None))
        return (len(self.layers), len(self._rows), self.watch) != before

    def reports(self, items: list[Item]) -> list[Report]:
        """Reports of one step's items, whose layouts are declared: one, if it holds everything.

        Reads device tensors: for the worker thread only. A value that is no number is left out with a log line.
        """
        drafts: list[_Draft] = []
        self.measured = []
        for item in items:
            if isinstance(item, AttemptStart | WatchChange):
                continue
            draft = self._measured(item) if isinstance(item, MeasuredStep) else self._logged(item)
            if not (drafts and _merge_into(drafts[-1], draft)):
                drafts.append(draft)
        found = [part for draft in drafts for part in self._split(draft)]
        parts = sum(part.totals is not None for part in found)
        return [self._numbered(part, parts) for part in found if part.scalars or part.totals is not None]

    def scalars_report(self, step: int, time: float, scalars: dict[str, float]) -> Report:
        """A report of scalars alone."""
        return self._numbered(_Draft(step, time, dict(scalars)))

    def _measured(self, item: MeasuredStep) -> _Draft:
        measurement, layout = item.measurement, item.measurement.layout
        if item.ready is not None:
            item.ready.synchronize()
        scalars = {name: float(value) for name, value in measurement.scalars.items()}
        if not layout.statistics:
            return _Draft(measurement.step, measurement.time, scalars)
        table = measurement.table()
        merged = reduce_shards(table, axis=0)
        rows = [self._rows[key] for key in layout.statistics]
        columns = [self._columns[_column_key(item.watch_index, layer)] for layer in layout.layers]
        totals = np.full((max(rows, default=-1) + 1, max(columns, default=-1) + 1), np.nan)
        totals[np.ix_(rows, columns)] = table.array
        model = np.full(totals.shape[0], np.nan)
        model[rows] = [merged.get(key, np.nan) for key in layout.statistics]
        self.measured.append(MeasuredTotals(measurement.step, measurement.time, table, merged, scalars))
        return _Draft(measurement.step, measurement.time, scalars, totals, model)

    def _split(self, draft: _Draft) -> list[_Draft]:
        """The draft; if its totals are too large for one request, several drafts of some layers each.

        They are reports of one step, which merge as shards do: each has its own layers and their totals.
        """
        if draft.totals is None or draft.totals.nbytes <= _LARGEST_TOTALS_BYTES:
            return [draft]
        keys = self.statistics[: draft.totals.shape[0]]
        width = max(1, _LARGEST_TOTALS_BYTES // (draft.totals.itemsize * len(keys)))
        parts: list[_Draft] = []
        for begin in range(0, draft.totals.shape[1], width):
            totals = draft.totals[:, : begin + width].copy()
            totals[:, :begin] = np.nan
            merged = reduce_shards(dict(zip(keys, totals, strict=True)), axis=0)
            model = np.array([merged.get(key, np.nan) for key in keys])
            parts.append(_Draft(draft.step, draft.time, {} if parts else draft.scalars, totals, model))
        return parts

    def _logged(self, item: LoggedScalars) -> _Draft:
        assert item.step is not None
        draft = _Draft(item.step, item.time)
        for name, value in item.values.items():
            try:
                draft.scalars[self._prefix + name] = number_of(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                self._say_unreadable(name, value)
        return draft

    def _numbered(self, draft: _Draft, parts: int = 1) -> Report:
        seq, time = self._next_seq, self._time.of(draft.time)
        self._next_seq += 1
        if draft.totals is None or draft.model is None:
            return Report(seq=seq, step=draft.step, time=time, scalars=draft.scalars)
        return Report(
            seq=seq,
            step=draft.step,
            time=time,
            scalars=draft.scalars,
            statistic_count=draft.totals.shape[0],
            layer_count=draft.totals.shape[1],
            statistics=array_to_bytes(draft.totals),
            model=array_to_bytes(draft.model),
            reports_of_step=parts,
        )

    def _say_unreadable(self, name: str, value: object) -> None:
        if name not in self._unreadable:
            self._unreadable.add(name)
            _LOG.warning("log: %s=%.100r is not a number and is left out (said once)", name, value)

    def _free_name(self, name: str) -> str:
        """Two watched models may use one name for different tensors; their numbers must not be added up."""
        free, count = name, 1
        while free in self._names:
            count += 1
            free = f"{name} ({count})"
        self._names.add(free)
        return free


def _merge_into(mate: _Draft, draft: _Draft) -> bool:
    """Merge a draft into an earlier one of the same step, if both fit into one report."""
    if mate.totals is not None and draft.totals is not None:
        return False
    if len(mate.scalars.keys() | draft.scalars.keys()) > LIMITS["scalars_per_report"]:
        return False
    mate.scalars.update(draft.scalars)
    if draft.totals is not None:
        mate.totals, mate.model, mate.time = draft.totals, draft.model, draft.time
    return True


def _column_key(watch_index: int, layer: Layer) -> tuple[object, ...]:
    return watch_index, layer.name, tuple(layer.shape), layer.dtype, layer.elements
