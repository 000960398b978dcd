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
from collage_server.api.cache import respond, revisions_of
from collage_server.api.routing import resource
from collage_server.components import Components, components_of
from collage_server.errors import Unprocessable
from collage_server.store import ScalarPoints, Selection, Store

__all__ = ["router"]

router = resource("reading")
_NOTHING = ScalarPoints.empty()
PositionsOf = Mapping[str, queries.Positions]
SeriesOf = dict[str, wire.Series]


@router.get("/compare", **describes(wire.Comparison))
def compare(
    request: Request,
    run: Annotated[list[str], Query(min_length=1, max_length=100, description="A run_id; repeat it.")],
    metric: parameters.MetricKey,
    layer: parameters.LayerName = None,
    points: parameters.PointCount = 500,
    axis: parameters.AxisName = "step",
) -> Response:
    """Each run's curve of one metric (of the model, or of one layer) or scalar, beside it the model's metrics
    merged over everything and the last scalars."""
    components = components_of(request)
    asked = _Asked(metric, layer, points, axis)
    _check(components, run, asked)

    revisions = revisions_of(request, run)

    def make() -> dict[str, Any]:
        keys = {run_id: ("compare", run_id, asked, revision) for run_id, revision in revisions.items()}
        answers = {run_id: components.answers.known(key) for run_id, key in keys.items()}
        missing = [run_id for run_id, known in answers.items() if known is None]
        for compared in _compared(components, missing, asked) if missing else ():
            answers[compared.run_id] = components.answers.keep(keys[compared.run_id], compared)
        return {"metric": metric, "axis": axis, "runs": list(answers.values())}

    return respond(request, revisions, make, keep=False)


@dataclass(frozen=True)
class _Asked:
    metric: str
    layer: str | None
    points: int
    axis: parameters.AxisName


def _check(components: Components, run_ids: Sequence[str], asked: _Asked) -> None:
    if parameters.is_metric(asked.metric):
        parameters.checked_metric(asked.metric)
        return
    if asked.layer is not None:
        raise Unprocessable(f"{asked.metric!r} is a logged scalar: it has no layers", field="layer")
    if asked.metric not in SCALARS:
        parameters.known_scalars(asked.metric, list(components.store.records(run_ids).values()))


def _compared(components: Components, run_ids: list[str], asked: _Asked) -> Iterator[wire.ComparedRun]:
    """Runs read together: what each has costs, the number of statements does not grow."""
    store = components.store
    shown = asked.metric if parameters.is_metric(asked.metric) and asked.layer is None else None
    selection = Selection(points=asked.points if shown else 1, extremes_of=shown)
    runs = store.compared(run_ids, selection, queries.MEAN_OF_LAST)
    positions = parameters.positions_of(components, run_ids, asked.axis)
    model = {run_id: held.points for run_id, held in runs.items()}
    if shown is not None:
        series = queries.metric_series(shown, model, asked.points, positions)
    elif asked.layer is None:
        series = _scalars(store, run_ids, asked, positions)
    else:
        series = _layers(store, run_ids, asked, asked.layer, positions)
    merged = queries.merged_metrics(model)
    now, stale_after = components.clock(), components.settings.stale_after_seconds
    for run_id, held in runs.items():
        state = queries.state_of(held.record, now, stale_after)
        yield queries.compared_run(held.record, state, series[run_id], merged[run_id], held.newest)


def _scalars(store: Store, run_ids: list[str], asked: _Asked, positions: PositionsOf) -> SeriesOf:
    logged = parameters.scalars_of(store, run_ids, asked.metric, Selection())
    return {
        run_id: queries.scalar_series(run_id, asked.metric, points, asked.points, positions[run_id])
        for run_id, points in logged.items()
    }


def _layers(store: Store, run_ids: list[str], asked: _Asked, layer: str, positions: PositionsOf) -> SeriesOf:
    selection = Selection(points=asked.points, extremes_of=asked.metric)
    measured = store.points_of(run_ids, queries.statistics_for(asked.metric), selection, layer)
    one = {run_id: parameters.one_layer(points) for run_id, points in measured.items()}
    return queries.metric_series(asked.metric, one, asked.points, positions, layer)
