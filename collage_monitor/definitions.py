"""Types of the catalogue: statistics and how they merge, the metrics made of them, strategies.

A `Definition` holds one diagnostic. The project's own are in `collage_monitor.statistics`, one module per family;
the agent measures them in the module of the same name (`collage_agent.stats`), if it has one. Other packages add a
definition through the entry-point group `collage_monitor.statistics`, and its measuring function through
`collage_agent.statistics`, both under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Array",
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
    "active_elements",
    "as_is",
    "cosine",
    "noise_ratio",
    "ratio",
    "root_ratio",
    "rounding_variance",
    "sums",
]

Array = NDArray[np.float64]
OverShards = Literal["sum", "max", "min"]
OverSteps = Literal["sum", "last", "max", "min", "root_sum", "fourth_root_sum"]
Need = Literal["intended", "gradient"]

HISTOGRAM_OCTAVES: Final = tuple(range(-24, 8))
"""Octave k holds |u| / gap in [2**k, 2**(k+1))."""
SAMPLE: Final = ("sampled", "elements", "active_blocks")
"""What all statistics of a step are measured on."""
HISTOGRAM_LABELS: Final = ("underflow", *(str(octave) for octave in HISTOGRAM_OCTAVES), "overflow")


@dataclass(frozen=True)
class Statistic:
    """One estimated total: its meaning, and how it merges. `label` says what follows the slash in its key.

    `needs`: the intended update or the gradient, if the total requires it; without it, the total is reported as
    missing. `raw`: the total describes the sample, and is never multiplied by elements / sampled. `variance`: it is
    multiplied by the square of that factor.
    """

    name: str
    over_shards: OverShards
    over_steps: OverSteps
    unit: str
    help: str
    label: str | None = None
    needs: tuple[Need, ...] = ()
    raw: bool = False
    variance: bool = False


@dataclass(frozen=True)
class Interval:
    """The ratio behind a metric, for its 95 % interval; agents report its variances (`variance_numerator/…`).

    `denominator` "active" stands for `active_elements`. `share`: a share of elements, with an interval
    within 0 and 1. `sample` names the totals for the sample's size: elements, of how many, active blocks.
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
    `optional` names further totals, which `finish` takes after those; NaN if not reported.
    `unit` is one of "ratio", "share" (a ratio that is read in percent), "elements", "weight", "gradient",
    "octaves", "factor", "steps", "bytes".
    `finish_takes_label`: `finish` is also given the key's label, as `label=`.
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
    optional: tuple[str, ...] = ()
    finish_takes_label: bool = False

    def described(self) -> dict[str, Any]:
        """The entry as plain values, for the catalogue's readers; `interval` says whether there is one."""
        plain = {key: value for key, value in vars(self).items() if not key.startswith("finish")}
        return plain | {"interval": self.interval is not None}


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
    `moment_bytes`: of it, those of the first and of the second moment; None if it depends.
    `weights`: what a weight is kept as: one number of its own dtype, a pair of them, or with all bits of fp32.
    """

    name: str
    title: str
    keeps: str
    bytes_per_parameter: int | None
    stochastic: bool = False
    moment_bytes: tuple[int, int] | None = None
    weights: Literal["one", "pair", "fp32"] = "one"

    def bytes_of(self, first_moments: int, second_moments: int) -> int | None:
        """Bytes a parameter under a rule that keeps so many moments of each kind, the gradient included."""
        if self.bytes_per_parameter is None or self.moment_bytes is None:
            return self.bytes_per_parameter if (first_moments, second_moments) == (1, 1) else None
        first, second = self.moment_bytes
        return self.bytes_per_parameter + (first_moments - 1) * first + (second_moments - 1) * second


def sums(
    unit: str, *, needs: tuple[Need, ...] = (), label: str | None = None, raw: bool = False, **help_of: str
) -> list[Statistic]:
    """Statistics that add up over shards and over steps, given as name=help."""
    return [Statistic(name, "sum", "sum", unit, text, label, needs, raw) for name, text in help_of.items()]


def rounding_variance(name: str, unit: str, product: str, squares: str, *, label: str | None = None) -> Statistic:
    """The statistic for the noise of random rounding: how far Σ `product` may be off Σ `squares`, its expected
    value.

    Blocks are rounded independently of each other: the sum over them of (Σ product − Σ squares)² is the variance of
    the total, whatever the tails of its elements. It adds up over shards and over steps.
    """
    text = f"Σ over blocks of (Σ {product} − Σ {squares} of the block)²: the variance that random rounding gives."
    return Statistic(name, "sum", "sum", unit, text, label, ("intended",), variance=True)


def noise_ratio(variance: Array, under: Array) -> Array:
    """√variance / |under|; NaN where `under` is 0."""
    return ratio(np.sqrt(variance), np.abs(under))


def ratio(over: Array, under: Array) -> Array:
    """over / under; NaN where `under` is 0."""
    over, under = np.asarray(over, dtype=np.float64), np.asarray(under, dtype=np.float64)
    quotient: Array = np.divide(over, under, out=np.full(under.shape, np.nan), where=under != 0)
    return quotient + 0.0  # −0 / −x is a plain zero to its readers


def root_ratio(over: Array, under: Array) -> Array:
    """√(over / under); NaN where `under` is 0."""
    return np.sqrt(ratio(over, under))


def cosine(product: Array, squares: Array, other_squares: Array) -> Array:
    """Σ a·b / √(Σ a² · Σ b²), of those three sums; NaN where a or b is 0."""
    return ratio(product, np.sqrt(squares) * np.sqrt(other_squares))


def active_elements(
    elements: Array, nonfinite: Array, idle: Array, lost: Array, distorted: Array, faithful: Array
) -> Array:
    """Elements with u ≠ 0: lost + distorted + faithful. Elements whose u is not known are in none of the three.

    Where they were not all reported: elements − nonfinite − idle, which counts elements without a u too.
    """
    counted = lost + distorted + faithful
    return np.where(np.isnan(counted), elements - nonfinite - idle, counted)


def as_is(total: Array) -> Array:
    """The total itself."""
    return np.asarray(total, dtype=np.float64)
