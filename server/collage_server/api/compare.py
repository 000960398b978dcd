"""Compare: several runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_monitor.metrics import SCALARS
from collage_server import queries
from collage_server.api import parameters
from collage_server.api.answers import describes
from collage_server.api.cache import Revisions, respond, revisions_of
from collage_server.api.routing import resource
from collage_server.components import Components, components_of
from collage_server.errors import Unprocessable
from collage_server.store import Selection, Store

__all__ = ["router"]

router = resource("reading")
PositionsOf = Mapping[str, queries.Positions]
SeriesOf = Iterator[tuple[str, wire.Series]]


@router.get("/compare", **describes(wire.Comparison))
def compare(
    request: Request,
    run: Annotated[list[str], Query(min_length=1, max_length=100, description="A run_id; repeat it.")],
    metric: parameters.MetricKey,
    layer: parameters.LayerName = None,
    pattern: parameters.Pattern = None,
    module_type: parameters.ModuleType = None,
    rank: parameters.Rank = None,
    first_step: parameters.FirstStep = None,
    last_step: parameters.LastStep = None,
    points: parameters.PointCount = 500,
    axis: parameters.AxisName = "step",
) -> Response:
    """Each run's curve of one metric (of the model, of one layer, of layers of a glob or module type) or scalar,
    beside it the model's metrics merged over everything and the last scalars."""
    components = components_of(request)
    selection = Selection(rank=rank, first_step=first_step, last_step=last_step, points=points, extremes_of=metric)
    asked = _Asked(metric, (layer, pattern, module_type), selection, axis)
    _check(components, run, asked)

    revisions = revisions_of(request, run)

    def make() -> dict[str, Any]:
        keys = {run_id: ("compare", run_id, asked, revision) for run_id, revision in revisions.items()}
        answers = {run_id: components.answers.known(key) for run_id, key in keys.items()}
        missing = [run_id for run_id, known in answers.items() if known is None]
        if missing:
            summaries = _summaries(components, {run_id: revisions[run_id] for run_id in missing})
            for run_id, series in _series(components, missing, asked):
                compared = queries.compared_run(summaries[run_id], series)
                answers[run_id] = components.answers.keep(keys[run_id], compared)
        return {"metric": metric, "axis": axis, "runs": list(answers.values())}

    return respond(request, revisions, make, keep=False)


@dataclass(frozen=True)
class _Asked:
    metric: str
    layers: parameters.Layers
    selection: Selection
    axis: parameters.AxisName


def _check(components: Components, run_ids: Sequence[str], asked: _Asked) -> None:
    if parameters.is_metric(asked.metric):
        parameters.checked_metric(asked.metric)
        return
    if any(asked.layers):
        raise Unprocessable(f"{asked.metric!r} is a logged scalar: it has no layers", field="layer")
    if asked.metric not in SCALARS:
        parameters.known_scalars(asked.metric, list(components.store.runs.records(run_ids).values()))


def _summaries(components: Components, revisions: Revisions) -> dict[str, wire.RunSummary]:
    """What is shown beside the curves, whichever they are: kept until the run changes."""
    keys = {run_id: ("summary", run_id, revision) for run_id, revision in revisions.items()}
    kept = {run_id: components.answers.known(key) for run_id, key in keys.items()}
    found = {
        run_id: wire.decode_message(bytes(raw), wire.RunSummary, wire.JSON)
        for run_id, raw in kept.items()
        if raw is not None
    }
    if not (missing := [run_id for run_id in keys if run_id not in found]):
        return found
    runs = components.store.points.compared(missing, queries.MEAN_OF_LAST)
    merged = queries.merged_metrics({run_id: held.points for run_id, held in runs.items()})
    for run_id, held in runs.items():
        _, state = revisions[run_id]
        found[run_id] = queries.run_summary(held.record, state, merged[run_id], held.newest)
        components.answers.keep(keys[run_id], found[run_id])
    return found


def _series(components: Components, run_ids: list[str], asked: _Asked) -> SeriesOf:
    """Curves read together: what each run has costs, the number of statements does not grow."""
    positions = parameters.positions_of(components, run_ids, asked.axis)
    if not parameters.is_metric(asked.metric):
        return _scalars(components.store, run_ids, asked, positions)
    needed = queries.statistics_for(asked.metric)
    points = parameters.points_of(components.store, run_ids, needed, asked.selection, asked.layers)
    shown = next(filter(None, asked.layers), None)
    return queries.metric_series(asked.metric, points, asked.selection.points or 1, positions, shown)


def _scalars(store: Store, run_ids: list[str], asked: _Asked, positions: PositionsOf) -> SeriesOf:
    logged = parameters.scalars_of(store, run_ids, asked.metric, asked.selection)
    count = asked.selection.points or 1
    for run_id, points in logged.items():
        yield run_id, queries.scalar_series(run_id, asked.metric, points, count, positions[run_id])
