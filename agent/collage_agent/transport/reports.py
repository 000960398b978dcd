"""From what the training thread left in the queue to the reports of one stream: blocks, seq, and what they mean."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from collage_agent.measurement import Layout, Measurement
from collage_monitor.statistics import reduce_shards
from collage_monitor.wire import LIMITS, Layer, Report, WatchInfo, block_to_bytes

__all__ = ["Item", "KeptTensor", "Logged", "Measured", "ReportMaker", "Started", "SteadyTime", "moment_on"]

_LOG = logging.getLogger("collage_agent")
_ITEM_BYTES = 512
_LARGEST_PART_BYTES = 12 * 2**20
"""Of a block; what stands before a part is NaN, which compression makes next to nothing."""
_CLOCK_WAS_SET_SECONDS = 1.0
"""A report this much older than the one before it means that the clock was set back."""


def moment_on(device: torch.device) -> torch.cuda.Event | None:
    """A mark behind all work that this thread has given to a CUDA device so far; None for the host.

    The worker waits for the mark, not for a stream: the training may run on a stream of its own. Does not
    synchronise.
    """
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@dataclass(frozen=True)
class KeptTensor:
    """One number, cloned on its device when it was logged."""

    tensor: torch.Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> KeptTensor:
        """A clone that later changes of the tensor do not reach. Does not synchronise."""
        clone = tensor.detach().clone()
        return cls(clone, moment_on(clone.device))

    def number(self) -> float:
        """The number. Synchronises: for the worker thread only."""
        if self.ready is not None:
            self.ready.synchronize()
        local = self.tensor.to_local() if hasattr(self.tensor, "to_local") else self.tensor
        return float(local.item())


@dataclass(frozen=True)
class Started:
    """The first optimizer step of the run in this process is about to be taken."""

    first_step: int
    size_bytes: int = 0


@dataclass(frozen=True)
class Measured:
    """A measured step of the `watch_index`-th watch."""

    measurement: Measurement
    watch_index: int
    ready: torch.cuda.Event | None = None

    @property
    def size_bytes(self) -> int:
        """The totals, on whatever device they are."""
        totals = self.measurement.totals
        return _ITEM_BYTES + totals.numel() * totals.element_size()


@dataclass(frozen=True)
class Logged:
    """Scalars as they were logged; tensors are `KeptTensor`.

    `step` None: logged before the watched optimizer's first step. `counted`: the step is only the number of the
    `log` call, because nothing was watched.
    """

    step: int | None
    time: float
    values: dict[str, Any]
    counted: bool = False

    @property
    def size_bytes(self) -> int:
        """An estimate: scalars are small."""
        return _ITEM_BYTES * (1 + len(self.values))


Item = Started | Measured | Logged


@dataclass
class _Draft:
    """A report in the making."""

    step: int
    time: float
    scalars: dict[str, float] = field(default_factory=dict)
    block: NDArray[np.float64] | None = None
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

    Several watches share the stream: each fills its own rows and columns of the common block, NaN elsewhere.
    """

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.watch: WatchInfo | None = None
        self._rows: dict[str, int] = {}
        self._columns: dict[tuple[object, ...], int] = {}
        self._names: set[str] = set()
        self._unreadable: set[str] = set()
        self._known: dict[int, Layout] = {}
        self._next_seq = 0
        self._time = SteadyTime()

    @property
    def statistics(self) -> list[str]:
        """Statistic keys in row order."""
        return list(self._rows)

    def declare(self, layout: Layout, watch_index: int) -> bool:
        """Take over rows and columns of a layout; True when the stream must be registered anew."""
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
        return (len(self.layers), len(self._rows), self.watch) != before

    def reports(self, items: list[Measured | Logged]) -> list[Report]:
        """Reports of these items, oldest first; scalars and measurement of a step share one. Layouts are declared.

        Reads device tensors: for the worker thread only. A value that is no number is left out with a log line.
        """
        drafts: list[_Draft] = []
        open_drafts: dict[int, _Draft] = {}
        for item in items:
            draft = self._measured(item) if isinstance(item, Measured) else self._logged(item)
            mate = open_drafts.get(draft.step)
            if mate is not None and _joined(mate, draft):
                continue
            drafts.append(draft)
            open_drafts[draft.step] = draft
        parts = [part for draft in drafts for part in self._parts(draft)]
        return [self._numbered(part) for part in parts if part.scalars or part.block is not None]

    def scalars_report(self, step: int, time: float, scalars: dict[str, float]) -> Report:
        """A report of scalars alone."""
        return self._numbered(_Draft(step, time, dict(scalars)))

    def _measured(self, item: Measured) -> _Draft:
        measurement = item.measurement
        layout = measurement.layout
        if item.ready is not None:
            item.ready.synchronize()
        totals = measurement.to_numpy()
        merged = reduce_shards(dict(zip(layout.statistics, totals, strict=True)), axis=0)
        rows = [self._rows[key] for key in layout.statistics]
        columns = [self._columns[_column_key(item.watch_index, layer)] for layer in layout.layers]
        block = np.full((max(rows, default=-1) + 1, max(columns, default=-1) + 1), np.nan)
        block[np.ix_(rows, columns)] = totals
        model = np.full(block.shape[0], np.nan)
        model[rows] = [merged.get(key, np.nan) for key in layout.statistics]
        scalars = {name: float(value) for name, value in measurement.scalars.items()}
        return _Draft(measurement.step, measurement.time, scalars, block, model)

    def _parts(self, draft: _Draft) -> list[_Draft]:
        """The draft, in parts of some layers each when its block is too large for one request.

        The parts are reports of one step, which merge as shards do: each has its own layers and their totals.
        """
        if draft.block is None or draft.block.nbytes <= _LARGEST_PART_BYTES:
            return [draft]
        keys = self.statistics[: draft.block.shape[0]]
        width = max(1, _LARGEST_PART_BYTES // (draft.block.itemsize * len(keys)))
        parts: list[_Draft] = []
        for begin in range(0, draft.block.shape[1], width):
            block = draft.block[:, : begin + width].copy()
            block[:, :begin] = np.nan
            merged = reduce_shards(dict(zip(keys, block, strict=True)), axis=0)
            model = np.array([merged.get(key, np.nan) for key in keys])
            parts.append(_Draft(draft.step, draft.time, {} if parts else draft.scalars, block, model))
        return parts

    def _logged(self, item: Logged) -> _Draft:
        assert item.step is not None
        draft = _Draft(item.step, item.time)
        for name, value in item.values.items():
            try:
                draft.scalars[name] = _number(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                self._say_unreadable(name, value)
        return draft

    def _numbered(self, draft: _Draft) -> Report:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        time = self._time.of(draft.time)
        if draft.block is None or draft.model is None:
            return Report(seq=seq, step=draft.step, time=time, scalars=draft.scalars)
        return Report(
            seq=seq,
            step=draft.step,
            time=time,
            scalars=draft.scalars,
            statistic_count=draft.block.shape[0],
            layer_count=draft.block.shape[1],
            statistics=block_to_bytes(draft.block),
            model=block_to_bytes(draft.model),
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


def _joined(mate: _Draft, draft: _Draft) -> bool:
    """Put a draft into an earlier one of the same step, if they have room for each other."""
    if mate.block is not None and draft.block is not None:
        return False
    if len(mate.scalars.keys() | draft.scalars.keys()) > LIMITS["scalars_per_report"]:
        return False
    mate.scalars.update(draft.scalars)
    if draft.block is not None:
        mate.block, mate.model, mate.time = draft.block, draft.model, draft.time
    return True


def _number(value: Any) -> float:
    if isinstance(value, KeptTensor):
        return value.number()
    return float(value.item() if hasattr(value, "item") else value)


def _column_key(watch_index: int, layer: Layer) -> tuple[object, ...]:
    return watch_index, layer.name, tuple(layer.shape), layer.dtype, layer.elements
