"""Questions about a run's past, asked over HTTP: the history of a metric with its change, and a forecast.

    with Client(server_url, token) as client:
        found = client.overview(run_id)

is the judgement of a run: the server makes it (`collage_monitor.diagnosis`), and others quote it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from collage_monitor.client import Client
from collage_monitor.diagnosis import EDQ_TOLERANCE, finite
from collage_monitor.forecast import (
    Forecast,
    ForecastError,
    GridRecord,
    forecast_strategies,
    kinds_of,
    trained_dtype,
)
from collage_monitor.metrics import METRICS, is_metric, split_key
from collage_monitor.onset import Onset, find_onset
from collage_monitor.schedule import RateSchedule
from collage_monitor.wire import Number, Series

__all__ = ["MetricHistory", "read_forecast", "read_history"]

_HEATMAP_POINTS: Final = 128
_GRIDS: Final = 16
"""Steps of which a forecast asks for the histogram, of the newest half, on which it rests."""
_TENTH, _QUARTER = -1.2816, -0.6745
"""Quantiles of a normal distribution: of log₂(|u| / gap), a tenth and the half of a layer are asked for."""


@dataclass(frozen=True)
class MetricHistory:
    """A metric, or a logged scalar, of a run's model over its steps, and since when it is what it is.

    onset: its abrupt change, with the layers that changed too; None if none was found.
    """

    series: Series
    onset: Onset | None


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
