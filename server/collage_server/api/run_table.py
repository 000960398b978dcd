"""The table of runs, one page at a time, and the overview of one run: the first things that a reader sees.

`store/runs/run_table.py` has the SQL, `summariser.py` the overviews. Messages are `wire/run_table.py`'s
(`tests/server/test_table.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import Path, Query
from pydantic import StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.bodies import message
from collage_server.api.query_parameters import Filter, Id, TablePart
from collage_server.api.responses import answer, describes
from collage_server.api.routing import resource_router
from collage_server.app_state import app_state_of
from collage_server.auth.bearer import principal_of
from collage_server.queries.run_answers import run_row
from collage_server.store import GroupQuery
from collage_server.store.runs.configurations import differing as differing_entries
from collage_server.summariser import MADE_BY, evaluate_what_fits, keep_overview

__all__ = ["router"]

router = resource_router("runs")
Project = Annotated[str, Path(min_length=1, max_length=512)]
Entries = Annotated[
    list[Annotated[str, StringConstraints(max_length=512)]],
    Query(default_factory=list, max_length=50, description="Entries of configurations, by path: `optimizer.lr`."),
]


@router.get("/run-table", **describes(wire.RunTable))
def get_run_table(
    request: Request,
    part: TablePart,
    run_id: Annotated[
        list[str],
        Query(
            default_factory=list,
            max_length=100,
            description="These runs alone; those that are gone are left out.",
        ),
    ],
    config: Entries,
    differing: Annotated[bool, Query(description="Each row with the entries in which the rows differ.")] = False,
) -> Response:
    """Rows of the table of runs, from `offset` on. `q` searches names, ids, projects, groups, tags and notes."""
    app_state = app_state_of(request)
    query = replace(part, run_ids=tuple(run_id) or None)
    now, stale_after = app_state.clock(), app_state.limits.stale_after_seconds
    page = app_state.store.table.page(query, now, stale_after)
    asked = [*config, *(differing_entries([record.config for record, _ in page.rows]) if differing else ())]
    rows = [run_row(*row, now, stale_after, dict.fromkeys(asked)) for row in page.rows]
    counted = {name: getattr(page, name) for name in ("total", "live", "revision", "healths", "worst", "damaged")}
    return answer(wire.RunTable(rows=rows, **counted))


@router.get("/run-groups", **describes(wire.RunGroups))
def get_run_groups(
    request: Request,
    part: TablePart,
    by: wire.GroupBy,
    opened: Annotated[
        list[str],
        Query(
            default_factory=list, alias="open", max_length=100, description="Keys of groups whose runs are shown."
        ),
    ],
    config: Entries,
) -> Response:
    """Rows `offset` … of the table of runs in groups. Numbers sort by their mean, times by the newest."""
    app_state = app_state_of(request)
    query = GroupQuery(**vars(part), by=by, opened=opened)
    now, stale_after = app_state.clock(), app_state.limits.stale_after_seconds
    page = app_state.store.table.groups(query, now, stale_after)
    rows = [
        wire.TableEntry(group=row)
        if isinstance(row, wire.RunGroup)
        else wire.TableEntry(run=run_row(*row, now, stale_after, dict.fromkeys(config)))
        for row in page.rows
    ]
    return answer(wire.RunGroups(rows=rows, total=page.total, damaged=page.damaged))


@router.get("/run-filters", **describes(wire.RunFilters))
def get_run_filters(request: Request) -> Response:
    """The projects, strategies, groups, tags and verdicts of the runs, with how many runs have each."""
    projects = principal_of(request).projects
    found = app_state_of(request).store.table.filters(projects)
    return answer(found)


@router.get("/views", **describes(wire.SavedViewList))
def list_views(request: Request, project: Filter = None) -> Response:
    """Saved views of the table of runs, of one project or of all."""
    principal = principal_of(request)
    asked = principal.projects if project is None else {project} if principal.owns(project) else set()
    return answer(wire.SavedViewList(views=app_state_of(request).store.table.views(asked)))


@router.post("/projects/{project:path}/views", **describes(wire.SavedView, wire.SavedViewCreate, status=201))
async def save_view(request: Request, project: Project) -> Response:
    """Save a view of the table of runs, in place of one of this name."""
    app_state = app_state_of(request)
    create = await message(request, wire.SavedViewCreate)
    actor, now = principal_of(request).actor, app_state.clock()
    view = wire.SavedView(project=project, name=create.name, search=create.search, made_by=actor, made_at=now)
    await run_in_threadpool(app_state.store.table.save_view, view)
    return answer(view, 201)


@router.delete("/projects/{project:path}/views", **describes(wire.SavedViewList))
def delete_view(request: Request, project: Project, name: Annotated[str, Query(max_length=200)]) -> Response:
    """Delete a saved view; the answer holds those that the project has left."""
    table = app_state_of(request).store.table
    table.delete_view(project, name)
    return answer(wire.SavedViewList(views=table.views({project})))


@router.get("/runs/{run_id}/overview", **describes(wire.Overview))
def get_overview(request: Request, run_id: Id, fresh: bool = False) -> Response:
    """The overview of the run: headline, verdict, the numbers behind them, and the layers that lose the most.

    fresh: evaluated now, and with every metric of the model; otherwise it may be some seconds old.
    """
    store = app_state_of(request).store
    if fresh:
        with store.points.snapshot() as now:
            return answer(evaluate_what_fits(now, now.records([run_id])[run_id], every_number=True)[0])
    return answer(store.summaries.overview(run_id, MADE_BY) or keep_overview(store, run_id))
