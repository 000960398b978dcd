"""The interface between measuring and delivering: a measured step, the reporter that takes it, a watch's last step.

The two sides do not import each other (`lint-imports` holds them to that). Beside these types `session.py` passes
`worker_cpu_seconds`, `last_step_shown` and the folder of saved numbers from the run to the watch. At its end a run
prints its watches.

`watching` fills a `Measurement` and gives it to a `Reporter`: `session.py`'s, which passes it to `Run.measured`, or
a test's own. A run asks a watch, as a `StepSource`, for its step. Rows and columns are found by name, so their
first order is free; later layouts only append. Nothing but `Measurement.table` blocks
(`tests/agent/test_no_synchronisation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from collage_monitor import wire
from collage_monitor.totals_table import Axis, Table

__all__ = ["Layout", "Measurement", "Reporter", "StepSource"]


@dataclass(frozen=True)
class Layout:
    """The meaning of a measurement's rows (statistic keys) and columns (layers), and how it is measured.

    A later layout of the same watch only appends rows and columns; a tensor that replaces another keeps its column.
    """

    layers: tuple[wire.Layer, ...]
    statistics: tuple[str, ...]
    watch: wire.WatchInfo


@dataclass(frozen=True)
class Measurement:
    """One measured step: estimated totals, still on the optimizer's device.

    `totals` is float64 [statistic][layer] in the layout's order, NaN for "not reported"; it is never written
    again. `time` is Unix time in seconds. `scalars` are the agent's own (`bytes_per_parameter` …): numbers, or
    tensors [()] on the device.
    """

    layout: Layout
    step: int
    time: float
    totals: torch.Tensor
    scalars: dict[str, float | torch.Tensor] = field(default_factory=dict)

    def table(self) -> Table[NDArray[np.float64]]:
        """The totals on the host, by name. Synchronises the device: for the worker thread and for `summary()`."""
        names = (layer.name for layer in self.layout.layers)
        return Table(Axis(self.layout.statistics), Axis(names), self.totals.detach().cpu().numpy())


class Reporter(Protocol):
    """Takes measurements from the training thread. Neither call blocks, synchronises or raises."""

    def started(self, first_step: int) -> None:
        """The watched optimizer is about to take its first step under the agent, number `first_step`."""

    def measured(self, measurement: Measurement) -> None:
        """A measured step is complete."""


class StepSource(Protocol):
    """The interface of a watch that a run needs: the last completed step, and whether steps are taken that it does
    not see."""

    @property
    def step(self) -> int | None:
        """Number of the last completed optimizer step; None before the first."""

    def look(self) -> Layout | None:
        """Check whether something steps the weights unseen; returns the layout that says so, if it is new."""
