"""Forecast of the step from which a strategy will lose its updates, from watched steps and the rate's schedule.

An update is in proportion to the learning rate r, and a weight's gap hardly changes. So |u| / gap, known at rate
r₀, is r / r₀ times as large at rate r: log₂(r / r₀) octaves further. Plain storage loses updates below half a gap
of the weight, a pair those below half a gap of its low component, a copy in fp32 those below half a gap of that
copy. Rounding at random loses nothing on average.

The window's merged histogram would mix many rates, so each watched step is scaled by its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from collage_monitor.definitions import HISTOGRAM_OCTAVES, Array
from collage_monitor.errors import CollageError
from collage_monitor.schedule import RateSchedule
from collage_monitor.statistics.update_histogram import histogram_quantile
from collage_monitor.strategies import STRATEGIES
from collage_monitor.wire import Layer

__all__ = [
    "Forecast",
    "ForecastError",
    "GridRecord",
    "LOST",
    "StrategyForecast",
    "forecast_strategies",
    "kinds_of",
    "record_of",
    "trained_dtype",
]

LOST: Final = 0.25
"""The share of updates above which a strategy is said to lose them."""
_EDGES: Final = np.array([*HISTOGRAM_OCTAVES, HISTOGRAM_OCTAVES[-1] + 1], dtype=np.float64)
_BITS: Final = {"bfloat16": 8, "float16": 11}
"""Significant bits of the formats whose grid a forecast is about."""
_FP32_BITS: Final = 24
_COMPARED: Final = ("plain", "kahan", "plus", "stochastic", "split-master")
_FINE: Final = 0.05
"""Octaves between two values of the distribution."""
_FEWEST, _FEWEST_OF_LEVEL, _FEWEST_OF_TREND = 3, 6, 8
_NEWEST: Final = 0.5
"""Share of the watched steps, the newest, whose level and drift count."""
_PACE: Final = 0.5
"""How much of a drift goes on, less at each doubling: moments settle, and so do weights that begin at 0 or 1.
Measured on trainings: all of it, going on for ever, foretells 5 to 10 % of the steps too early."""
_CERTAIN: Final = 3.0
"""Standard errors from which on a drift is one."""
_SETTLED: Final = 3
"""Times the warm-up after which steps have become as long as they stay, nearly."""
_LEAST_DRIFT: Final = 0.05
"""Octaves a doubling of the steps below which a drift is not worth a word: histograms resolve no more."""
_SPREADS: Final = 2.0
_LEAST_SPREAD: Final = 0.1
"""Octaves that a level is never known better than: weights and gradients go on to change."""
_NAMED: Final = 2
_DRAWN: Final = 100


class ForecastError(CollageError):
    """The watched steps allow no forecast; the message says what is missing."""


@dataclass(frozen=True)
class GridRecord:
    """The updates of a run in units of its weights' gaps, at some of its measured steps.

    steps: [points], ascending. counts: [bins, points], elements of the model by octave of |u| / gap. layers: the
    kind of each by its name, such as "LayerNorm.weight". quarters: [layers, points], log₂(|u| / gap) that a quarter
    of a layer's elements are below, NaN where no update was intended. dtype: of the trained weights.
    """

    steps: Sequence[int]
    counts: Array
    layers: Mapping[str, str]
    quarters: Array
    dtype: str
    strategy: str


@dataclass(frozen=True)
class StrategyForecast:
    """The forecast for one strategy.

    onset: the first step from which on more than a quarter of the updates are lost at each step; None: not in this
    run. earliest, latest: where it lies with 95 % confidence; None: not in this run. rate: at the onset. lost: the
    share of all updates still to come. first_in: the kind of layer that loses a quarter first, from first_onset on.
    shares: (step, share lost) at up to _DRAWN of the steps to come.
    """

    strategy: str
    onset: int | None
    earliest: int | None
    latest: int | None
    rate: float | None
    lost: float
    first_in: str | None
    first_onset: int | None
    text: str
    shares: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Forecast:
    """The forecasts for several strategies, the run's own first, and their assumptions."""

    last_step: int
    steps: int
    assumes: str
    strategies: tuple[StrategyForecast, ...]

    def __str__(self) -> str:
        return "\n".join([*(entry.text for entry in self.strategies), self.assumes])


