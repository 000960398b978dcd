"""Statistics that pages share: records by plan, means over seeds, gaps to a reference, correlations.

Pure functions on records (`tests/studies/test_results.py`, `test_correlations.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from collage_demo.recipe import Plan, Recipe
from numpy.typing import NDArray

from collage_monitor.seeds import Estimate, SeedValue, difference, mean_over_seeds
from collage_studies.number_words import UNDEFINED, listed, quoted
from collage_studies.study import PlotCurve, Record

__all__ = [
    "Point",
    "by_plan",
    "correlation",
    "gaps",
    "gaps_in_words",
    "mean",
    "mean_curve",
    "mean_of",
    "recipe_of",
    "stays_below_from",
]

_RESAMPLES: Final = 2000
_FEWEST: Final = 3
"""A stratum of fewer points says nothing of an order within it."""
Array = NDArray[np.float64]


def recipe_of(record: Record) -> Recipe:
    """The recipe of a training's record."""
    assert record.trial.recipe is not None
    return record.trial.recipe


def by_plan(records: Sequence[Record]) -> Mapping[Plan, list[Record]]:
    """The records of trainings by their plan, in the order of the records."""
    found: dict[Plan, list[Record]] = {}
    for record in records:
        if record.trial.plan is not None:
            found.setdefault(record.trial.plan, []).append(record)
    return found


def mean_of(records: Sequence[Record], name: str, *, merged: bool = False) -> Estimate | None:
    """The mean over runs, with its interval, of a value or of a merged metric; runs without it are left out."""
    found = [(record.merged if merged else record.values).get(name) for record in records]
    return mean_over_seeds([value for value in found if value is not None])


def mean(records: Sequence[Record], name: str, form: str = ".3g", *, merged: bool = False) -> str:
    """As `mean_of`, as text without its interval."""
    found = mean_of(records, name, merged=merged)
    return UNDEFINED if found is None else format(found.value, form)


def gaps(records: Sequence[Record], reference: Plan) -> Mapping[Plan, Estimate | None]:
    """Last validation loss less the reference's, seed by seed, of every other plan, in nats a byte."""
    losses = {plan: _losses(own) for plan, own in by_plan(records).items()}
    return {plan: difference(own, losses.get(reference, [])) for plan, own in losses.items() if plan != reference}


def _losses(records: Sequence[Record]) -> list[SeedValue]:
    return [
        SeedValue(value, None, recipe_of(record).seed)
        for record in records
        if (value := record.values.get("validation_loss")) is not None
    ]


def mean_curve(records: Sequence[Record], name: str) -> PlotCurve:
    """The mean over runs of a curve, at the steps of the first run's; a run's undefined points are left out."""
    steps = records[0].curves[name].steps
    columns = zip(*(record.curves[name].values for record in records), strict=True)
    means = [mean_over_seeds([value for value in column if value is not None]) for column in columns]
    known = [(step, found.value) for step, found in zip(steps, means, strict=True) if found]
    return PlotCurve([step for step, _ in known], [value for _, value in known])


def stays_below_from(steps: Sequence[float], values: Sequence[float | None], bound: float) -> float | None:
    """The first step from which on a curve stays below the bound to its end; None if it does not end below it.

    Undefined points are passed over.
    """
    found = None
    for step, value in zip(reversed(steps), reversed(values), strict=True):
        if value is not None and value >= bound:
            break
        found = step if value is not None else found
    return found


def gaps_in_words(found: Mapping[str, Estimate | None], form: str = "+.4f") -> str:
    """Sentences on gaps to fp32: which ways end worse beyond chance, which better, and which show no difference.

    The tables beside them hold the intervals.
    """
    known = sorted(((name, gap) for name, gap in found.items() if gap), key=lambda entry: -entry[1].value)
    worse = [entry for entry in known if entry[1].low is not None and entry[1].low > 0]
    better = [entry for entry in known if entry[1].high is not None and entry[1].high < 0]
    rest = [entry for entry in known if entry not in worse and entry not in better]
    alone = [name for name, gap in rest if gap.low is None or gap.high is None]
    open_ = [entry for entry in rest if entry[0] not in alone]
    parts = [
        f"{listed(f'`{name}` ({gap.value:{form}})' for name, gap in named)} "
        f"{'ends' if len(named) == 1 else 'end'} {word} than fp32 beyond chance."
        for word, named in (("worse", worse), ("better", better))
        if named
    ]
    if open_:
        bound = max(abs(end) for _, gap in open_ for end in (gap.low, gap.high) if end is not None)
        names = quoted(name for name, _ in open_)
        parts.append(
            f"No difference from fp32 is shown for {names}: every interval includes 0 and lies within "
            f"±{bound:{form.lstrip('+')}}."
        )
    parts += [f"One seed gives no interval for {quoted(alone)}."] if alone else []
    return " ".join(parts) or "Nothing was compared."


@dataclass(frozen=True)
class Point:
    """A pair of numbers in a stratum, within which it can be compared."""

    x: float
    y: float
    stratum: Hashable = None


def correlation(points: Sequence[Point], *, ranks: bool, within: bool) -> Estimate | None:
    """Pearson's correlation, or with `ranks` Spearman's; None where x or y is constant or points are too few.

    within: of the differences from each stratum's means, and of ranks within each stratum; ties share their mean
    rank. The interval is the middle 95 % over 2,000 resamples of the points with the ranks that they have in the
    whole sample; there is none where the correlation is undefined in more than a tenth of them.
    """
    strata: dict[Hashable, list[Point]] = {}
    for point in points:
        strata.setdefault(point.stratum if within else None, []).append(point)
    groups = [own for own in strata.values() if len(own) >= _FEWEST]
    if not groups:
        return None
    x, y = (np.concatenate([_numbers(own, axis, ranks) for own in groups]) for axis in ("x", "y"))
    member = np.repeat(np.eye(len(groups)), [len(own) for own in groups], axis=0)
    count = len(x)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
    found = _weighted(np.concatenate([np.ones((1, count)), draws]), x, y, member)
    value, resampled = float(found[0]), found[1:][~np.isnan(found[1:])]
    if np.isnan(value):
        return None
    if len(resampled) < 0.9 * _RESAMPLES:
        return Estimate(value, count)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Estimate(value, count, float(low), float(high))


def _numbers(points: Sequence[Point], axis: str, ranks: bool) -> Array:
    values = np.array([getattr(point, axis) for point in points], dtype=np.float64)
    if not ranks:
        return values
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    found: Array = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return found


def _weighted(weights: Array, x: Array, y: Array, member: Array) -> Array:
    """A correlation for each row of weights [rows, points]; NaN where x or y is constant."""
    sizes = np.maximum(weights @ member, 1.0)
    centred = [values - ((weights * values) @ member / sizes) @ member.T for values in (x, y)]
    squares = [(weights * values**2).sum(axis=1) for values in centred]
    # Equal numbers leave a remainder of rounding beside their mean.
    floors = [1e-18 * max(float((values**2).sum()), 1e-300) for values in (x, y)]
    constant = (squares[0] <= floors[0]) | (squares[1] <= floors[1])
    products = (weights * centred[0] * centred[1]).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Array = np.where(constant, np.nan, products / np.sqrt(squares[0] * squares[1]))
    return found
