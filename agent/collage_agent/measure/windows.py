"""Windows: u added up over bursts of consecutive steps, against what the weights have moved by since."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.buckets.plan import BucketPlan
from collage_agent.sample import stored
from collage_agent.stats.blocks import nonfinite
from collage_agent.stats.several_steps import WINDOW_SUMS, window_block_sums
from collage_agent.training.scaling import loss_scaling
from collage_monitor.table import Axis, Table

__all__ = ["CYCLE_WINDOWS", "Schedule", "Span", "Windows"]

CYCLE_WINDOWS: Final = 4
"""A window of k steps ends every 4·k steps, rounded up to measured ones: one step in four lies in its bursts."""


@dataclass(frozen=True)
class Span:
    """A window of `length` steps, from the state after step `begin` to that after step `end`, a measured one."""

    length: int
    begin: int
    end: int


class Schedule:
    """The windows of `lengths` steps, for steps measured every `every`; they share steps and end together."""

    def __init__(self, lengths: Sequence[int], every: int) -> None:
        self._cycles = {length: every * -(-CYCLE_WINDOWS * length // every) for length in lengths}

    @property
    def cycle(self) -> int:
        """Steps from one end of the longest window to the next, before the governor doubles it."""
        return max(self._cycles.values(), default=0)

    def covering(self, step: int, doublings: int) -> list[Span]:
        """The windows that step number `step`, about to be taken, belongs to; `doublings` are the governor's."""
        found = []
        for length, cycle in self._cycles.items():
            stretched = cycle << doublings
            end = -(-step // stretched) * stretched
            if step > end - length:
                found.append(Span(length, end - length, end))
        return found


@dataclass
class _Burst:
    """One window under way: U of each bucket's slots, the weights at its start, and whether it is spoilt."""

    span: Span
    intended: list[Tensor] = field(default_factory=list)
    start: list[dict[str, Tensor]] = field(default_factory=list)
    spoilt: Tensor | None = None

    @property
    def statistics(self) -> Axis:
        """The keys of its totals."""
        return Axis(f"{name}/{self.span.length}" for name in WINDOW_SUMS)


class Windows:
    """Adds up intended updates over bursts of steps. Synchronises nothing; runs inside `isolated`.

    A burst is given up without a word where a step is missing, somebody else wrote to the weights, other tensors
    are stepped, the loss scaler skipped a step or a value was not finite: U and E then belong to different things.
    """

    def __init__(self, lengths: Sequence[int], every: int) -> None:
        self.schedule = Schedule(lengths, every)
        self._bursts: dict[int, _Burst] = {}
        self.plan: list[BucketPlan] = []
        self._signature: Hashable = None
        self._step = -1

    @property
    def running(self) -> bool:
        """Whether a burst is under way, so that foreign writes matter."""
        return bool(self._bursts)

    def drop(self) -> None:
        """Give up the bursts under way."""
        self._bursts = {}

    def before(
        self,
        optimizer: Optimizer,
        step: int,
        doublings: int,
        signature: Hashable,
        plan: Callable[[], list[BucketPlan]],
    ) -> None:
        """Add u of step number `step`, which the optimizer is about to take, to the windows that it belongs to.

        `signature` says which tensors are stepped alike, `plan` gathers them into buckets.
        """
        if step != self._step + 1:
            self.drop()
        self._step = step
        spans = {span.length: span for span in self.schedule.covering(step, doublings)}
        self._bursts = {k: burst for k, burst in self._bursts.items() if spans.get(k) == burst.span}
        starting = [span for span in spans.values() if step == span.begin + 1]
        if not (starting or self._bursts):
            return
        if signature != self._signature:
            self.drop()
            self.plan, self._signature = plan(), signature
        self._bursts.update({span.length: _Burst(span) for span in starting})
        scale, skipped = loss_scaling(optimizer)
        for index, planned in enumerate(self.plan):
            planned.gather_before(optimizer)
            intended = planned.bucket.intended(scale)
            for burst in self._bursts.values():
                if index == len(burst.intended):
                    burst.intended.append(intended.clone())
                    burst.start.append(planned.bucket.weights_before())
                else:
                    burst.intended[index].add_(intended)
                burst.spoilt = _either(burst.spoilt, planned.apart)
        if skipped is not None:
            for burst in self._bursts.values():
                burst.spoilt = _either(burst.spoilt, skipped.ne(0))

    def after(self, optimizer: Optimizer) -> list[Table[Tensor]]:
        """The totals of the windows that the step just taken ends: estimated, not a number where spoilt."""
        ending = [burst for burst in self._bursts.values() if burst.span.end == self._step]
        found: list[tuple[_Burst, BucketPlan, Tensor]] = []
        for burst in ending:
            del self._bursts[burst.span.length]
        for index, planned in enumerate(self.plan if ending else []):
            after = planned.bucket.weights_after(planned.states(optimizer))
            for burst in ending:
                kept = planned.bucket.intent.kept
                effective, visible = _moved(burst.start[index], after, kept)
                intended = planned.bucket.without_padding(burst.intended[index])
                bad = nonfinite(intended) | nonfinite(effective) | nonfinite(visible)
                burst.spoilt = _either(burst.spoilt, bad)
                sums = planned.sizes.columns.sums(
                    window_block_sums(intended, effective, visible, planned.bucket.layout.block)
                )
                found.append((burst, planned, sums * planned.sizes.scale))
        return [
            Table(burst.statistics, planned.layers, _unless(burst.spoilt, totals))
            for burst, planned, totals in found
        ]


def _moved(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], kept: stored.Composition
) -> tuple[Tensor, Tensor]:
    """E and Eᵛ, fp64 [slots]: Σ over components of (after − before); a component that is new began at 0."""
    changes: dict[str, Tensor] = {}
    for key, values in after.items():
        change = values.to(torch.float64)
        changes[key] = change.sub_(before[key]) if key in before else change
    visible = changes[stored.PARAMETER]
    keys = stored.stored_parameter(after, kept)
    effective = changes[keys[0]]
    for key in keys[1:]:
        effective = effective + changes[key]
    return effective, visible


def _either(known: Tensor | None, more: Tensor | None) -> Tensor | None:
    """bool [()]: whether anything is set in either; None: nothing can be."""
    if more is None:
        return known
    found = more.ne(0).any()
    return found if known is None else known.to(found.device).logical_or(found)


def _unless(spoilt: Tensor | None, totals: Tensor) -> Tensor:
    return totals if spoilt is None else torch.where(spoilt.to(totals.device), torch.nan, totals)