def record_of(steps: Sequence[int], counts: Array, layers: Sequence[Layer], strategy: str) -> GridRecord:
    """The record made from each layer's histograms: counts [bins, points, layers], NaN if not reported."""
    known = np.nan_to_num(counts)
    quarters = histogram_quantile(known, LOST).T
    return GridRecord(steps, known.sum(axis=2), kinds_of(layers), quarters, trained_dtype(layers), strategy)


def kinds_of(layers: Sequence[Layer]) -> dict[str, str]:
    """The kind of each layer by its name: "LayerNorm.weight", its module's type and its role there."""
    return {
        layer.name: f"{layer.module_type.rpartition('.')[2] or 'parameter'}.{layer.name.rpartition('.')[2]}"
        for layer in layers
    }


def trained_dtype(layers: Sequence[Layer]) -> str:
    """The most common narrow format whose grid shows when updates are lost; without one, any format."""
    elements: dict[str, int] = {}
    for layer in layers:
        elements[layer.dtype] = elements.get(layer.dtype, 0) + layer.elements
    narrow = {dtype: count for dtype, count in elements.items() if dtype in _BITS}
    found = narrow or elements
    return max(found, key=lambda dtype: found[dtype], default="unknown")


@dataclass(frozen=True)
class _Level:
    """Where updates stand per unit of rate: `distribution` [fine grid] is the share below `at` octaves, at the
    log₂ step `centre`; `drift` octaves a doubling of the steps, ± `drift_error`; `spread` of the level itself."""

    at: Array
    distribution: Array
    centre: float
    drift: float
    drift_error: float
    spread: float


def forecast_strategies(
    record: GridRecord, schedule: RateSchedule, strategies: Sequence[str] = _COMPARED
) -> Forecast:
    """When each strategy will lose more than a quarter of its updates, from watched steps and the rate's schedule.

    share(r) = mean over the newest watched steps s of F_s(θ − log₂(r / r_s) − drift), where F_s is the share of
    elements with log₂(|u| / gap) below, and θ the strategy's threshold: −1 of plain storage. drift: of |u| / r
    and of the weights, fitted against log₂ step where it is beyond chance. Milliseconds; no server, no device.

    Raises:
        ForecastError: too few steps, steps beyond the schedule, or weights without a coarse grid.
    """
    _check(record, schedule)
    with np.errstate(divide="ignore"):
        octaves = np.log2(schedule.rates)
    level, quarters = _level(record, octaves)
    after = max(record.steps)
    shown = tuple(
        _forecast(name, record, schedule, octaves, level, quarters, after)
        for name in dict.fromkeys([_known(record.strategy), *strategies])
    )
    return Forecast(after, schedule.steps, _assumes(record, schedule, level), shown)


def _check(record: GridRecord, schedule: RateSchedule) -> None:
    if record.dtype not in _BITS:
        raise ForecastError(
            f"the trained weights are {record.dtype}: only the grid of bfloat16 or float16 weights shows when "
            "updates are lost. Watch some steps with weights in bfloat16"
        )
    if not record.steps or max(record.steps) > schedule.steps:
        last = max(record.steps, default=0)
        raise ForecastError(
            f"step {last} was watched, and the schedule {schedule.text} has {schedule.steps:,} steps"
        )
    active = int((np.nansum(record.counts, axis=0) > 0).sum())
    if active < _FEWEST:
        raise ForecastError(
            f"{active} measured steps moved anything; {_FEWEST} are needed: watch more steps, or pass every=1"
        )


def _known(strategy: str) -> str:
    return strategy if strategy in STRATEGIES and strategy != "unknown" else "plain"


