"""Since when something is different: the change point of series over measured steps, and the layers that changed.

A change is abrupt: a step, or a ramp of a few points. A slow bend is not a change: a learning-rate trend, a
warm-up, or autocorrelated noise.

1. At each place a line is fitted to the points before it and one to those after; their distance there is the jump
   (a boundary kernel of local linear regression, which lines and parabolas pass through unseen: Loader, Annals of
   Statistics 24, 1996). A jump counts by its size over the median absolute jump of the series, a noise level
   that already includes autocorrelation. Only the nearest points have weight: time and memory grow with the points.
2. Around the largest, a parabola with a ramp must be far likelier than one with a bend, or it was a bend. Both have
   one shape to place and one height, so the ratio of their likelihoods is (squares of the bend / squares of the
   ramp)^(n/2) for n points. The bound is 1000 : 1: a run has some ten windows that do not share points, so in one
   run of a hundred a bend may pass for a step.
3. The ramp that fits best says where the change began and ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "LayerChange",
    "Onset",
    "describe",
    "find_onset",
    "find_onsets",
]

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

_FEWEST_POINTS: Final = 24
"""Points of a series that is looked at."""
_LEAST_JUMP: Final = 6.0
"""Jump over the median absolute jump, times 1.4826: the least that counts in one series."""
_LEAST_KNOWN_JUMP: Final = 4.0
"""The same in a layer, at a place where a change is known."""
_LIKELIHOOD_RATIO: Final = 1000.0
"""How many times likelier a ramp must be than a bend, with normal noise."""
_WINDOW: Final = 12
_FEWEST_BESIDE: Final = 6
_LONGEST_RAMP: Final = 5
_PROMISING: Final = 3.5
_PENALTY: Final = 1.1
_MOST: Final = 0.5
"""Of the present distance to the ideal: so much of it came with a change that explains it."""
_OUTLIER: Final = 5.0
_TO_DEVIATION: Final = 1.4826


@dataclass(frozen=True)
class LayerChange:
    """A series that changed: its median before and after."""

    layer: str
    before: float
    after: float


@dataclass(frozen=True)
class Onset:
    """A change point. It began after the measured step `last_before`, at `first_changed` the latest; at `settled`
    and later the new values hold.

    layers: those that changed, the largest jump first; `before` and `after`: medians of the model's series.
    """

    last_before: int
    first_changed: int
    settled: int
    before: float
    after: float
    layers: tuple[LayerChange, ...] = ()

    def explains(self, ideal: float, tolerance: float = 0.0) -> bool:
        """Whether this change explains the present value: most of the distance to the ideal arose at it, or it
        shrank the distance.

        A small step in a series that declines throughout does not explain when it began. Within `tolerance` of the
        ideal there is nothing to explain, so changes of single layers are reported.
        """
        then, now = abs(self.before - ideal), abs(self.after - ideal)
        return now <= max(then, tolerance) or now - then > _MOST * now


@dataclass(frozen=True)
class _Ramp:
    """y = a + b·t + c·t² + d·ramp; the ramp rises from point `start` to `end`."""

    start: int
    end: int


def find_onset(
    steps: Sequence[int],
    model: ArrayLike,
    layers: Mapping[str, ArrayLike] | None = None,
    *,
    least: float = 0.0,
    last_steps: Sequence[int] | None = None,
) -> Onset | None:
    """The largest change of a metric over measured steps, or None if there is none.

    steps: [points], ascending. model: the metric of the whole model, [points]; layers: of each layer, alike. NaN is
    "not measured". least: smaller differences, in the metric's units, do not count as changes. last_steps: where
    points merge several steps each, the last of them; a change may lie within a point.
    """
    names = list(layers or {})
    table = np.array([np.asarray(series, dtype=np.float64) for series in (model, *(layers or {}).values())])
    times = np.asarray(steps, dtype=np.float64)
    known = np.isfinite(table).any(0)
    table, times = table[:, known], times[known]
    if len(times) < _FEWEST_POINTS:
        return None
    rows = np.flatnonzero(np.isfinite(table).sum(1) >= max(_FEWEST_POINTS, 0.5 * len(times)))
    if not len(rows):
        return None
    times = (times - times[0]) / np.median(np.diff(times))
    series = np.array([_without_outliers(_filled(table[row], times)) for row in rows])
    kernel = _jump_kernel(times)
    # Among many series chance alone goes further.
    threshold = _LEAST_JUMP + 0.25 * np.log2(len(rows))
    found: dict[int, _Ramp] = {}
    for index in _promising(series, kernel):
        ramp = _ramp_at(int(np.abs(_jumps(series[index], kernel)).argmax()), series[index], times)
        if ramp is not None and _size(series[index], ramp, times, kernel) > threshold:
            found[index] = ramp
    found = {index: ramp for index, ramp in found.items() if _difference(series[index], ramp) >= least}
    if not found:
        return None
    ramp, together = _common(found, series, times)
    changed = [
        index
        for index in range(len(rows))
        if index in together
        or (
            _size(series[index], ramp, times, kernel) > _LEAST_KNOWN_JUMP
            and _difference(series[index], ramp) >= least
        )
    ]
    order = sorted(changed, key=lambda index: -_difference(series[index], ramp))
    own, until = (
        [step for step, kept in zip(of, known, strict=True) if kept] for of in (steps, last_steps or steps)
    )
    before, after = _levels(_filled(table[0], times), ramp) if np.isfinite(table[0]).any() else (np.nan, np.nan)
    return Onset(
        int(own[ramp.start]),
        int(until[ramp.start + 1]),
        int(until[ramp.end]),
        before,
        after,
        tuple(LayerChange(names[rows[index] - 1], *_levels(series[index], ramp)) for index in order if rows[index]),
    )


def find_onsets(
    steps: Sequence[int],
    model: ArrayLike,
    layers: Mapping[str, ArrayLike] | None = None,
    *,
    least: float = 0.0,
    last_steps: Sequence[int] | None = None,
) -> list[Onset]:
    """All changes of a metric over measured steps, in order; arguments as in `find_onset`.

    It finds the largest first, then searches before it and after it.
    """
    until = last_steps or steps
    found = find_onset(steps, model, layers, least=least, last_steps=until)
    if found is None:
        return []
    parts: tuple[list[int], list[int]] = ([], [])
    for place, (first, last) in enumerate(zip(steps, until, strict=True)):
        if first <= found.last_before or last >= found.settled:
            parts[last >= found.settled].append(place)
    series = np.asarray(model, dtype=np.float64)
    columns = {name: np.asarray(values, dtype=np.float64) for name, values in (layers or {}).items()}
    before, after = (
        find_onsets(
            [steps[place] for place in part],
            series[part],
            {name: values[part] for name, values in columns.items()},
            least=least,
            last_steps=[until[place] for place in part],
        )
        for part in parts
    )
    return [*before, found, *after]


def describe(onset: Onset, metric: str, tell: Callable[[float], str] = "{:.3f}".format) -> str:
    """The change in one sentence; `metric` names the series, `tell` writes its values."""
    began = f"between steps {onset.last_before:,} and {onset.first_changed:,}"
    settled = "" if onset.settled == onset.first_changed else f" (settled at step {onset.settled:,})"
    text = f"{metric} changed {began}{settled}: {tell(onset.before)} before, {tell(onset.after)} after"
    if not onset.layers:
        return text
    first = onset.layers[0]
    many = "1 layer" if len(onset.layers) == 1 else f"{len(onset.layers):,} layers"
    return f"{text}; {many} changed, most {first.layer} ({tell(first.before)} to {tell(first.after)})"


def _filled(values: Array, times: Array) -> Array:
    """The series with straight lines over its gaps."""
    known = np.isfinite(values)
    return np.interp(times, times[known], values[known])


def _without_outliers(values: Array) -> Array:
    """Single points far from their neighbours' median take its value (Hampel's filter); steps stay as they are."""
    windows = sliding_window_view(np.pad(values, 2, mode="edge"), 5)
    middle = np.median(windows, axis=1)
    away = np.abs(values - middle)
    scale = _TO_DEVIATION * np.median(away[away > 0]) if (away > 0).any() else 0.0
    return np.where(away > _OUTLIER * scale, middle, values)


def _jump_kernel(times: Array) -> Array:
    """Weights [points, 2 * _WINDOW]: row i makes the jump between point i and i + 1 of a series' points from
    i + 1 - _WINDOW to i + _WINDOW. 0 near the ends, and beyond them."""
    points = len(times)
    near = _windows(times, np.nan)
    inner = slice(_FEWEST_BESIDE - 1, points - _FEWEST_BESIDE)
    here = 0.5 * (times[:-1] + times[1:])[inner]
    weights = np.zeros((points, 2 * _WINDOW))
    weights[inner, :_WINDOW] = -_line_at(near[inner, :_WINDOW], here)
    weights[inner, _WINDOW:] = _line_at(near[inner, _WINDOW:], here)
    return weights


def _windows(values: Array, beyond: float) -> Array:
    """[..., points, 2 * _WINDOW]: the points around each place, in the memory of one copy; `beyond` the ends."""
    ends = [(0, 0)] * (values.ndim - 1) + [(_WINDOW - 1, _WINDOW)]
    return sliding_window_view(np.pad(values, ends, constant_values=beyond), 2 * _WINDOW, axis=-1)


def _jumps(series: Array, kernel: Array) -> Array:
    """The jump between each point and the next, for series [..., points]."""
    return np.asarray(np.einsum("...pw,pw->...p", _windows(series, 0.0), kernel))


def _promising(series: Array, kernel: Array) -> list[int]:
    """Series with a jump beyond what white noise makes: by the second differences, which a trend passes through
    unseen."""
    noise = _TO_DEVIATION * np.median(np.abs(np.diff(series, 2)), axis=1) / np.sqrt(6)
    expected = noise * np.sqrt(np.einsum("pw,pw->p", kernel, kernel).max())
    return [int(index) for index in np.flatnonzero(np.abs(_jumps(series, kernel)).max(1) > _PROMISING * expected)]


def _size(values: Array, ramp: _Ramp, times: Array, kernel: Array) -> float:
    """The jump at a ramp over the median absolute jump, times 1.4826, of the series without the ramp."""
    rise = _rise(times, ramp.start, ramp.end)
    near = slice(max(ramp.start + 1 - _WINDOW, 0), min(ramp.end + _WINDOW, len(times)))
    line, shape = _without_parabola(times[near], values[near]), _without_parabola(times[near], rise[near])
    height = float(line @ shape / (shape @ shape))
    inner = slice(_FEWEST_BESIDE - 1, len(times) - _FEWEST_BESIDE)
    noise = _TO_DEVIATION * float(np.median(np.abs(_jumps(values - height * rise, kernel)[inner])))
    # A series without noise still has rounding noise.
    return abs(height) / max(noise, 1e-9 * float(np.abs(values).max()), np.finfo(np.float64).tiny)


def _line_at(times: Array, here: Array) -> Array:
    """Weights [places, points] whose product with values at `times` (NaN: none) is their least-squares line at
    `here` [places]."""
    count = np.isfinite(times).sum(1)
    middle = np.nansum(times, axis=1) / count
    weights = np.nan_to_num(times - middle[:, np.newaxis])
    weights *= ((here - middle) / np.einsum("pw,pw->p", weights, weights))[:, np.newaxis]
    weights += (1 / count)[:, np.newaxis]
    return np.where(np.isfinite(times), weights, 0.0)


def _ramp_at(place: int, values: Array, times: Array) -> _Ramp | None:
    """The best ramp around a place; None where a bend fits nearly as well."""
    near = slice(max(place + 1 - _WINDOW, 0), min(place + 1 + _WINDOW, len(values)))
    ramps = _ramps(near)
    if not ramps:
        return None
    squares = _squares(ramps, near, values, times)
    best = int(squares.argmin())
    bends = np.maximum(times[near] - times[near.start + 1 : near.stop - 1, np.newaxis], 0.0)
    bent = float(_left_over(values[near], times[near], bends).min())
    unlikely = _LIKELIHOOD_RATIO ** (-2 / (near.stop - near.start))
    return ramps[best] if squares[best] <= unlikely * bent else None


def _ramps(near: slice) -> list[_Ramp]:
    """Every short ramp with enough points on both sides."""
    margin = _FEWEST_BESIDE // 2
    return [
        _Ramp(start, start + length)
        for start in range(near.start + margin, near.stop - margin)
        for length in range(1, _LONGEST_RAMP + 1)
        if start + length <= near.stop - margin
    ]


def _squares(ramps: Sequence[_Ramp], near: slice, values: Array, times: Array) -> Array:
    """The residual of the series after each ramp. A longer one must leave clearly less."""
    starts, ends = (np.array(places) - near.start for places in zip(*map(astuple, ramps), strict=True))
    left = _left_over(values[near], times[near], _rise(times[near], starts, ends))
    return np.asarray(left * [_PENALTY ** (ramp.end - ramp.start - 1) for ramp in ramps])


def _rise(times: Array, start: int | IntArray, end: int | IntArray) -> Array:
    """[..., points]: 0 up to point `start` [...], 1 from `end` on, straight in between."""
    begin, length = times[start][..., np.newaxis], (times[end] - times[start])[..., np.newaxis]
    return np.asarray(np.clip((times - begin) / length, 0.0, 1.0))


def _left_over(values: Array, times: Array, further: Array) -> Array:
    """Σ of squares that a parabola and each of the further regressors leave, and at least what rounding leaves."""
    plain, shapes = _without_parabola(times, values), _without_parabola(times, further)
    explained = (shapes @ plain) ** 2 / np.maximum((shapes**2).sum(1), np.finfo(np.float64).tiny)
    floor = len(values) * (1e-9 * np.abs(values).max()) ** 2
    return np.asarray(np.maximum(plain @ plain - explained, 0.0) + floor)


def _without_parabola(times: Array, values: Array) -> Array:
    """values [..., points] less their least-squares parabola."""
    basis, _ = np.linalg.qr(np.vander(times - times.mean(), 3))
    return np.asarray(values - (values @ basis) @ basis.T)


def _common(found: Mapping[int, _Ramp], series: Array, times: Array) -> tuple[_Ramp, set[int]]:
    """The ramp of the largest group that changed together, and its members."""
    starts = np.array([ramp.start for ramp in found.values()])
    ordered = np.sort(starts)
    sizes = np.searchsorted(ordered, starts + 2, "right") - np.searchsorted(ordered, starts - 2)
    with_model = np.abs(starts - found[0].start) <= 2 if 0 in found else np.zeros(len(starts), dtype=bool)
    largest = starts[np.argmax(2 * sizes + with_model)]
    together = {index for index, ramp in found.items() if abs(ramp.start - largest) <= 2}
    best = min(found[index].start for index in together)
    near = slice(max(best + 1 - _WINDOW, 0), min(best + 1 + _WINDOW, len(times)))
    ramps = _ramps(near)
    costs = np.zeros(len(ramps))
    for index in together:
        squares = _squares(ramps, near, series[index], times)
        # Divided by the smallest remainder of any ramp, which makes it a product of likelihoods.
        costs += np.log(squares / squares.min())
    return ramps[int(np.argmin(costs))], together


def _levels(values: Array, ramp: _Ramp) -> tuple[float, float]:
    """Medians of the points just before and just after."""
    before = values[max(ramp.start + 1 - _WINDOW, 0) : ramp.start + 1]
    return float(np.median(before)), float(np.median(values[ramp.end : ramp.end + _WINDOW]))


def _difference(values: Array, ramp: _Ramp) -> float:
    before, after = _levels(values, ramp)
    return abs(after - before)
