"""Which steps a burst covers: from their numbers alone, so that all ranks agree without asking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["CYCLE_WINDOWS", "Schedule", "Span"]

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
