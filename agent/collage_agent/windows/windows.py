"""The bursts under way: u of each step is added up, and at a window's end compared with θ's displacement."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.buckets.planned import Planned
from collage_agent.sample import stored
from collage_agent.stats import WINDOW_SUMS, nonfinite, window_block_sums
from collage_agent.training.scaling import loss_scaling
from collage_agent.windows.schedule import Schedule, Span

__all__ = ["Windows"]

Rows = tuple[tuple[str, ...], Tensor, Tensor]
"""Statistic keys, totals fp64 [keys, tensors], and the tensors' columns."""


@dataclass
class _Burst:
    """One window under way: U of each bucket's slots, the weights at its start, and whether it is spoilt."""

    span: Span
    intended: list[Tensor] = field(default_factory=list)
    start: list[dict[str, Tensor]] = field(default_factory=list)
    spoilt: Tensor | None = None


class Windows:
    """Adds up intended updates over bursts of steps. Synchronises nothing; runs inside `isolated`.

    A burst is given up without a word where a step is missing, somebody else wrote to the weights, other tensors
    are stepped, the loss scaler skipped a step or a value was not finite: U and E then belong to different things.
    """

    def __init__(self, lengths: Sequence[int], every: int) -> None:
        self.schedule = Schedule(lengths, every)
        self._bursts: dict[int, _Burst] = {}
        self.plan: list[Planned] = []
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
        plan: Callable[[], list[Planned]],
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

    def after(self, optimizer: Optimizer) -> list[Rows]:
        """The totals of the windows that the step just taken ends: estimated, not a number where spoilt."""
        ending = [burst for burst in self._bursts.values() if burst.span.end == self._step]
        found: list[Rows] = []
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
                keys = tuple(f"{name}/{burst.span.length}" for name in WINDOW_SUMS)
                found.append((keys, sums * planned.sizes.scale, planned.columns))
        spoilt = {f"/{burst.span.length}": burst.spoilt for burst in ending}
        return [
            (keys, _unless(spoilt["/" + keys[0].rpartition("/")[2]], totals), columns)
            for keys, totals, columns in found
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