def _level(record: GridRecord, octaves: Array) -> tuple[_Level, Array]:
    """The updates per unit of rate now, and the lower quarter of each layer's: [layers]."""
    steps = np.asarray(record.steps, np.float64)
    rates = octaves[np.asarray(record.steps) - 1]
    usable = np.isfinite(rates) & (np.nansum(record.counts, axis=0) > 0)
    steps, rates, counts = steps[usable], rates[usable], np.nan_to_num(record.counts[:, usable])
    heights = histogram_quantile(counts, LOST) - rates
    newest = steps >= min((1 - _NEWEST) * steps[-1], steps[max(0, len(steps) - _FEWEST_OF_LEVEL)])
    drift, drift_error, spread = _trend(np.log2(steps[newest]), heights[newest])
    centre = float(np.log2(steps[newest]).mean())
    at = np.arange(_EDGES[0] - rates[newest].max() - 1, _EDGES[-1] - rates[newest].min() + 1, _FINE)
    below = np.cumsum(counts[:-1, newest], axis=0) / counts[:, newest].sum(axis=0)
    each = [np.interp(at, _EDGES - rate, own, right=1.0) for own, rate in zip(below.T, rates[newest], strict=True)]
    quarters = np.full(len(record.quarters), np.nan)
    heights = record.quarters[:, usable][:, newest] - rates[newest]
    known = np.isfinite(heights).any(axis=1)
    quarters[known] = np.nanmean(heights[known], axis=1)
    return _Level(at, np.mean(each, axis=0), centre, drift, drift_error, spread), quarters


def _trend(x: Array, heights: Array) -> tuple[float, float, float]:
    """Slope against log₂ step, 0 if chance may explain it; its standard error; and the standard error of the
    level."""
    if len(x) < _FEWEST_OF_TREND:
        return 0.0, 0.0, max(_LEAST_SPREAD, float(np.std(heights)))
    fitted, covariance = np.polyfit(x, heights, 1, cov=True)
    slope, error = fitted[0], float(np.sqrt(covariance[0, 0]))
    rest = heights - np.polyval(fitted, x)
    spread = max(_LEAST_SPREAD, float(np.std(rest)) / len(x) ** 0.5)
    is_drift = abs(slope) > max(_LEAST_DRIFT, _CERTAIN * error)
    return float(slope) if is_drift else 0.0, error, spread


def _forecast(
    name: str,
    record: GridRecord,
    schedule: RateSchedule,
    octaves: Array,
    level: _Level,
    quarters: Array,
    after: int,
) -> StrategyForecast:
    coming = np.arange(after + 1, schedule.steps + 1)
    ahead = np.log2(coming) - level.centre if len(coming) else np.empty(0)
    rates = octaves[after:]
    thresholds = _thresholds(name, record.dtype)
    fading = _PACE * (1.0 - 2.0**-ahead) / np.log(2.0)
    shift = rates + level.drift * fading
    error = _SPREADS * np.hypot(level.spread, np.hypot(level.drift_error, level.drift / 2) * fading)
    lost, low, high = (_share(level, thresholds, own) for own in (shift, shift - error, shift + error))
    onset, earliest, latest = (_onset(share, after) for share in (lost, low, high))
    first_in, first_onset = (
        _first(record, quarters, thresholds, shift, after) if onset is not None else (None, None)
    )
    moving = np.isfinite(rates)
    mean = float(lost[moving].mean()) if moving.any() else 0.0
    rate = None if onset is None else float(schedule.rates[onset - 1])
    places = np.unique(np.linspace(0, len(coming) - 1, _DRAWN).round().astype(int)) if moving.any() else coming[:0]
    shares = tuple((int(coming[at]), float(lost[at])) for at in places if moving[at])
    made = StrategyForecast(name, onset, earliest, latest, rate, mean, first_in, first_onset, "", shares)
    return replace(made, text=" ".join(_words(made, record, after)))


