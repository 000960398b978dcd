"""Curves: metrics or logged scalars of one run (`/series`) or of several (`/compare`), in the same way.

A client may follow a curve: it gets the points since an earlier answer, or the whole curve if older ones changed. A
cursor holds the run's revision, the last step answered, and a digest of the stored numbers up to that step. A step
is answered once every rank that is waited for has reached it. A late report at any server, a newer attempt and
retention all change the digest, so nothing is ever skipped.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_monitor.metrics import is_metric
from collage_monitor.statistics import statistics_for
from collage_server.api import query_parameters
from collage_server.api.cached_answers import Revisions, respond, revisions_of
from collage_server.api.responses import describes
from collage_server.api.routing import resource_router
from collage_server.api.store_reads import check_scalar_exists, points_of, positions_of, scalars_of
from collage_server.app_state import AppState, app_state_of
from collage_server.errors import Unprocessable
from collage_server.queries.curves import (
    MEAN_OF_LAST,
    AxisName,
    compared_run,
    merged_metrics,
    metric_series,
    run_summary,
    scalar_series,
)
from collage_server.store import Points, RunRevision, ScalarPoints, Selection, Snapshot

__all__ = ["router"]

router = resource_router("reading")
_CURSOR = "Follow one curve: empty at first, then that of the last answer."
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Question:
    """Metrics or logged scalars, of what, over which steps, on which axis."""

    metrics: tuple[str, ...]
    layers: query_parameters.LayerChoice
    selection: Selection
    axis: AxisName

    @property
    def measured(self) -> tuple[str, ...]:
        """Those of the catalogue; the others are logged scalars."""
        return tuple(filter(is_metric, self.metrics))

    def __post_init__(self) -> None:
        """Refuse questions that no run could answer."""
        for metric in self.metrics:
            if self.layers != query_parameters.LayerChoice() and not is_metric(metric):
                raise Unprocessable(f"{metric!r} is a logged scalar: it has no layers", field="layer")


@router.get("/runs/{run_id}/series", **describes(wire.Series))
def get_series(
    request: Request,
    run_id: query_parameters.Id,
    metric: query_parameters.MetricKeys,
    layer: query_parameters.LayerName = None,
    pattern: query_parameters.Pattern = None,
    module_type: query_parameters.ModuleType = None,
    rank: query_parameters.Rank = None,
    first_step: query_parameters.FirstStep = None,
    last_step: query_parameters.LastStep = None,
    points: query_parameters.PointCount = 1000,
    axis: query_parameters.AxisName = "step",
    cursor: Annotated[str | None, Query(max_length=200, description=_CURSOR)] = None,
) -> Response:
    """A metric of the model, of one layer, or of layers by glob or module type; or a logged scalar."""
    app_state = app_state_of(request)
    asked = Question(
        tuple(dict.fromkeys(metric)),
        query_parameters.LayerChoice(layer, pattern, module_type),
        Selection(rank=rank, first_step=first_step, last_step=last_step, points=points),
        axis,
    )
    if cursor is not None and len(asked.metrics) > 1:
        raise Unprocessable("a cursor follows one metric: ask for each of them alone", field="metric")
    revisions = revisions_of(request, [run_id])

    def make() -> wire.Series:
        with app_state.store.points.snapshot() as snapshot:
            if cursor is not None:
                return _answer_since(FollowedCurve(snapshot, run_id, asked), cursor, revisions[run_id][0])
            return dict(_curves(snapshot, [run_id], asked))[run_id]

    return respond(request, revisions, make)


@router.get("/compare", **describes(wire.Comparison))
def compare(
    request: Request,
    run: Annotated[list[str], Query(min_length=1, max_length=100, description="A run_id; repeat it.")],
    metric: query_parameters.MetricKeys,
    layer: query_parameters.LayerName = None,
    pattern: query_parameters.Pattern = None,
    module_type: query_parameters.ModuleType = None,
    rank: query_parameters.Rank = None,
    first_step: query_parameters.FirstStep = None,
    last_step: query_parameters.LastStep = None,
    points: query_parameters.PointCount = 500,
    axis: query_parameters.AxisName = "step",
) -> Response:
    """Each run's series, beside it the model's metrics merged over everything and the last scalars."""
    app_state = app_state_of(request)
    asked = Question(
        tuple(dict.fromkeys(metric)),
        query_parameters.LayerChoice(layer, pattern, module_type),
        Selection(rank=rank, first_step=first_step, last_step=last_step, points=points),
        axis,
    )
    revisions = revisions_of(request, run)

    def make() -> dict[str, Any]:
        keys = {run_id: ("compare", run_id, asked, revision) for run_id, revision in revisions.items()}
        answers = {run_id: app_state.answers.get(key) for run_id, key in keys.items()}
        if missing := [run_id for run_id, known in answers.items() if known is None]:
            with app_state.store.points.snapshot() as snapshot:
                summaries = _summaries(app_state, snapshot, {run_id: revisions[run_id] for run_id in missing})
                for run_id, series in _curves(snapshot, missing, asked, run):
                    compared = compared_run(summaries[run_id], series)
                    answers[run_id] = app_state.answers.put(keys[run_id], compared)
        return {"metric": asked.metrics[0], "axis": axis, "runs": list(answers.values())}

    return respond(request, revisions, make, keep=False)


def _summaries(app_state: AppState, snapshot: Snapshot, revisions: Revisions) -> dict[str, wire.RunSummary]:
    """The values beside the curves, the same for any curve: cached until the run changes.

    Made again, it costs 50 runs of 10,000 points twice the CPU of the whole question.
    """
    keys = {run_id: ("summary", run_id, revision) for run_id, revision in revisions.items()}
    kept = {run_id: app_state.answers.get(key) for run_id, key in keys.items()}
    found = {
        run_id: wire.decode_message(bytes(raw), wire.RunSummary, wire.JSON)
        for run_id, raw in kept.items()
        if raw is not None
    }
    if missing := [run_id for run_id in keys if run_id not in found]:
        merged = merged_metrics(snapshot.points(missing, None, Selection(points=1)))
        newest = snapshot.newest_scalars(missing, MEAN_OF_LAST)
        for run_id, record in snapshot.records(missing).items():
            _, state = revisions[run_id]
            found[run_id] = run_summary(record, state, merged[run_id], newest[run_id])
            app_state.answers.put(keys[run_id], found[run_id])
    return found


def _curves(
    snapshot: Snapshot, run_ids: Sequence[str], asked: Question, beside: Sequence[str] = ()
) -> Iterator[tuple[str, wire.Series]]:
    """The series of each run; its further metrics stand in `more`. A scalar must be known of one run, or `beside`.

    All runs and metrics are read together, so the number of statements does not grow with them. Lists are
    made run by run, so that a caller can free one run's before the next is made.
    """
    positions = positions_of(snapshot, run_ids, asked.axis)
    points = _points(snapshot, run_ids, asked) if asked.measured else {}
    count, shown = asked.selection.points or 1, asked.layers.label

    def series_of(metric: str) -> Iterator[tuple[str, wire.Series]]:
        if metric in asked.measured:
            return metric_series(metric, _needed_by(metric, points), count, positions, shown)
        logged = scalars_of(snapshot, run_ids, metric, asked.selection)
        if not any(len(values.steps) for values in logged.values()):
            check_scalar_exists(snapshot, metric, [*run_ids, *beside])
        return (
            (run_id, scalar_series(run_id, metric, values, count, positions[run_id]))
            for run_id, values in logged.items()
        )

    first, *others = asked.metrics
    more = {metric: dict(series_of(metric)) for metric in others}
    for run_id, series in series_of(first):
        own = {metric: found[run_id] for metric, found in more.items()}
        yield run_id, msgspec.structs.replace(series, more=own) if own else series


def _points(snapshot: Snapshot, run_ids: Sequence[str], asked: Question) -> dict[str, Points]:
    keys = tuple(dict.fromkeys(key for metric in asked.measured for key in statistics_for(metric)))
    selection = replace(asked.selection, extremes_of=asked.measured)
    return points_of(snapshot, run_ids, keys, selection, asked.layers)


def _needed_by(metric: str, points: Mapping[str, Points]) -> dict[str, Points]:
    """The points with only this metric's statistics, as if nothing else had been requested."""
    keys = set(statistics_for(metric))
    return {
        run_id: replace(held, totals={key: values for key, values in held.totals.items() if key in keys})
        for run_id, held in points.items()
    }


