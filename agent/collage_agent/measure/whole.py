"""Whole-tensor totals from inside a step of our own optimizers: asking for them, what they cost, their rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from collage_agent.optim import STEP_TOTALS, CollageOptimizer
from collage_agent.options import WatchOptions
from collage_agent.training.parameters import WatchedParameter
from collage_monitor.statistics import INTERVAL_PAIRS

__all__ = ["WHOLE_STATISTICS", "WholeTotals"]

_VARIANCES: Final = tuple(
    f"{name}/{metric}"
    for name in ("variance_numerator", "variance_denominator", "covariance")
    for metric, (numerator, _) in INTERVAL_PAIRS.items()
    if numerator in STEP_TOTALS
)
WHOLE_STATISTICS: Final = (*STEP_TOTALS, "sampled", *_VARIANCES)
"""What is known of a whole tensor: every element was looked at, so nothing varies with the sample."""
_ELEMENTS: Final = STEP_TOTALS.index("elements")


class WholeTotals:
    """Asks one optimizer for the totals of its measured steps, and says what making them has added to the step.

    Nothing is asked of other optimizers, nor where everything is measured whole anyway. A `fast` compiled step is
    left alone, as another compilation promises no bits; a bit-identical one is asked only without a budget, as its
    measured form takes seconds to compile. Synchronises no device.
    """

    def __init__(self, optimizer: Optimizer, options: WatchOptions) -> None:
        self._optimizer = optimizer if isinstance(optimizer, CollageOptimizer) else None
        self._forms = {None} if options.budget is not None else {None, "bit-identical"}
        self._all_sampled = options.sample == "all"
        self._asked = False
        self._began: tuple[float, float] | None = None
        self._plain: tuple[float, float] | None = None
        self._columns: dict[torch.device, tuple[tuple[int, ...], Tensor]] = {}

    @property
    def possible(self) -> bool:
        """Whether there is somebody to ask."""
        if self._optimizer is None or self._all_sampled:
            return False
        return all(group["compiled"] in self._forms for group in self._optimizer.param_groups)

    def begins(self, *, asked: bool) -> None:
        """The optimizer is about to step; with `asked` it makes totals on the way."""
        self._asked = asked and self.possible
        if self._asked:
            assert self._optimizer is not None
            self._optimizer.measure_next_step()
        self._began = _clocks()

    def ended(self) -> tuple[float, float]:
        """CPU and wall seconds that making totals added to the step just over, beside the last timed one without.

        A step that makes totals takes a little more than twice as long: half of it, where no other was timed.
        """
        if self._began is None:
            return 0.0, 0.0
        now, (cpu, wall) = _clocks(), self._began
        took = now[0] - cpu, now[1] - wall
        self._began = None
        if not self._asked:
            self._plain = took
            return 0.0, 0.0
        without = self._plain or (took[0] / 2, took[1] / 2)
        return max(took[0] - without[0], 0.0), max(took[1] - without[1], 0.0)

    def rows(
        self, watched: Sequence[WatchedParameter], members: Sequence[int]
    ) -> list[tuple[tuple[str, ...], Tensor, Tensor]]:
        """Keys, totals fp64 [keys, tensors] and columns [tensors] of those `members` whose totals the step made.

        Pieces of one flat parameter are left to the sample: its totals don't tell them apart.
        """
        if not self._asked or self._optimizer is None:
            return []
        self._asked = False
        made = self._optimizer.step_totals()
        devices: dict[torch.device, list[int]] = {}
        for member in members:
            totals = made.get(watched[member].parameter)
            if totals is not None and watched[member].shard.start is None:
                devices.setdefault(totals.device, []).append(member)
        return [
            (WHOLE_STATISTICS, _rows_of(made, [watched[index] for index in own]), self._columns_of(device, own))
            for device, own in devices.items()
        ]

    def _columns_of(self, device: torch.device, members: list[int]) -> Tensor:
        known = self._columns.get(device)
        if known is None or known[0] != tuple(members):
            known = self._columns[device] = tuple(members), torch.tensor(members).to(device)
        return known[1]


def _clocks() -> tuple[float, float]:
    """The process's CPU, as a step may use several threads, and the time on the wall."""
    return time.process_time(), time.perf_counter()


def _rows_of(made: Mapping[Tensor, Tensor], watched: Sequence[WatchedParameter]) -> Tensor:
    totals = torch.stack([made[entry.parameter] for entry in watched], 1)
    variances = totals.new_zeros(len(_VARIANCES), len(watched))
    return torch.cat((totals, totals[_ELEMENTS : _ELEMENTS + 1], variances))
