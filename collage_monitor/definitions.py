"""What one diagnostic is: the totals that travel, how they merge, and the metrics made of them; what a strategy is.

A `Definition` is the whole of it: the project's own are the modules of `collage_monitor.statistics`, those of other
packages come through the entry-point group `collage_monitor.statistics`. How a total is measured stands under the
same name in the agent (`collage_agent.stats`, entry-point group `collage_agent.statistics`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Definition",
    "HISTOGRAM_LABELS",
    "HISTOGRAM_OCTAVES",
    "Interval",
    "Metric",
    "Need",
    "OverShards",
    "OverSteps",
    "SAMPLE",
    "Statistic",
    "Strategy",
    "as_is",
    "ratio",
    "root_ratio",
    "sums",
]

Array = NDArray[np.float64]
OverShards = Literal["sum", "max", "min"]
OverSteps = Literal["sum", "last", "max", "min", "root_sum"]
Need = Literal["intended", "gradient"]

HISTOGRAM_OCTAVES: Final = tuple(range(-24, 8))
"""Octave k holds |u| / gap in [2**k, 2**(k+1))."""
SAMPLE: Final = ("sampled", "elements", "active_blocks")
"""What all statistics of a step are measured on."""
HISTOGRAM_LABELS: Final = ("underflow", *(str(octave) for octave in HISTOGRAM_OCTAVES), "overflow")


@dataclass(frozen=True)
class Statistic:
    """One estimated total: what it is and how it merges. `label` names what stands behind the slash of its key.

    `needs`: what a step must have for it to be known, the intended update or the gradient; without, it is reported
    as missing. `raw`: it says what was looked at, and is never multiplied by elements / sampled.
    """

    name: str
    over_shards: OverShards
    over_steps: OverSteps
    unit: str
    help: str
    label: str | None = None
    needs: tuple[Need, ...] = ()
    raw: bool = False


@dataclass(frozen=True)
class Interval:
    """Which ratio a metric is, for its 95 % interval: `variance_numerator/METRIC` and so on travel beside it.

    `denominator` "active" stands for elements − nonfinite − idle. `share`: a share of elements, with an interval
    within 0 and 1. `sample` names the totals that say what was looked at: elements, of how many, active blocks.
    """

    numerator: str
    denominator: str
    share: bool = False
    sample: tuple[str, str, str] = SAMPLE


@dataclass(frozen=True)
class Metric:
    """One number that readers see.

    `finish` makes it, elementwise, of the totals that `needs` names, one argument each: a total labelled as the
    metric is comes under the same label, a histogram comes as [HISTOGRAM_LABELS, …]. Undefined is NaN.
    `unit` is one of "ratio", "elements", "weight", "gradient", "octaves", "factor", "steps".
    `ideal` is the value of a run that loses nothing (None: there is no such value).
    `exposed` puts the model's value on `/metrics`.
    """

    name: str
    title: str
    unit: str
    formula: str
    help: str
    needs: tuple[str, ...]
    finish: Callable[..., Array]
    label: str | None = None
    ideal: float | None = None
    interval: Interval | None = None
    exposed: bool = False

    def described(self) -> dict[str, Any]:
        """The entry as it is told to people: `interval` says whether there is one."""
        told = {key: value for key, value in vars(self).items() if key != "finish"}
        return told | {"interval": self.interval is not None}


@dataclass(frozen=True)
class Definition:
    """One diagnostic. Its metrics may be made of other definitions' totals too."""

    statistics: tuple[Statistic, ...] = ()
    metrics: tuple[Metric, ...] = ()


@dataclass(frozen=True)
class Strategy:
    """A way to keep weights and states.

    `bytes_per_parameter` counts weights, AdamW's states and the gradient, for 16-bit storage; None if it depends.
    `stochastic` means that updates arrive only on average, so the lost share of one step misjudges it.
    """

    name: str
    title: str
    keeps: str
    bytes_per_parameter: int | None
    stochastic: bool = False


def sums(
    unit: str, *, needs: tuple[Need, ...] = (), label: str | None = None, raw: bool = False, **help_of: str
) -> list[Statistic]:
    """Totals that add up over shards and over steps: name=help."""
    return [Statistic(name, "sum", "sum", unit, text, label, needs, raw) for name, text in help_of.items()]


def ratio(numerator: Array, under: Array) -> Array:
    """Their quotient; NaN where the denominator is 0."""
    numerator, under = np.asarray(numerator, dtype=np.float64), np.asarray(under, dtype=np.float64)
    quotient: Array = np.divide(numerator, under, out=np.full(under.shape, np.nan), where=under != 0)
    return quotient + 0.0  # −0 / −x is a plain zero to its readers


def root_ratio(numerator: Array, under: Array) -> Array:
    """The root of their quotient; NaN where the denominator is 0."""
    return np.sqrt(ratio(numerator, under))


def as_is(total: Array) -> Array:
    """The total itself."""
    return np.asarray(total, dtype=np.float64)
