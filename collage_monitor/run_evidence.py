"""The evidence about a run on a server, read over HTTP: the recent past of its model and layers.

    with Client(server_url, token) as client:
        found = judge(read_evidence(client, run_id))

A process that holds the totals themselves, such as the server, needs no client: it makes the same evidence with
`collage_monitor.judgement.evidence_of`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from collage_monitor.client import Client
from collage_monitor.forecast import (
    Forecast,
    ForecastError,
    GridRecord,
    forecast_strategies,
    kinds_of,
    trained_dtype,
)
from collage_monitor.judgement import (
    EDQ_TOLERANCE,
    OF_LAYERS,
    Evidence,
    SilentRanks,
    finite,
    last_change,
    recent_points,
    silent_ranks,
)
from collage_monitor.metrics import METRICS, is_metric, split_key
from collage_monitor.onset import Onset, find_onset, since_in_words
from collage_monitor.schedule import RateSchedule
from collage_monitor.statistics import metric_keys
from collage_monitor.wire import Number, Run, Series, WatchInfo

__all__ = ["MetricHistory", "read_evidence", "read_forecast", "read_history"]

_POINTS: Final = 2000
_HEATMAP_POINTS: Final = 128
_OF_MODEL: Final = frozenset(
    {
        *OF_LAYERS,
        "average_edq_noise_ratio",
        "average_edq_ratio",
        "average_lost_ratio",
        "average_moved_ratio",
        "average_nonfinite",
        "cast_changed_ratio",
        "cast_recoded_ratio",
        "cast_route_ratio",
        "decay_ratio",
        "distorted",
        "edq_noise_ratio",
        "edq_oracle_noise_ratio",
        "edq_oracle_ratio",
        "edq_window_noise_ratio",
        "edq_window_ratio",
        "faithful",
        "idle",
        "lost",
        "lost_visible_ratio",
        "lost_window_ratio",
        "nonfinite",
        "nonfinite_grads",
        "oracle_displacement_ratio",
        "residual_fill_ratio",
        "residual_nonfinite",
        "residual_zero_ratio",
        "sampled",
        "state_decrement_noise_ratio",
        "state_decrement_ratio",
    }
)
"""The metrics that the rules of `judgement/` read; tests/contract/test_judgement.py holds it complete."""
_GRIDS: Final = 16
"""Steps of which a forecast asks for the histogram, of the newest half, on which it rests."""
_TENTH, _QUARTER = -1.2816, -0.6745
"""Quantiles of a normal distribution: of log₂(|u| / gap), a tenth and the half of a layer are asked for."""
_METRICS_A_QUESTION: Final = 20
"""As many as the server takes."""


def read_evidence(client: Client, run: Run | str) -> Evidence:
    """The evidence that the run's own process has, for all ranks together; one request for each layer metric.

    run: its id, or the answer of `client.run`.
    If the governor lengthened the interval, the recent past of a run of more than _POINTS measured steps may
    begin later here than in the run's process: an answer does not tell how many steps a point merges.

    Raises:
        CollageError: the server does not answer, or refuses.
    """
    run = client.run(run) if isinstance(run, str) else run
    run_id = run.run_id
    statistics = dict.fromkeys(name for stream in client.streams(run_id).streams for name in stream.statistics)
    keys = [key for key in metric_keys(statistics) if split_key(key)[0] in _OF_MODEL]
    if not keys or run.last_step is None:
        return Evidence({}, watch=run.watch)
    first = _begin_of_recent_past(client, run)
    series: list[Series] = []
    for begin in range(0, len(keys), _METRICS_A_QUESTION):
        merged = client.series(run_id, keys[begin : begin + _METRICS_A_QUESTION], points=1, first_step=first)
        series += [merged, *(merged.more.values() if isinstance(merged.more, dict) else ())]
    model: dict[str, Number | None] = {}
    for own in series:
        model[own.metric] = own.values[-1] if own.values else None
        for bound, values in (("low", own.low), ("high", own.high)):
            if values:
                model[f"{own.metric}_{bound}"] = values[-1]
    layers: dict[str, dict[str, Number | None]] = {}
    for key in (key for key in OF_LAYERS if key in keys):
        heatmap = client.heatmap(run_id, key, points=1, first_step=first)
        for name, row in zip(heatmap.layers, heatmap.values, strict=True):
            layers.setdefault(name, {})[key] = row[-1] if row else None
    earliest, end = min((own.first_steps[0] for own in series if own.steps), default=None), series[0].steps[-1:]
    silent = _silent_ranks(client, run)
    return Evidence(model, layers, run.watch, earliest, end[0] if end else None, silent)


@dataclass(frozen=True)
class MetricHistory:
    """A metric, or a logged scalar, of a run's model over its steps, and since when it is what it is.

    onset: its abrupt change, with the layers that changed too; None if none was found.
    """

    series: Series
    onset: Onset | None

    def since(self) -> str | None:
        """Since when an EDQ is what it is, in a sentence; None if no abrupt change was found."""
        steps, values = self.series.first_steps, _numbers(self.series.values)
        return since_in_words(self.onset, steps, values, "EDQ", tolerance=EDQ_TOLERANCE)


def read_history(
    client: Client,
    run_id: str,
    metric: str = "edq_ratio",
    *,
    first_step: int | None = None,
    last_step: int | None = None,
) -> MetricHistory:
    """A metric of a run, or a logged scalar, in at most _HEATMAP_POINTS points; one request, two of a metric.

    Raises:
        CollageError: the server does not answer, or refuses.
    """
    model = client.series(run_id, metric, points=_HEATMAP_POINTS, first_step=first_step, last_step=last_step)
    entry = METRICS[split_key(metric)[0]] if is_metric(metric) else None
    least = EDQ_TOLERANCE if entry is not None and entry.ideal is not None else 0.0
    if entry is None:
        values = _numbers(model.values)
        return MetricHistory(model, find_onset(model.first_steps, values, least=least, last_steps=model.steps))
    heatmap = client.heatmap(run_id, metric, points=_HEATMAP_POINTS, first_step=first_step, last_step=last_step)
    at = dict(zip(model.steps, model.values, strict=True))
    onset = find_onset(
        heatmap.first_steps,
        _numbers([at.get(step) for step in heatmap.steps]),
        {name: _numbers(row) for name, row in zip(heatmap.layers, heatmap.values, strict=True)},
        least=least,
        last_steps=heatmap.steps,
    )
    return MetricHistory(model, onset)


def read_forecast(client: Client, run_id: str, schedule: RateSchedule) -> Forecast:
    """Forecast of the step from which the run, and other strategies in its place, lose updates; see
    `forecast_strategies`.

    It asks for the model's histogram at up to _GRIDS measured steps, and for two quantiles of each layer.

    Raises:
        CollageError: the server does not answer, or refuses.
        ForecastError: what is known of the run does not suffice.
    """
    run, layers = client.run(run_id), client.layers(run_id).layers
    margins = client.heatmap(run_id, "half_ulp_margin", points=_HEATMAP_POINTS)
    factors = client.heatmap(run_id, "half_ulp_lr_factor", points=_HEATMAP_POINTS)
    if not margins.steps:
        raise ForecastError("no step with a known update was measured")
    last = len(margins.steps) - 1
    newest = bisect_left(margins.steps, margins.steps[-1] / 2)
    columns = sorted({round(place) for place in np.linspace(min(newest, max(0, last - _GRIDS)), last, _GRIDS)})
    steps = [margins.steps[column] for column in columns]
    counts = [_numbers(client.histogram(run_id, step=step).counts) for step in steps]
    halves, tenths = (np.array([_numbers(row) for row in found.values])[:, columns] for found in (margins, factors))
    half = halves - 1.0
    quarters = half + _QUARTER / _TENTH * (-1.0 - np.log2(tenths) - half)
    by_name, watch = {layer.name: layer for layer in layers}, run.watch
    told = [by_name[name] for name in margins.layers]
    strategy = watch.shown_strategy if watch is not None else "unknown"
    record = GridRecord(steps, np.array(counts).T, kinds_of(told), quarters, trained_dtype(told), strategy)
    return forecast_strategies(record, schedule)


def _numbers(values: Sequence[Number | None]) -> list[float]:
    return [float("nan") if (number := finite(value)) is None else number for value in values]


def _silent_ranks(client: Client, run: Run) -> SilentRanks | None:
    """The silent ranks; layers are requested only if no step has all ranks."""
    found = client.series(run.run_id, "elements", points=_POINTS)
    ranks, expected = found.ranks or [], found.expected_ranks or []
    if not ranks or ranks[-1] >= expected[-1]:
        return None
    torn = all(own < wanted for own, wanted in zip(ranks, expected, strict=True))
    layers = client.layers(run.run_id).layers if torn else []
    whole = float(sum(math.prod(layer.shape) for layer in layers))
    measured, elements = _measured_steps(found, run.watch), [finite(value) or 0.0 for value in found.values]
    is_over = run.state not in {"running", "stale"}
    return silent_ranks(found.first_steps, measured, ranks, expected, elements, whole, is_over=is_over)


def _measured_steps(series: Series, watch: WatchInfo | None) -> list[float]:
    """How many measured steps each point merges, by what `watch.every` gives."""
    every = watch.every if watch and watch.every else 1
    return [(last - first) // every + 1.0 for first, last in zip(series.first_steps, series.steps, strict=True)]


def _begin_of_recent_past(client: Client, run: Run) -> int | None:
    """The first step of the recent past; Σ u² of a point is its mean norm squared times its measured steps.

    An answer does not carry that number. Here it is what `watch.every` gives: too many where the governor
    lengthened the interval and the point merges several steps, so the recent past may hold fewer than it should.
    """
    norms = client.series(run.run_id, "intended_norm", points=_POINTS)
    if not norms.steps:
        return None
    measured = _measured_steps(norms, run.watch)
    squares = [count * (finite(norm) or 0.0) ** 2 for count, norm in zip(measured, norms.values, strict=True)]
    since = last_change(run.attempts, run.watch, norms.steps[-1])
    return max(norms.first_steps[-recent_points(norms.steps, measured, squares, since)], since)
