"""Reads what a question needs from the store: points of chosen layers, logged values, positions on an axis.

`api/curves.py` and `api/layer_answers.py` read through it, so that both find the same points for the same question
(`tests/server/test_series.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from collage_monitor import wire
from collage_monitor.metrics import METRICS, SCALARS, split_key
from collage_monitor.statistics import reduce_shards, statistics_for
from collage_server.api.query_parameters import LayerChoice, checked_metric
from collage_server.errors import NotFound, Unprocessable
from collage_server.memory_budget import released_afterwards
from collage_server.queries.curves import CLIP_RATIO, UNCLIPPED, AxisName, Positions, clip_ratio, concatenated
from collage_server.queries.layer_answers import worst_layers
from collage_server.store import Points, ScalarPoints, Selection, Snapshot

__all__ = [
    "check_scalar_exists",
    "measured_step",
    "points_of",
    "positions_of",
    "scalars_of",
    "worst_of",
]

_STEPS_AT_ONCE = 4096
_NUMBERS_AT_ONCE = 2**22
_MOST_NUMBERS = 2**28
"""That a question reads step by step, in a few seconds: of 1,000 layers 60,000 steps."""
_NOTHING = ScalarPoints.empty()


def check_scalar_exists(snapshot: Snapshot, key: str, run_ids: Sequence[str]) -> None:
    """Refuse a name that is neither a metric nor a reserved scalar, and that none of the runs logged."""
    if key not in SCALARS and not any(key in record.scalars for record in snapshot.records(run_ids).values()):
        if split_key(key)[0] in METRICS:
            checked_metric(key)  # Raises an error that names the missing label.
        raise Unprocessable(
            f"no metric is called {key!r} and no run here logged a scalar of that name; "
            "GET /api/v1/metrics-catalogue lists the metrics",
            field="metric",
        )


def scalars_of(
    snapshot: Snapshot, run_ids: Sequence[str], name: str, selection: Selection
) -> dict[str, ScalarPoints]:
    """The logged scalar `name` of each run; a missing clip ratio is computed."""
    names = (name, UNCLIPPED) if name == CLIP_RATIO else (name,)
    logged = snapshot.scalars(run_ids, names, selection)
    found = {run_id: held.get(name, _NOTHING) for run_id, held in logged.items()}
    lacking = [run_id for run_id, held in logged.items() if name not in held and UNCLIPPED in held]
    if name == CLIP_RATIO and lacking:
        measured = snapshot.points(lacking, statistics_for("grad_norm"), _every_step(selection))
        found |= {run_id: clip_ratio(measured[run_id], logged[run_id][UNCLIPPED]) for run_id in lacking}
    return found


def positions_of(snapshot: Snapshot, run_ids: Sequence[str], axis: AxisName) -> dict[str, Positions]:
    """Each run's positions of steps on an axis."""
    if axis == "tokens":
        tokens = snapshot.scalars(run_ids, ("tokens",), Selection())
        return {run_id: Positions(axis, tokens=held.get("tokens")) for run_id, held in tokens.items()}
    if axis == "time":
        records = snapshot.records(run_ids)
        return {run_id: Positions(axis, record.first_time or 0.0) for run_id, record in records.items()}
    return {run_id: Positions(axis) for run_id in run_ids}


def points_of(
    snapshot: Snapshot, run_ids: Sequence[str], keys: Sequence[str], selection: Selection, choice: LayerChoice
) -> dict[str, Points]:
    """Points of each run, of the model or of the chosen layers merged as shards: totals are one-dimensional.

    Raises:
        NotFound: a run has no such layer, or none that matches.
    """
    if choice == LayerChoice():
        return snapshot.points(run_ids, keys, selection)
    if choice.layer is not None and choice == LayerChoice(choice.layer):
        one = dataclasses.replace(selection, by_layer=True, layers=(choice.layer,))
        return {run_id: _layers_as_one(held) for run_id, held in snapshot.points(run_ids, keys, one).items()}
    return {run_id: _merged_layers(snapshot, run_id, keys, selection, choice) for run_id in run_ids}


def _merged_layers(
    snapshot: Snapshot, run_id: str, keys: Sequence[str], selection: Selection, choice: LayerChoice
) -> Points:
    """Layers merged; step by step if extremes are requested, because coarse points have none for a sum of layers.

    Beyond _MOST_NUMBERS coarse points are read after all, and extremes stay unknown. Both in pieces of the run.
    """
    names = choice.names(snapshot, run_id)
    by_layer = dataclasses.replace(selection, by_layer=True, layers=names)
    if not selection.extremes_of or (names is not None and len(names) == 1):
        return _layers_as_one(snapshot.points([run_id], keys, by_layer)[run_id])
    steps = snapshot.points([run_id], ("measured_steps",), _every_step(selection))[run_id].steps
    layers = len(names) if names is not None else snapshot.layer_count(run_id)
    numbers = max(len(keys) * layers, 1)
    count = None if selection.points is None or numbers * len(steps) <= _MOST_NUMBERS else selection.points
    width = min(max(_NUMBERS_AT_ONCE // numbers, 1), _STEPS_AT_ONCE)
    if count is not None:
        width = max(width * len(steps) // count, 1)
        count = max(count * width // len(steps), 1)
    each = dataclasses.replace(_every_step(by_layer), points=count)
    parts = []
    for start in range(0, max(len(steps), 1), width):
        some = steps[start : start + width].tolist()
        at = dataclasses.replace(each, first_step=some[0], last_step=some[-1]) if some else each
        with released_afterwards():
            parts.append(_layers_as_one(snapshot.points([run_id], keys, at)[run_id]))
    return concatenated(parts)


def _every_step(selection: Selection) -> Selection:
    """The same selection at every measured step."""
    return dataclasses.replace(selection, points=None, extremes_of=())


def _layers_as_one(points: Points) -> Points:
    """The layers merged as shards. Extremes are left out: they do not follow from the extremes of the parts."""
    if len(points.layers) != 1:
        return dataclasses.replace(points, totals=reduce_shards(points.totals, axis=1), extremes={}, layers=[])
    totals = {key: values[:, 0] for key, values in points.totals.items()}
    extremes = {key: (low[:, 0], high[:, 0]) for key, (low, high) in points.extremes.items()}
    return dataclasses.replace(points, totals=totals, extremes=extremes, layers=[])


def measured_step(snapshot: Snapshot, run_id: str, step: int, rank: int | None = None) -> int:
    """The newest measured step at or before `step`.

    Raises:
        NotFound: there is none.
    """
    steps = snapshot.points([run_id], ("measured_steps",), Selection(rank=rank, last_step=step))[run_id].steps
    if not len(steps):
        raise NotFound(f"run {run_id!r} has no measured step at or before {step}; leave step out", field="step")
    return int(steps[-1])


def worst_of(
    snapshot: Snapshot,
    run_id: str,
    step: int | None,
    key: str,
    k: int,
    layers: tuple[str, ...] | None = None,
) -> list[wire.WorstLayer]:
    """The k layers worst in a metric at one measured step, among `layers` (None: all). Empty without a step."""
    if step is None:
        return []
    keys = statistics_for(key, intervals=False)
    points = snapshot.points([run_id], keys, Selection(at={run_id: step}, by_layer=True, layers=layers))
    return worst_layers(key, points[run_id], k)
