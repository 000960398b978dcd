"""Answers of the server. Number fields are JSON numbers, "NaN", "Infinity", "-Infinity", or null for undefined."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from collage_monitor.wire.messages import Attempt, Layer, Stream, WatchInfo
from collage_monitor.wire.numbers import Number

__all__ = [
    "BatchAnswer",
    "Catalogue",
    "ComparedRun",
    "Comparison",
    "Deleted",
    "ErrorAnswer",
    "ErrorBody",
    "Health",
    "Heatmap",
    "Histogram",
    "Latest",
    "LayerList",
    "LoggedScalar",
    "RejectedReport",
    "Run",
    "RunPage",
    "RunSummary",
    "Series",
    "StreamList",
    "WorstLayer",
]

Values = list[Number | None]


class ErrorBody(Struct, kw_only=True, frozen=True):
    """Why a request was refused: `field` names the offending field, `limit` the bound that it broke."""

    code: str
    message: str
    field: str | None = None
    limit: float | None = None
    request_id: str | None = None


class ErrorAnswer(Struct, kw_only=True, frozen=True):
    """The one shape of every error."""

    error: ErrorBody


class RejectedReport(Struct, kw_only=True, frozen=True):
    """One report of a batch that was refused; its neighbours were kept."""

    index: int
    seq: int | None
    code: str
    message: str
    field: str | None = None
    limit: float | None = None


class BatchAnswer(Struct, kw_only=True, frozen=True):
    """What became of a batch; sent after the commit. accepted + duplicates + rejected = reports sent."""

    accepted: int
    duplicates: int
    rejected: list[RejectedReport] = field(default_factory=list)


class LoggedScalar(Struct, kw_only=True, frozen=True):
    """The newest value of a logged scalar."""

    step: int
    value: Number


class WorstLayer(Struct, kw_only=True, frozen=True):
    """A layer that stands out in a metric."""

    layer: str
    metric: str
    value: Number | None


class Run(Struct, kw_only=True, frozen=True):
    """A run with its newest numbers. `state` "stale": no report for ten minutes and not finished."""

    run_id: str
    project: str
    name: str
    group: str | None
    tags: list[str]
    notes: str
    seed: int | None
    config: dict[str, Any]
    state: Literal["running", "finished", "failed", "stale"]
    created_at: float
    updated_at: float
    first_step: int | None
    last_step: int | None
    attempts: list[Attempt]
    watch: WatchInfo | None
    latest: dict[str, Number | None]
    scalars: dict[str, LoggedScalar]


class RunPage(Struct, kw_only=True, frozen=True):
    """A page of runs, newest first; `cursor` asks for the next page, null when there is none."""

    runs: list[Run]
    cursor: str | None


class LayerList(Struct, kw_only=True, frozen=True):
    """The run's layers in the order in which they were first seen."""

    run_id: str
    layers: list[Layer]


class StreamList(Struct, kw_only=True, frozen=True):
    """The run's streams, by attempt and rank."""

    run_id: str
    streams: list[Stream]


class Series(Struct, kw_only=True, frozen=True):
    """One metric or scalar over the run; all lists have equal length.

    A point merges the measured steps first_steps[i] … steps[i]; `positions` is its place on the asked axis
    (step, tokens, or seconds since the run's first report). `minimum` and `maximum` are those of the single steps
    inside the point, `low` and `high` the 95 % interval of the merged value where the metric has one.
    `ranks` counts the ranks that reported the point, of `world_size`: fewer is a partial point.
    `cursor`, where one was asked for, asks for what comes later; the points of an answer that `continues` follow
    those of the answer that gave it, those of any other stand in their place.
    """

    run_id: str
    metric: str
    layer: str | None
    axis: Literal["step", "tokens", "time"]
    first_steps: list[int]
    steps: list[int]
    positions: Values
    values: Values
    minimum: Values
    maximum: Values
    low: Values | None = None
    high: Values | None = None
    ranks: list[int] | None = None
    world_size: int | None = None
    cursor: str | None = None
    continues: bool = False


class Heatmap(Struct, kw_only=True, frozen=True):
    """A metric over layers and steps: values[layer][point]; `positions` are the points' places on the axis."""

    run_id: str
    metric: str
    layers: list[str]
    first_steps: list[int]
    steps: list[int]
    values: list[Values]
    axis: Literal["step", "tokens", "time"] = "step"
    positions: Values = field(default_factory=list)


class Histogram(Struct, kw_only=True, frozen=True):
    """A merged histogram: counts[i] elements in bin labels[i] ("underflow", "-24" … "7", "overflow")."""

    run_id: str
    name: str
    layer: str | None
    first_step: int | None
    step: int | None
    labels: list[str]
    counts: Values


class RunSummary(Struct, kw_only=True, frozen=True):
    """One run of a comparison, without its curve: its metrics merged over all measured steps, its last scalars.

    `mean_scalars` are means over the last 20 logged values. `reports` counts what is stored.
    """

    run_id: str
    name: str
    strategy: str | None
    dtype: str | None
    state: str
    last_step: int | None
    reports: int
    merged: dict[str, Number | None]
    scalars: dict[str, LoggedScalar]
    mean_scalars: dict[str, Number]


class ComparedRun(RunSummary, kw_only=True, frozen=True):
    """One run of a comparison with its curve."""

    series: Series


class Comparison(Struct, kw_only=True, frozen=True):
    """Several runs side by side on one metric and axis."""

    metric: str
    axis: Literal["step", "tokens", "time"]
    runs: list[ComparedRun]


class Latest(Struct, kw_only=True, frozen=True):
    """The newest measured step of a run: the model's metrics, the last scalars, the worst three layers by EDQ."""

    run_id: str
    step: int | None
    time: float | None
    model: dict[str, Number | None]
    scalars: dict[str, LoggedScalar]
    worst: list[WorstLayer]


class Catalogue(Struct, kw_only=True, frozen=True):
    """Everything that has a name: metrics, statistics, reserved scalars, strategies, as plain objects."""

    metrics: list[dict[str, Any]]
    statistics: list[dict[str, Any]]
    scalars: list[dict[str, Any]]
    strategies: list[dict[str, Any]]


class Deleted(Struct, kw_only=True, frozen=True):
    """A run that is gone: its id answers 410 from now on."""

    run_id: str


class Health(Struct, kw_only=True, frozen=True):
    """The server's state: `status` "ok" or what is wrong."""

    status: str
    version: str
