"""Statistics over seeds: a mean with its interval, the difference of two groups of runs, and a curve with its band.

Runs that differ in their seed alone are a sample; intervals are Student's, at 95 %. Two groups are compared run by
run if their runs can be paired, because the seed's effect on both cancels; otherwise by Welch's interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from collage_monitor import wire
from collage_monitor.diagnosis import finite
from collage_monitor.statistics.intervals import student_quantile

__all__ = ["Estimate", "SeedValue", "curve_over_seeds", "difference", "mean_over_seeds"]


@dataclass(frozen=True)
class SeedValue:
    """A run's number, finite, with the keys that pair it with another run."""

    value: float
    group: str | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` runs, or pairs of runs, in the unit of the values.

    low … high: the 95 % interval of the mean; spread: the standard deviation of a single run or pair. All three are
    None below two. `paired`: the value is a mean of differences of pairs.
    """

    value: float
    count: int
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    paired: bool = False


def mean_over_seeds(values: Sequence[float]) -> Estimate | None:
    """The mean x̄ of finite values and x̄ ± t(n − 1)·s/√n; None of no values."""
    if not values:
        return None
    mean, count = math.fsum(values) / len(values), len(values)
    if count < 2:
        return Estimate(mean, count)
    spread = math.hypot(*[value - mean for value in values]) / math.sqrt(count - 1)
    half = float(student_quantile(count - 1)) * spread / math.sqrt(count)
    return Estimate(mean, count, mean - half, mean + half, spread)


def difference(own: Sequence[SeedValue], reference: Sequence[SeedValue]) -> Estimate | None:
    """Mean of `own` minus mean of `reference`; None if either has no value.

    Paired: by group and seed, else by seed, else by group, whichever is the first that both sides share and that
    names each run once; the mean of the pairs' differences with Student's interval. A run without its counterpart
    is left out.
    Not paired: the difference of the means with Welch's interval, t of the degrees by Satterthwaite, rounded down;
    no interval where a side has a single run. Source: Welch, Biometrika 34 (1947).
    """
    if not own or not reference:
        return None
    for key in _KEYS:
        ours, theirs = _by_key(own, key), _by_key(reference, key)
        shared = [name for name in ours if name in theirs]
        if shared:
            found = mean_over_seeds([ours[name] - theirs[name] for name in shared])
            return None if found is None else Estimate(**{**vars(found), "paired": True})
    return _welch([entry.value for entry in own], [entry.value for entry in reference])


_Key = Callable[[SeedValue], Hashable]
_KEYS: Final[tuple[_Key, ...]] = (
    lambda run: None if run.seed is None or run.group is None else (run.group, run.seed),
    lambda run: run.seed,
    lambda run: run.group,
)


def _by_key(runs: Sequence[SeedValue], key: _Key) -> Mapping[Hashable, float]:
    """The values by key; nothing if a key names several runs, because then the pairs are unknown."""
    seen = Counter(found for run in runs if (found := key(run)) is not None)
    if any(count > 1 for count in seen.values()):
        return {}
    return {found: run.value for run in runs if (found := key(run)) is not None}


def _welch(own: Sequence[float], reference: Sequence[float]) -> Estimate | None:
    first, second = mean_over_seeds(own), mean_over_seeds(reference)
    if first is None or second is None:
        return None
    gap, count = first.value - second.value, min(first.count, second.count)
    if first.spread is None or second.spread is None:
        return Estimate(gap, count)
    parts = [(first.spread**2 / first.count, first.count - 1), (second.spread**2 / second.count, second.count - 1)]
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return Estimate(gap, count, gap, gap)
    degrees = math.floor(variance**2 / sum(part**2 / free for part, free in parts))
    half = float(student_quantile(max(degrees, 1))) * math.sqrt(variance)
    return Estimate(gap, count, gap - half, gap + half)


def curve_over_seeds(curves: Sequence[wire.Series]) -> wire.Series:
    """The mean of several runs' curves of one metric, with the 95 % interval of the mean as `low` and `high`.

    It has the points of the shortest curve, as far as every run has come; at each point, each run's newest value
    counts. If one is undefined or not finite, so is the mean.

    Raises:
        ValueError: there is no curve.
    """
    if not curves:
        raise ValueError("a mean curve needs the curve of one run or more; none was given")
    grid = min(curves, key=lambda curve: len(curve.steps))
    last = min((curve.steps[-1] if curve.steps else 0) for curve in curves)
    places = [place for place, step in enumerate(grid.steps) if step <= last]
    columns = [_values_at(curve, [grid.steps[place] for place in places]) for curve in curves]
    means = [_mean_of(found) for found in zip(*columns, strict=True)]
    values: list[wire.Number | None] = [None if mean is None else mean.value for mean in means]
    return msgspec.structs.replace(
        grid,
        first_steps=[grid.first_steps[place] for place in places],
        steps=[grid.steps[place] for place in places],
        positions=[grid.positions[place] for place in places],
        values=values,
        minimum=values,
        maximum=values,
        low=[None if mean is None else mean.low for mean in means],
        high=[None if mean is None else mean.high for mean in means],
        ranks=None,
        world_size=None,
        expected_ranks=None,
        cursor=None,
        more=msgspec.UNSET,
    )


def _values_at(curve: wire.Series, steps: Sequence[int]) -> list[float | None]:
    places = np.searchsorted(curve.steps, steps, side="right") - 1
    return [finite(curve.values[place]) if place >= 0 else None for place in places.tolist()]


def _mean_of(found: Sequence[float | None]) -> Estimate | None:
    known = [value for value in found if value is not None]
    return mean_over_seeds(known) if len(known) == len(found) else None
