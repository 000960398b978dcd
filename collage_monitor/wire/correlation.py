"""Answers about how two numbers go together over several runs."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from collage_monitor.wire.numbers import Number

__all__ = ["CorrelatedRun", "Correlation", "MissingValue"]


class CorrelatedRun(Struct, kw_only=True, frozen=True):
    """A run's `x` and `y`, each over the last `window` of what it reported; null if it reported none."""

    run_id: str
    name: str
    strategy: str | None
    x: Number | None
    y: Number | None


class MissingValue(Struct, kw_only=True, frozen=True):
    """A run left out of the coefficients: which of the two numbers it lacks, and why."""

    run_id: str
    key: str
    reason: Literal["not reported", "undefined", "not finite"]


class Correlation(Struct, kw_only=True, frozen=True):
    """Two metrics or logged scalars over runs. `n` runs have both as finite numbers.

    `pearson` judges a straight line, `spearman` (Pearson's coefficient of the mean ranks) any monotone relation.
    Both are null below three runs, and if x or y is the same in all of them.
    """

    x: str
    y: str
    window: float
    n: int
    pearson: float | None
    spearman: float | None
    runs: list[CorrelatedRun]
    missing: list[MissingValue]
