"""The bounded queue between the training thread and the worker: putting never blocks, the oldest goes first.

`run.py` fills it from the training thread, `stream_sender.py` empties it. Bounds are `DeliveryLimits`'. What is
dropped is counted by reason (`tests/agent_delivery/test_queue.py`).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from collage_agent.launch.identity import Identity
from collage_agent.measurement import Layout, Measurement
from collage_agent.transport.report_counts import ReportCounts
from collage_monitor.wire import LIMITS

__all__ = [
    "AttemptStart",
    "BoundedQueue",
    "Item",
    "LoggedScalars",
    "MeasuredStep",
    "StepItems",
    "TensorSnapshot",
    "WatchChange",
    "cuda_event_on",
    "not_finite_since",
    "number_of",
]

_ITEM_BYTES: Final = 512
_MOST_ITEMS: Final = 64
"""Of one step that wait together; more than that come from a program that logs without taking steps."""
_MANY_STEPS: Final = 500
"""So many wait for no more: a loop that only logs takes far more steps a second than one that trains."""


def cuda_event_on(device: torch.device) -> torch.cuda.Event | None:
    """A mark behind all work that this thread has given to a CUDA device so far; None for the host.

    The worker waits for the mark, not for a stream: the training may run on a stream of its own. Does not
    synchronise.
    """
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@dataclass(frozen=True)
class TensorSnapshot:
    """One number, cloned on its device when it was logged."""

    tensor: torch.Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSnapshot:
        """A clone that later changes of the tensor do not reach. Does not synchronise."""
        clone = tensor.detach().clone()
        return cls(clone, cuda_event_on(clone.device))

    def number(self) -> float:
        """The number. Synchronises: for the worker thread only."""
        if self.ready is not None:
            self.ready.synchronize()
        local = self.tensor.to_local() if hasattr(self.tensor, "to_local") else self.tensor
        return float(local.item())


def _snapshot_of(value: Any) -> Any:
    """A copy of a logged value, safe from later changes. A tensor is cloned on its device; nothing waits."""
    if isinstance(value, torch.Tensor):
        return TensorSnapshot.of(value) if value.numel() == 1 else f"tensor of shape {tuple(value.shape)}"
    return value


def number_of(value: Any) -> float:
    """The number that was logged. Synchronises if it is on a device.

    Raises:
        TypeError, ValueError: it is none.
    """
    if isinstance(value, TensorSnapshot):
        return value.number()
    return float(value.item() if hasattr(value, "item") else value)


def not_finite_since(value: Any, step: int, since: float | torch.Tensor) -> float | torch.Tensor:
    """The step since which a logged value is not finite, if it was so since `since`; NaN: it is. Nothing waits.

    Raises:
        TypeError, ValueError: it is no number.
    """
    if isinstance(value, TensorSnapshot):
        tensor = value.tensor.to_local() if hasattr(value.tensor, "to_local") else value.tensor
        first = torch.full((), math.nan, dtype=torch.float64, device=tensor.device)
        known = since if isinstance(since, torch.Tensor) else first.fill_(since)
        return torch.where(tensor.reshape(()).isfinite(), math.nan, torch.where(known.isnan(), float(step), known))
    if math.isfinite(number_of(value)):
        return math.nan
    return since if isinstance(since, torch.Tensor) or not math.isnan(since) else float(step)


@dataclass(frozen=True)
class AttemptStart:
    """An attempt begins: its first optimizer step is about to be taken. Never dropped, and not counted.

    `identity` says who reports from now on, where training has gone back to an earlier step.
    """

    first_step: int
    identity: Identity | None = None
    step: None = None
    size_bytes: int = 0


@dataclass(frozen=True)
class WatchChange:
    """The description of the `watch_index`-th watch has changed between measured steps. Never dropped, not
    counted."""

    layout: Layout
    watch_index: int
    step: None = None
    size_bytes: int = 0


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step of the `watch_index`-th watch."""

    measurement: Measurement
    watch_index: int
    ready: torch.cuda.Event | None = None

    @property
    def step(self) -> int:
        """The measured step."""
        return self.measurement.step

    @property
    def size_bytes(self) -> int:
        """The totals, on whatever device they are."""
        totals = self.measurement.totals
        return _ITEM_BYTES + totals.numel() * totals.element_size()


@dataclass(frozen=True)
class LoggedScalars:
    """Scalars as they were logged; tensors are `TensorSnapshot`.

    `step` None: logged before the watched optimizer's first step. `counted`: the step is only the number of the
    `log` call, because nothing was watched.
    """

    step: int | None
    time: float
    values: dict[str, Any]
    counted: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any], step: int | None, now: float, counted: bool) -> Iterator[LoggedScalars]:
        """The values of one `log` call, in parts that each fit into a report."""
        kept = ((str(name), _snapshot_of(value)) for name, value in values.items())
        while part := dict(itertools.islice(kept, LIMITS["scalars_per_report"])):
            yield cls(step, now, part, counted)

    @property
    def size_bytes(self) -> int:
        """An estimate: scalars are small."""
        return _ITEM_BYTES * (1 + len(self.values))


Item = AttemptStart | WatchChange | MeasuredStep | LoggedScalars
_CONTROL: Final = (AttemptStart, WatchChange)


