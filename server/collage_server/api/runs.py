"""Runs: create or resume, read, ask where one stands, change, delete, bring back.

`store/runs/run_store.py` and `run_changes.py` do it. Creating is idempotent, because agents send it twice; that is
fixed.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from fastapi import Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.bodies import message
from collage_server.api.cached_answers import respond
from collage_server.api.query_parameters import Filter, Id, RunFilters
from collage_server.api.responses import answer, describes
from collage_server.api.routing import resource_router
from collage_server.app_state import AppState, app_state_of
from collage_server.auth.administration import new_audit_log_entry
from collage_server.auth.bearer import audit_fields, principal_of
from collage_server.auth.principals import Principal
from collage_server.errors import Unprocessable
from collage_server.queries.run_answers import latest_answer, run_answer
from collage_server.store import NewestPoint, RunQuery, RunRecord
from collage_server.store.row_checks import whole_runs
from collage_server.summariser import newest_points

__all__ = ["router"]

router = resource_router("runs")
_DEEPEST: Final = 128
"""Levels of a configuration: what compares its entries calls itself at each."""


def _answer(app_state: AppState, record: RunRecord, reader: Principal) -> wire.Run:
    point = None
    if reader.may("read"):
        with app_state.store.points.snapshot() as snapshot:
            point = newest_points(snapshot, {record.run_id: record})[record.run_id]
    return _as_seen(record, point, reader, app_state.clock(), app_state.limits.stale_after_seconds)


def _as_seen(
    record: RunRecord, point: NewestPoint | None, reader: Principal, now: float, stale_after_seconds: float
) -> wire.Run:
    """The run as this principal may see it: a token that only sends learns nothing about other runs."""
    if not reader.may("read"):
        record, point = msgspec.structs.replace(record, config={}, notes="", tags=[], watch=None, scalars={}), None
    return run_answer(record, point, now, stale_after_seconds)


def _check(create: wire.RunCreate) -> None:
    """Checks beyond the message's types: a seed of 64 bits, and a config that JSON can hold."""
    if create.seed is not None and not -(2**63) <= create.seed < 2**63:
        raise Unprocessable(f"seed {create.seed} does not fit into 64 bits", field="seed", limit=2**63)
    level: list[Any] = [create.config]
    for _ in range(_DEEPEST):
        held = [own.values() if isinstance(own, dict) else own for own in level if isinstance(own, dict | list)]
        level = [entry for entries in held for entry in entries]
    if level:
        text = f"config is nested more than {_DEEPEST} levels deep: send plain values"
        raise Unprocessable(text, field="config", limit=_DEEPEST)
    try:
        wire.encode_json(create.config)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Unprocessable(f"config cannot be kept as JSON: {error}; send plain values", field="config") from error


@router.post("/projects/{project:path}/runs", **describes(wire.Run, wire.RunCreate, status=201, also=200))
async def create_run(request: Request, project: Annotated[str, Path(min_length=1, max_length=512)]) -> Response:
    """Create a run (201), or resume the one with this run_id (200)."""
    app_state = app_state_of(request)
    create = await message(request, wire.RunCreate)
    _check(create)

    def work() -> tuple[wire.Run, bool]:
        app_state.quotas.check_layers(project, create)
        now = app_state.clock()
        record, is_new = app_state.store.runs.create(project, create, now, app_state.quotas.check)
        return _answer(app_state, record, principal_of(request)), is_new

    run, is_new = await run_in_threadpool(work)
    return answer(run, 201 if is_new else 200)


@router.get("/runs", **describes(wire.RunPage))
def list_runs(
    request: Request,
    filters: RunFilters,
    cursor: Filter = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """A page of runs, newest first; `q` searches names, ids, projects, groups, tags and notes."""
    app_state = app_state_of(request)
    query = RunQuery(**vars(filters), cursor=cursor, limit=limit)
    reader, now, stale_after = principal_of(request), app_state.clock(), app_state.limits.stale_after_seconds
    with app_state.store.points.snapshot() as snapshot:
        page = snapshot.run_page(query, now)
        shown = {record.run_id: record for record in page.runs} if reader.may("read") else {}
        latest, more = whole_runs(
            lambda ids: newest_points(snapshot, {run_id: shown[run_id] for run_id in ids}), list(shown)
        )
    damaged = {run.run_id: run for run in (*page.damaged, *more)}
    runs = [
        _as_seen(record, latest.get(record.run_id), reader, now, stale_after)
        for record in page.runs
        if record.run_id not in damaged
    ]
    return answer(wire.RunPage(runs=runs, cursor=page.cursor, damaged=list(damaged.values())))


@router.get("/runs/{run_id}", **describes(wire.Run))
def get_run(request: Request, run_id: Id) -> Response:
    """The facts about a run: labels, state, configuration, newest numbers."""
    app_state = app_state_of(request)
    return answer(_answer(app_state, app_state.store.runs.get(run_id), principal_of(request)))


@router.patch("/runs/{run_id}", **describes(wire.Run, wire.RunUpdate))
async def update_run(request: Request, run_id: Id) -> Response:
    """Change state, name, group, tags or notes."""
    app_state = app_state_of(request)
    change = await message(request, wire.RunUpdate)

    def work() -> wire.Run:
        record = app_state.store.runs.update(run_id, change, app_state.clock(), app_state.quotas.check)
        return _answer(app_state, record, principal_of(request))

    return answer(await run_in_threadpool(work))


@router.delete("/runs/{run_id}", **describes(wire.Deleted))
def delete_run(request: Request, run_id: Id, undo_seconds: Annotated[int, Query(ge=0, le=86_400)] = 0) -> Response:
    """Delete a run: its id answers 410 from now on. For `undo_seconds` its data is kept, to be restored.

    A training that reports meanwhile is answered 410, too, and ends its reports.
    """
    app_state = app_state_of(request)
    project, now = app_state.store.runs.get(run_id).project, app_state.clock()
    entry = _audited(request, now, "run.delete", run_id, project)
    app_state.store.runs.delete(run_id, now, [entry], undo_seconds=undo_seconds)
    app_state.registry.forget_run(run_id)
    return answer(wire.Deleted(run_id=run_id))


@router.post("/runs/{run_id}/restore", **describes(wire.Run))
def restore_run(request: Request, run_id: Id) -> Response:
    """Undo a deletion within its `undo_seconds`: the run is as it was. 410 afterwards."""
    app_state = app_state_of(request)
    now, project = app_state.clock(), app_state.store.access.project_of(run_id)
    entry = _audited(request, now, "run.restore", run_id, project)
    record = app_state.store.runs.restore(run_id, now, app_state.quotas.check, [entry])
    return answer(_answer(app_state, record, principal_of(request)))


def _audited(request: Request, now: float, action: str, run_id: str, project: str | None) -> wire.AuditLogEntry:
    actor = principal_of(request).actor
    return new_audit_log_entry(now, actor, action, run_id, project=project, **audit_fields(request))


@router.get("/runs/{run_id}/latest", **describes(wire.Latest))
def get_latest(request: Request, run_id: Id) -> Response:
    """The model's metrics at the newest measured step, the newest scalars, the three worst layers by EDQ."""
    store = app_state_of(request).store

    def make() -> wire.Latest:
        with store.points.snapshot() as snapshot:
            records = snapshot.records([run_id])
            return latest_answer(records[run_id], newest_points(snapshot, records, layers=True)[run_id])

    return respond(request, [run_id], make)
