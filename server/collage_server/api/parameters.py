"""Query parameters that several routes share, and what they mean to the store."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import Path, Query

from collage_monitor import wire
from collage_monitor.errors import CatalogueError
from collage_monitor.metrics import METRICS, SCALARS, metric, split_key
from collage_monitor.statistics import reduce_shards
from collage_server.components import Components
from collage_server.errors import NotFound, Unprocessable
from collage_server.queries import (
    CLIP_RATIO,
    UNCLIPPED,
    Positions,
    clip_ratio,
    concatenated,
    statistics_for,
    worst_layers,
)
from collage_server.store import LatestPoint, Points, RunRecord, ScalarPoints, Selection, Store

__all__ = [
    "AxisName",
    "FirstStep",
    "LastStep",
    "LayerName",
    "Layers",
    "MetricKey",
    "ModuleType",
    "Pattern",
    "PointCount",
    "Rank",
    "RunId",
    "checked_metric",
    "chosen_layers",
    "is_metric",
    "known_scalars",
    "measured_at",
    "points_of",
    "positions_of",
    "scalars_of",
    "worst_of",
]

_MOST_POINTS = 10_000
_STEPS_AT_ONCE = 4096
_NOTHING = ScalarPoints.empty()

RunId = Annotated[str, Path(max_length=64)]
MetricKey = Annotated[str, Query(max_length=512, description="A metric's key, or the name of a logged scalar.")]
LayerName = Annotated[str | None, Query(max_length=512, description="One layer, by its exact name.")]
Pattern = Annotated[
    str | None,
    Query(max_length=200, description="Layers whose names match this glob (* ? [seq]), merged into one."),
]
ModuleType = Annotated[
    str | None,
    Query(
        max_length=512, description="Layers of one module type (Linear, Embedding …); with a pattern, both hold."
    ),
]
Rank = Annotated[int | None, Query(ge=0, le=2**31, description="One rank alone; default: all merged.")]
FirstStep = Annotated[int | None, Query(alias="from", ge=0, le=2**53)]
LastStep = Annotated[int | None, Query(alias="to", ge=0, le=2**53)]
PointCount = Annotated[int, Query(ge=1, le=_MOST_POINTS, description="At most so many points; 1 merges all.")]
AxisName = Annotated[Literal["step", "tokens", "time"], Query()]

Layers = tuple[str | None, str | None, str | None]
"""(a layer's name, a glob, a module type): what of a run is looked at; nothing is the whole model."""


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


def scalars_of(store: Store, run_ids: Sequence[str], name: str, selection: Selection) -> dict[str, ScalarPoints]:
    """The logged scalar `name` of each run; a clip ratio that nobody logged is made from what it stands for."""
    names = (name, UNCLIPPED) if name == CLIP_RATIO else (name,)
    logged = store.points.scalars_of(run_ids, names, selection)
    found = {run_id: held.get(name, _NOTHING) for run_id, held in logged.items()}
    lacking = [run_id for run_id, held in logged.items() if name not in held and UNCLIPPED in held]
    if name == CLIP_RATIO and lacking:
        single = dataclasses.replace(selection, points=None, extremes_of=None)
        measured = store.points.points_of(lacking, statistics_for("grad_norm"), single)
        found |= {run_id: clip_ratio(measured[run_id], logged[run_id][UNCLIPPED]) for run_id in lacking}
    return found


def known_scalars(key: str, records: list[RunRecord]) -> None:
    """Refuse a name that is no metric, no reserved scalar, and was logged by none of the runs."""
    if key not in SCALARS and not any(key in record.scalars for record in records):
        raise Unprocessable(
            f"no metric is called {key!r} and no run here logged a scalar of that name; "
            "GET /api/v1/metrics-catalogue lists the metrics",
            field="metric",
        )


def positions_of(components: Components, run_ids: Sequence[str], axis: AxisName) -> dict[str, Positions]:
    """Where each run's steps stand on an axis."""
    if axis == "tokens":
        tokens = components.store.points.scalars_of(run_ids, ("tokens",), Selection())
        return {run_id: Positions(axis, tokens=held.get("tokens")) for run_id, held in tokens.items()}
    if axis == "time":
        records = components.store.runs.records(run_ids)
        return {run_id: Positions(axis, record.first_time or 0.0) for run_id, record in records.items()}
    return {run_id: Positions(axis) for run_id in run_ids}


def points_of(
    store: Store, run_ids: Sequence[str], keys: tuple[str, ...], selection: Selection, layers: Layers
) -> dict[str, Points]:
    """Points of each run, of the model or of the chosen layers merged as shards: totals are one-dimensional.

    Raises:
        NotFound: a run has no such layer, or none that matches.
    """
    layer, pattern, module_type = layers
    if pattern is not None or module_type is not None:
        return {run_id: _layer_points(store, run_id, keys, selection, *layers) for run_id in run_ids}
    points = store.points.points_of(run_ids, keys, selection, layer)
    return points if layer is None else {run_id: _one_layer(held) for run_id, held in points.items()}


def _layer_points(
    store: Store,
    run_id: str,
    keys: tuple[str, ...],
    selection: Selection,
    layer: str | None,
    pattern: str | None,
    module_type: str | None,
) -> Points:
    """Points of one layer, or of all layers of a glob or module type, of one run."""
    if layer is not None and (pattern is not None or module_type is not None):
        field = "pattern" if pattern is not None else "module_type"
        raise Unprocessable(f"give layer or {field}, not both", field=field)
    names = [layer] if layer is not None else chosen_layers(store, run_id, pattern, module_type)
    if selection.extremes_of is None or (names is not None and len(names) == 1):
        return _one_layer(store.points.layer_points(run_id, keys, selection, names))
    return _merged_step_by_step(store, run_id, keys, selection, names)


def _merged_step_by_step(
    store: Store, run_id: str, keys: tuple[str, ...], selection: Selection, names: Sequence[str] | None
) -> Points:
    """Layers merged at every single step: coarse points of each tell neither extremes nor interval of their sum."""
    single = dataclasses.replace(selection, points=None, extremes_of=None)
    steps = store.points.model_points(run_id, ("measured_steps",), single).steps
    parts = []
    for start in range(0, max(len(steps), 1), _STEPS_AT_ONCE):
        some = steps[start : start + _STEPS_AT_ONCE].tolist()
        at = dataclasses.replace(single, first_step=some[0], last_step=some[-1]) if some else single
        parts.append(_one_layer(store.points.layer_points(run_id, keys, at, names)))
    return concatenated(parts)


def _one_layer(points: Points) -> Points:
    """The layers of these points merged as shards. Extremes of several layers do not tell those of their sum."""
    if len(points.layers) != 1:
        return dataclasses.replace(points, totals=reduce_shards(points.totals, axis=1), extremes={}, layers=[])
    totals = {key: values[:, 0] for key, values in points.totals.items()}
    extremes = {key: (low[:, 0], high[:, 0]) for key, (low, high) in points.extremes.items()}
    return dataclasses.replace(points, totals=totals, extremes=extremes, layers=[])


def measured_at(store: Store, run_id: str, step: int, rank: int | None = None) -> Selection:
    """The newest measured step at or before `step`, alone.

    Raises:
        NotFound: there is none.
    """
    steps = store.points.model_points(run_id, ("measured_steps",), Selection(rank=rank, last_step=step)).steps
    if not len(steps):
        raise NotFound(f"run {run_id!r} has no measured step at or before {step}; leave step out", field="step")
    return Selection(rank=rank, first_step=int(steps[-1]), last_step=int(steps[-1]))


def worst_of(
    store: Store, run_id: str, point: LatestPoint | None, key: str, k: int, layers: Sequence[str] | None = None
) -> list[wire.WorstLayer]:
    """The k layers worst in a metric at the newest measured step, of these (None: of all)."""
    if point is None:
        return []
    at = Selection(first_step=point.step, last_step=point.step)
    return worst_layers(key, store.points.layer_points(run_id, statistics_for(key, intervals=False), at, layers), k)


def chosen_layers(
    store: Store, run_id: str, pattern: str | None = None, module_type: str | None = None
) -> list[str] | None:
    """Names of the layers that match the glob and are of the module type; None where neither is asked for.

    Raises:
        NotFound: there is no such layer.
    """
    if pattern is None and module_type is None:
        return None
    entries = store.streams.layers(run_id)
    if module_type is not None:
        entries = _of_type(run_id, entries, module_type)
    chosen = [entry.name for entry in entries if fnmatch.fnmatchcase(entry.name, pattern or "*")]
    if not chosen:
        raise NotFound(
            f"no layer of run {run_id!r} matches {pattern!r}; GET /api/v1/runs/{run_id}/layers lists them",
            field="pattern",
        )
    return chosen


def _of_type(run_id: str, entries: Sequence[wire.Layer], module_type: str) -> list[wire.Layer]:
    found = [entry for entry in entries if entry.module_type == module_type]
    if not found:
        types = ", ".join(sorted({entry.module_type or "''" for entry in entries})) or "none"
        raise NotFound(
            f"no layer of run {run_id!r} is of module type {module_type!r}; its types are {types}",
            field="module_type",
        )
    return found
