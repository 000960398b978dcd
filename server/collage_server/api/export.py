"""Export: a whole run as JSON lines, CSV or Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from collage_server.api.answers import describes
from collage_server.api.parameters import Id
from collage_server.api.routing import resource
from collage_server.app_state import AppState, app_state_of
from collage_server.export.formats import csv_bytes, jsonl_bytes, parquet_bytes
from collage_server.export.steps import ExportPlan, plan_export
from collage_server.memory import wait_patiently
from collage_server.newest import newest_points
from collage_server.queries.run_answers import run_answer

__all__ = ["router"]

router = resource("reading")
_MEDIA: Final = {
    "jsonl": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}


@router.get("/runs/{run_id}/export", **describes(None))
def export_run(
    request: Request,
    run_id: Id,
    export_format: Annotated[Literal["jsonl", "csv", "parquet"], Query(alias="format")] = "jsonl",
    layers: Annotated[bool, Query(description="Also what is known by layer.")] = True,
    ranks: Annotated[bool, Query(description="Also each rank's totals of its whole model.")] = False,
) -> Response:
    """All that is stored of a run, ranks merged, streamed; `Collage-Lines` says how many lines will come.

    The run is read a batch of steps at a time, so a long export keeps no other reader or writer waiting.
    """
    app_state = app_state_of(request)
    wait_patiently()
    plan = plan_export(app_state.store, run_id, layers=layers, ranks=ranks)
    headers = {"Content-Disposition": f'attachment; filename="{run_id}.{export_format}"'}
    if export_format != "parquet" and not ranks:
        headers["Collage-Lines"] = str(_lines(plan, export_format))
    content = _content(app_state, plan, export_format)
    return StreamingResponse(content, media_type=_MEDIA[export_format], headers=headers)


def _lines(plan: ExportPlan, export_format: str) -> int:
    """Lines of the export, if nothing arrives late for its steps."""
    if export_format == "csv":
        return 1 + len(plan.steps) + len(plan.measured) * len(plan.layers)
    return 1 + len(plan.layers) + len(plan.steps) + plan.events + 1


def _content(app_state: AppState, plan: ExportPlan, export_format: str) -> Iterator[bytes]:
    store = app_state.store
    if export_format == "csv":
        return csv_bytes(store, plan)
    if export_format == "parquet":
        return parquet_bytes(store, plan)
    with store.points.snapshot() as snapshot:
        point = newest_points(snapshot, {plan.run.run_id: plan.run})[plan.run.run_id]
    run = run_answer(plan.run, point, app_state.clock(), app_state.settings.stale_after_seconds)
    return jsonl_bytes(store, plan, run)