@dataclass(frozen=True)
class FollowedCurve:
    """One metric or logged scalar of one run."""

    snapshot: Snapshot
    run_id: str
    asked: Question

    def answer(self, selection: Selection) -> wire.Series:
        """The curve over a selection."""
        return dict(_curves(self.snapshot, [self.run_id], replace(self.asked, selection=selection)))[self.run_id]

    def read(self, selection: Selection) -> Points | ScalarPoints:
        """The stored numbers behind it."""
        [key], runs = self.asked.metrics, [self.run_id]
        if is_metric(key):
            return points_of(self.snapshot, runs, statistics_for(key), selection, self.asked.layers)[self.run_id]
        return scalars_of(self.snapshot, runs, key, selection)[self.run_id]

    def newest_complete_step(self) -> int | None:
        """The newest step that every rank has reached; None: all points read are as complete as they will be."""
        if not self.asked.measured:
            return None
        step = self.snapshot.newest_step(self.run_id)
        return -1 if step is None else step


class _Cursor(msgspec.Struct, frozen=True, array_like=True):
    step: Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
    digest: bytes
    revision: bytes


_DECODE: Final = msgspec.msgpack.Decoder(_Cursor).decode


def _answer_since(curve: FollowedCurve, cursor: str, revision: RunRevision) -> wire.Series:
    """The curve since the answer that gave `cursor`; the whole curve if that is empty or earlier points changed.

    Raises:
        Unprocessable: the cursor is not one of ours.
    """
    selection, current = curve.asked.selection, _digest([repr(revision).encode()])
    known = _decoded(cursor) if cursor else None
    if known is not None and known.revision == current:
        nothing = replace(selection, first_step=known.step + 1, last_step=known.step)
        return msgspec.structs.replace(curve.answer(nothing), cursor=cursor, continues=True)
    ends = [step for step in (selection.last_step, curve.newest_complete_step()) if step is not None]
    held = curve.read(replace(selection, last_step=min(ends, default=None), points=None))
    last = int(held.steps[-1]) if len(held.steps) else -1
    goes_on = known is not None and known.step <= last and _digest_up_to(held, known.step) == known.digest
    first = selection.first_step
    if known is not None and goes_on:
        first = max(known.step + 1, first or 0)
    series = curve.answer(replace(selection, first_step=first, last_step=last))
    return msgspec.structs.replace(
        series, cursor=_encoded(_Cursor(last, _digest_up_to(held, last), current)), continues=goes_on
    )


def _digest_up_to(held: Points | ScalarPoints, last: int) -> bytes:
    """A digest of the numbers up to a step."""
    end = int(np.searchsorted(held.steps, last, side="right"))
    if isinstance(held, ScalarPoints):
        return _digest([array[:end].tobytes() for array in (held.steps, held.times, held.values)])
    parts = [array[:end].tobytes() for array in (held.steps, held.times, held.ranks, held.counts)]
    for key, values in sorted(held.totals.items()):
        # Sealing drops a statistic that no rank reported.
        if not np.isnan(values[:end]).all():
            parts += [key.encode(), values[:end].tobytes()]
    return _digest(parts)


def _digest(parts: list[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _encoded(cursor: _Cursor) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(cursor)).decode()


def _decoded(text: str) -> _Cursor:
    try:
        return _DECODE(base64.urlsafe_b64decode(text.encode()))
    except (msgspec.MsgspecError, binascii.Error, ValueError) as error:
        raise Unprocessable(
            f"cursor {text!r} is not one of this server's; start again with an empty one", field="cursor"
        ) from error