@dataclass
class StepItems:
    """The measurements and logged values of one step, in order: usually one report."""

    items: list[Item] = field(default_factory=list)
    size_bytes: int = 0
    begun: float = field(default_factory=time.monotonic)

    @property
    def time(self) -> float:
        """When the last of it was measured or logged; Unix seconds."""
        last = self.items[-1]
        if isinstance(last, AttemptStart | WatchChange):
            return 0.0
        return last.time if isinstance(last, LoggedScalars) else last.measurement.time

    @property
    def is_control(self) -> bool:
        """Whether it starts an attempt, or tells of a watch."""
        return isinstance(self.items[0], _CONTROL)

    def has_room_for(self, item: Item) -> bool:
        """Whether the item is of the same step, and not too many of it wait already."""
        first = self.items[0]
        same_step = not isinstance(first, _CONTROL) and not isinstance(item, _CONTROL) and first.step == item.step
        return same_step and len(self.items) < _MOST_ITEMS

    def add(self, item: Item) -> None:
        """Take the item in."""
        self.items.append(item)
        self.size_bytes += item.size_bytes

    def join(self, later: StepItems, most_items: int) -> None:
        """Add values logged later at the same step: the last value of each name counts, and earlier ones are
        dropped."""
        logged_later: set[str] = set()
        kept: list[Item] = []
        for item in reversed([*self.items, *later.items]):
            names = item.values.keys() if isinstance(item, LoggedScalars) else None
            if names is None or not names <= logged_later:
                kept.append(item)
            logged_later |= names or set()
        self.items = kept[:most_items][::-1]
        self.size_bytes = sum(item.size_bytes for item in self.items)


class BoundedQueue:
    """First in, first out, at most `steps` steps and `size_bytes` bytes; entries that do not fit are counted as
    dropped.

    The newest step stays for `open_seconds`, so that values logged for it later join the same report.
    The lock is held for a few operations only, by both sides, so the training thread never waits for the network,
    the disk or the device.
    """

    def __init__(
        self,
        steps: int,
        size_bytes: int,
        open_seconds: float,
        counts: ReportCounts,
        before_first_step: Callable[[], None] | None = None,
    ) -> None:
        """before_first_step: is called before the first item is put that is a measurement or a scalar."""
        self._limit_steps = steps
        self._limit_bytes = size_bytes
        self._open_seconds = open_seconds
        self._counts = counts
        self._ready = threading.Condition(threading.Lock())
        self._entries: deque[StepItems] = deque()
        self._bytes = 0
        self._urgent = False
        self._before_first_step = before_first_step

    def put(self, item: Item) -> None:
        """Append an item; when there is no room the oldest steps give way."""
        if self._before_first_step is not None and not isinstance(item, _CONTROL):
            begin, self._before_first_step = self._before_first_step, None
            begin()
        with self._ready:
            if not self._entries or not self._entries[-1].has_room_for(item):
                self._entries.append(StepItems())
                if not isinstance(item, _CONTROL):
                    self._counts.add()
            self._entries[-1].add(item)
            self._bytes += item.size_bytes
            self._make_room()
            if len(self._entries) <= 2 or self._has_many():
                self._ready.notify()

    def take(self, limit: int) -> list[StepItems]:
        """Up to `limit` steps that are complete, oldest first; none when there are none."""
        with self._ready:
            taken: list[StepItems] = []
            while len(taken) < limit and self._complete():
                taken.append(self._entries.popleft())
                self._bytes -= taken[-1].size_bytes
            return taken

    def wait_for_steps(self, linger_seconds: float, longest_seconds: float) -> None:
        """Wait for a complete step, at most `longest_seconds`, then `linger_seconds` for more; `wake` ends both."""
        end = time.monotonic() + longest_seconds
        with self._ready:
            while not self._urgent and not self._complete():
                now = time.monotonic()
                closes = self._entries[0].begun + self._open_seconds if self._entries else end
                if now >= end:
                    return
                self._ready.wait(max(0.0, min(end, closes) - now))
            self._ready.wait_for(lambda: self._urgent or self._has_many(), linger_seconds)

    def wake(self) -> None:
        """From now on nobody waits, and every step is complete: the run is ending."""
        with self._ready:
            self._urgent = True
            self._ready.notify_all()

    def __len__(self) -> int:
        with self._ready:
            return len(self._entries)

    def _complete(self) -> bool:
        """Whether the oldest entry can be taken."""
        if not self._entries:
            return False
        if len(self._entries) > 1 or self._urgent or self._entries[0].is_control:
            return True
        return time.monotonic() >= self._entries[0].begun + self._open_seconds

    def _has_many(self) -> bool:
        return (
            len(self._entries) >= min(_MANY_STEPS, self._limit_steps // 2) or 2 * self._bytes >= self._limit_bytes
        )

    def _make_room(self) -> None:
        kept: list[StepItems] = []
        while self._entries and (self._bytes > self._limit_bytes or len(self._entries) > self._limit_steps):
            oldest = self._entries.popleft()
            if oldest.is_control:
                kept.append(oldest)
            else:
                self._bytes -= oldest.size_bytes
                self._counts.drop("queue_full")
        self._entries.extendleft(reversed(kept))
