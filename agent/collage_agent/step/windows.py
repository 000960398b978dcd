"""Windows: the sum of u over several consecutive steps, against how far the weights moved over the same steps.

Lengths of windows are fixed for a run, so that curves can be compared (`tests/agent/step/test_windows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.sample.stored_parts import PARAMETER
from collage_agent.stats.block_sums import nonfinite
from collage_agent.stats.casts import cast_block_sums
from collage_agent.stats.edq import squared_block_sums
from collage_agent.stats.several_steps import window_block_sums
from collage_agent.stats.step_view import LargestWeights
from collage_agent.step.bucket import Bucket
from collage_agent.step.observed_step import KeptWeights
from collage_agent.training.skipped_steps import loss_scaling
from collage_monitor.totals_table import Axis, Table

__all__ = ["WindowSchedule", "WindowSpan", "Windows"]

_CYCLE_WINDOWS: Final = 4
"""A window of k steps ends every 4·k steps, rounded up to measured ones: one step in four lies in a window."""


@dataclass(frozen=True)
class WindowSpan:
    """A window of `length` steps, from the state after step `begin` to that after step `end`, a measured one."""

    length: int
    begin: int
    end: int


class WindowSchedule:
    """The windows of `lengths` steps, for steps measured every `every`; they share steps and end together."""

    def __init__(self, lengths: Sequence[int], every: int) -> None:
        self._cycles = {length: every * -(-_CYCLE_WINDOWS * length // every) for length in lengths}

    @property
    def cycle(self) -> int:
        """Steps from one end of the longest window to the next, before the governor doubles it."""
        return max(self._cycles.values(), default=0)

    def covering(self, step: int, doublings: int) -> list[WindowSpan]:
        """The windows that step number `step`, about to be taken, belongs to; `doublings` are the governor's."""
        found = []
        for length, cycle in self._cycles.items():
            stretched = cycle << doublings
            end = -(-step // stretched) * stretched
            if step > end - length:
                found.append(WindowSpan(length, end - length, end))
        return found


@dataclass
class _OpenWindow:
    """A window that has begun: U of each bucket's slots, the weights at its start, and whether it is invalid."""

    span: WindowSpan
    intended: list[Tensor] = field(default_factory=list)
    start: list[KeptWeights] = field(default_factory=list)
    largest: list[LargestWeights | None] = field(default_factory=list)
    invalid: Tensor | None = None

    def totals(self, bucket: Bucket, by_block: Table[Tensor]) -> Table[Tensor]:
        """Estimated totals of sums by block, not a number if the window is invalid."""
        keys = Axis(f"{key}/{self.span.length}" for key in by_block.statistics)
        totals = bucket.sizes.segments.sums(by_block.array) * bucket.sizes.factors(keys)
        return Table(keys, bucket.layers, _nan_where(self.invalid, totals))


class Windows:
    """Sums intended updates over windows of steps. Synchronises nothing; runs inside `isolated`.

    A window is discarded silently if a step is missing, something else wrote to the weights, other tensors are
    stepped, the loss scaler skipped a step, or a value was not finite: U and E would then describe different
    updates.
    """

    def __init__(self, lengths: Sequence[int], every: int) -> None:
        self.schedule = WindowSchedule(lengths, every)
        self._open: dict[int, _OpenWindow] = {}
        self.buckets: list[Bucket] = []
        self._signature: object = None
        self._step = -1

    @property
    def is_open(self) -> bool:
        """Whether a window is open, so that external writes matter."""
        return bool(self._open)

    def discard(self) -> None:
        """Discard the open windows."""
        self._open = {}

    def plan_anew(self) -> None:
        """Discard the open windows, and plan the buckets again before the next one."""
        self.discard()
        self._signature = None

    def before(
        self,
        optimizer: Optimizer,
        step: int,
        doublings: int,
        signature: object,
        plan: Callable[[], list[Bucket]],
    ) -> None:
        """Add u of step number `step`, which the optimizer is about to take, to the windows that it belongs to.

        `signature` says which tensors are stepped alike, `plan` gathers them into buckets.
        """
        if step != self._step + 1:
            self.discard()
        self._step = step
        spans = {span.length: span for span in self.schedule.covering(step, doublings)}
        self._open = {k: window for k, window in self._open.items() if spans.get(k) == window.span}
        starting = [span for span in spans.values() if step == span.begin + 1]
        if not (starting or self._open):
            return
        if signature != self._signature:
            self.discard()
            self.buckets, self._signature = plan(), signature
        self._open.update({span.length: _OpenWindow(span) for span in starting})
        scale, skipped = loss_scaling(optimizer)
        for index, bucket in enumerate(self.buckets):
            bucket.gather_before(optimizer)
            largest = bucket.largest_weights(optimizer) if starting else None
            intended = bucket.intended(scale)
            for window in self._open.values():
                if index == len(window.intended):
                    window.intended.append(intended.clone())
                    window.start.append(bucket.weights_before())
                    window.largest.append(largest)
                else:
                    window.intended[index].add_(intended)
                window.invalid = _any_set(window.invalid, bucket.out_of_step)
        if skipped is not None:
            for window in self._open.values():
                window.invalid = _any_set(window.invalid, skipped.ne(0))

    def after(self, optimizer: Optimizer) -> list[Table[Tensor]]:
        """The totals of the windows that the step just taken ends: estimated, not a number where invalid."""
        ending = [window for window in self._open.values() if window.span.end == self._step]
        found: list[tuple[_OpenWindow, Bucket, Table[Tensor]]] = []
        for window in ending:
            del self._open[window.span.length]
        for index, bucket in enumerate(self.buckets if ending else []):
            after, largest = bucket.weights_after(optimizer), bucket.largest_weights(optimizer)
            block = bucket.layout.block
            for window in ending:
                start = window.start[index]
                effective, visible = _changes(start, after)
                intended = bucket.without_padding(window.intended[index])
                bad = nonfinite(intended) | nonfinite(effective) | nonfinite(visible)
                window.invalid = _any_set(window.invalid, bad)
                found.append((window, bucket, window_block_sums(intended, effective, visible, block)))
                copies = bucket.copies(start, after, (window.largest[index], largest))
                if copies is not None:
                    squares = squared_block_sums(intended.unsqueeze(0), block)[0]
                    sums = cast_block_sums(copies, intended, squares, bucket.vacant(), block, "cast_window")
                    found.append((window, bucket, sums))
        return [window.totals(bucket, sums) for window, bucket, sums in found]


def _changes(before: KeptWeights, after: KeptWeights) -> tuple[Tensor, Tensor]:
    """E and Eᵛ, fp64 [slots]: Σ over components of (after − before); a component that is new began at 0."""
    changes: dict[str, Tensor] = {}
    for key, values in after.values.items():
        change = values.to(torch.float64, copy=True)
        changes[key] = change.sub_(before.values[key]) if key in before.values else change
    visible = changes[PARAMETER]
    effective = changes[after.stored[0]]
    for key in after.stored[1:]:
        effective = effective + changes[key]
    return effective, visible


def _any_set(known: Tensor | None, more: Tensor | None) -> Tensor | None:
    """bool [()]: whether any element of either is set; None: both are None."""
    if more is None:
        return known
    found = more.ne(0).any()
    return found if known is None else known.to(found.device).logical_or(found)


def _nan_where(invalid: Tensor | None, totals: Tensor) -> Tensor:
    return totals if invalid is None else torch.where(invalid.to(totals.device), torch.nan, totals)