def _thresholds(strategy: str, dtype: str) -> list[tuple[float, float]]:
    """(weight, log₂(|u| / gap) below which an update is lost) for each possible state of a weight.

    A pair's low component lies anywhere in ± half a gap g of the weight: in [g/4, g/2) with chance ½, where its own
    half gap is 2^(−2 − bits) g, in the octave below with chance ¼, and so on. Empty: it rounds at random.
    """
    entry, bits = STRATEGIES[strategy], _BITS[dtype]
    if entry.stochastic:
        return []
    if entry.weights == "pair":
        return [(2.0 ** -(j + 1), -2.0 - bits - j) for j in range(16)]
    if entry.weights == "fp32":
        return [(1.0, -1.0 - (_FP32_BITS - bits))]
    return [(1.0, -1.0)]


def _share(level: _Level, thresholds: Sequence[tuple[float, float]], shift: Array) -> Array:
    """Share of updates lost at each step [steps]; 0 where the rate is 0."""
    share = np.zeros(len(shift))
    moving = np.isfinite(shift)
    for weight, threshold in thresholds:
        share[moving] += weight * np.interp(threshold - shift[moving], level.at, level.distribution)
    share[~moving] = np.nan
    return share


def _onset(share: Array, after: int) -> int | None:
    """The first step from which on the share stays above LOST; steps without an update say nothing."""
    known = np.flatnonzero(np.isfinite(share))
    if not len(known) or share[known[-1]] <= LOST:
        return None
    below = known[share[known] <= LOST]
    first = known[known > below[-1]][0] if len(below) else known[0]
    return after + 1 + int(first)


def _first(
    record: GridRecord, quarters: Array, thresholds: Sequence[tuple[float, float]], shift: Array, after: int
) -> tuple[str | None, int | None]:
    """The kind of layer that first loses a quarter of its updates, and the step."""
    by_kind: dict[str, list[float]] = {}
    for kind, height in zip(record.layers.values(), quarters, strict=True):
        if np.isfinite(height):
            by_kind.setdefault(kind, []).append(float(height))
    if not by_kind:
        return None, None
    heights = {kind: float(np.mean(found)) for kind, found in by_kind.items()}
    lowest = min(heights, key=lambda kind: heights[kind])
    threshold = thresholds[0][1]
    return lowest, _onset(np.where(heights[lowest] + shift < threshold, 1.0, 0.0), after)


def _words(found: StrategyForecast, record: GridRecord, after: int) -> Iterator[str]:
    entry = STRATEGIES[found.strategy]
    size = f" ({entry.bytes_per_parameter} bytes a parameter)" if entry.bytes_per_parameter else ""
    name = f"{entry.title} in {record.dtype}{size}"
    if entry.stochastic:
        yield f"{name}: not in this run. It rounds at random: no update is lost in the mean, but noise is added."
        return
    if found.onset is None:
        unless = "" if found.earliest is None else f", though step {found.earliest:,} is within the uncertainty"
        yield f"{name}: not in this run{unless}."
        return
    until = "the end or never" if found.latest is None else f"{found.latest:,}"
    rate = f"at rates of {found.rate:.2g} and below"
    yield (
        f"{name} loses more than a quarter of its updates from step {found.onset:,} on "
        f"({found.earliest:,} to {until}), {rate}."
    )
    if found.first_in is not None and found.first_onset is not None:
        yield f"First in {found.first_in}, from step {found.first_onset:,} on."


def _assumes(record: GridRecord, schedule: RateSchedule, level: _Level) -> str:
    drift = (
        f"with half of the drift seen there, {level.drift:+.2f} octaves at a doubling of the steps"
        if level.drift
        else "without a drift, since none is beyond chance there"
    )
    warm_up = int(np.argmax(schedule.rates)) + 1
    early = ""
    if max(record.steps) < _SETTLED * warm_up < schedule.steps:
        early = (
            f" Steps so soon after a warm-up of {warm_up:,} still shrink: watch {_SETTLED * warm_up:,} to be sure, "
            "the onset may come earlier."
        )
    return (
        f"Assumes the schedule {schedule.text}, updates in proportion to the rate as in steps "
        f"{min(record.steps):,} to {max(record.steps):,}, {drift}, and weights and optimizer states as there."
        f"{early}"
    )
