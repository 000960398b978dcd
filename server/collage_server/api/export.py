"""Export: a whole run as JSON lines, CSV or Parquet.

`export/` defines the contents of a file; this module streams it, within a lease of memory
(`tests/server/life/test_export.py`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any, Final, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from collage_server.api.query_parameters import Id
from collage_server.api.responses import describes
from collage_server.api.routing import resource_router
from collage_server.app_state import AppState, app_state_of
from collage_server.export.file_formats import csv_bytes, jsonl_bytes, parquet_bytes
from collage_server.export.step_batches import ExportPlan, plan_export, take_memory
from collage_server.memory_budget import begin_stream
from collage_server.queries.run_answers import run_answer
from collage_server.summariser import newest_points

__all__ = ["router"]

router = resource_router("reading")
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
    layers: Annotated[bool, Query(description="Also write the numbers of each layer.")] = True,
    ranks: Annotated[bool, Query(description="Also each rank's totals of its whole model.")] = False,
) -> Response:
    """All data of a run, ranks merged, as a stream; `Collage-Lines` gives the number of lines.

    The run is read a batch of steps at a time, so a long export keeps no other reader or writer waiting.
    """
    app_state = app_state_of(request)
    begin_stream()
    plan = plan_export(app_state.store, run_id, layers=layers, ranks=ranks)
    headers = {"Content-Disposition": f'attachment; filename="{run_id}.{export_format}"'}
    if export_format != "parquet" and not ranks:
        headers["Collage-Lines"] = str(_lines(plan, export_format))
    content = _content(app_state, plan, export_format)
    return _Export(content, media_type=_MEDIA[export_format], headers=headers)


class _Export(StreamingResponse):
    """When it ends, it releases its memory, also if the reader has gone."""

    def __init__(self, content: Generator[bytes, None, None], **given: Any) -> None:
        super().__init__(content, **given)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._content.close()


def _lines(plan: ExportPlan, export_format: str) -> int:
    """Lines of the export, if nothing arrives late for its steps."""
    if export_format == "csv":
        return 1 + plan.rows
    return 1 + len(plan.layers) + len(plan.steps) + plan.events + 1


def _content(app_state: AppState, plan: ExportPlan, export_format: str) -> Generator[bytes, None, None]:
    store = app_state.store
    if export_format == "parquet":
        return parquet_bytes(store, plan)
    take_memory(plan)
    if export_format == "csv":
        return csv_bytes(store, plan)
    with store.points.snapshot() as snapshot:
        point = newest_points(snapshot, {plan.run.run_id: plan.run})[plan.run.run_id]
    run = run_answer(plan.run, point, app_state.clock(), app_state.limits.stale_after_seconds)
    return jsonl_bytes(store, plan, run)
