"""Query parameters that several routes share, and what they mean to the store."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Annotated, Literal

from fastapi import Path, Query

from collage_monitor import wire
from collage_monitor.errors import CatalogueError
from collage_monitor.metrics import METRICS, SCALARS, metric, split_key
from collage_monitor.statistics import reduce_shards
from collage_server.components import Components
from collage_server.errors import NotFound, Unprocessable
from collage_server.queries import Positions, statistics_for, worst_layers
from collage_server.store import LatestPoint, Points, RunRecord, ScalarPoints, Selection, Store

__all__ = [
    "AxisName",
    "FirstStep",
    "LastStep",
    "LayerName",
    "MetricKey",
    "Pattern",
    "PointCount",
    "Rank",
    "RunId",
    "checked_metric",
    "is_metric",
    "known_scalars",
    "layer_points",
    "one_layer",
    "positions_of",
    "worst_of",
]

_MOST_POINTS = 10_000

RunId = Annotated[str, Path(max_length=64)]
MetricKey = Annotated[str, Query(max_length=512, description="A metric's key, or the name of a logged scalar.")]
LayerName = Annotated[str | None, Query(max_length=512, description="One layer, by its exact name.")]
Pattern = Annotated[
    str | None,
    Query(max_length=200, description="Layers whose names match this glob (* ? [seq]), merged into one."),
]
Rank = Annotated[int | None, Query(ge=0, le=2**31, description="One rank alone; default: all merged.")]
FirstStep = Annotated[int | None, Query(alias="from", ge=0, le=2**53)]
LastStep = Annotated[int | None, Query(alias="to", ge=0, le=2**53)]
PointCount = Annotated[int, Query(ge=1, le=_MOST_POINTS, description="At most so many points; 1 merges all.")]
AxisName = Annotated[Literal["step", "tokens", "time"], Query()]


def is_metric(key: str) -> bool:
    """Whether the key names a metric of the catalogue; else it can only be a logged scalar."""
    return split_key(key)[0] in METRICS


def checked_metric(key: str) -> str:
    """The key, if the catalogue has it.

    Raises:
        Unprocessable: it has not, or the label is missing or not wanted.
    """
    try:
        metric(key)
    except CatalogueError as error:
        raise Unprocessable(str(error), field="metric") from error
    return key


def known_scalars(key: str, records: list[RunRecord]) -> None:
    """Refuse a name that is no metric, no reserved scalar, and was logged by none of the runs."""
    if key not in SCALARS and not any(key in record.scalars for record in records):
        raise Unprocessable(
            f"no metric is called {key!r} and no run here logged a scalar of that name; "
            "GET /api/v1/metrics-catalogue lists the metrics",
            field="metric",
        )


def positions_of(components: Components, record: RunRecord, axis: AxisName) -> Positions:
    """Where the run's steps stand on an axis."""
    tokens: ScalarPoints | None = None
    if axis == "tokens":
        tokens = components.store.scalar_points(record.run_id, ("tokens",), Selection()).get("tokens")
    return Positions(axis, record.first_time or 0.0, tokens)


def layer_points(
    components: Components,
    run_id: str,
    keys: tuple[str, ...],
    selection: Selection,
    layer: str | None,
    pattern: str | None,
) -> Points:
    """Points of one layer, or of all layers that match a glob, merged as shards: totals are one-dimensional.

    Raises:
        NotFound: no such layer, or none matches.
    """
    if layer is not None and pattern is not None:
        raise Unprocessable("give layer or pattern, not both", field="pattern")
    names = [layer] if layer is not None else _matching(components, run_id, pattern or "*")
    return one_layer(components.store.layer_points(run_id, keys, selection, names))


def one_layer(points: Points) -> Points:
    """The layers of these points merged as shards."""
    return dataclasses.replace(points, totals=reduce_shards(points.totals, axis=1), layers=[])


def worst_of(store: Store, run_id: str, point: LatestPoint | None, key: str, k: int) -> list[wire.WorstLayer]:
    """The k layers worst in a metric at the newest measured step."""
    if point is None:
        return []
    at = Selection(first_step=point.step, last_step=point.step)
    return worst_layers(key, store.layer_points(run_id, statistics_for(key, intervals=False), at), k)


def _matching(components: Components, run_id: str, pattern: str) -> list[str]:
    names = [entry.name for entry in components.store.layers(run_id)]
    chosen = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not chosen:
        raise NotFound(
            f"no layer of run {run_id!r} matches {pattern!r}; GET /api/v1/runs/{run_id}/layers lists them",
            field="pattern",
        )
    return chosen
