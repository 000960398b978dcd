"""The route that takes reports in. It answers after the commit that makes them durable.

`api/bodies.py` reads bodies, `ingest/report_checks.py` checks them, `ingest/writer.py` commits. The answer must
follow the commit, because agents delete acknowledged reports (`tests/server/test_ingest.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from collage_monitor import wire
from collage_server.api.bodies import batch_in, body_lease, content_type_of, read_body
from collage_server.api.query_parameters import LONGEST_ID, Id
from collage_server.api.responses import answer, describes
from collage_server.api.routing import PREFIX
from collage_server.app_state import AppState, app_state_of
from collage_server.errors import Gone
from collage_server.ingest.report_checks import LARGE_BYTES, accepted_indices, check_batch, merge_rejected
from collage_server.store import GroupOutcome, ReportGroup, StreamRecord

__all__ = ["router", "store_batch"]


class _ReportRoute(APIRoute):
    """An ordinary Starlette route: FastAPI's resolving of arguments would take a quarter of a report's CPU."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint; where the method is another, or the stream's id too long, refuse as FastAPI does."""
        stream_id = scope["path_params"]["stream_id"]
        if scope["method"] != "POST" or len(stream_id) > LONGEST_ID:
            await super().handle(scope, receive, send)
            return
        response = await add_reports(Request(scope, receive, send), stream_id)
        await response(scope, receive, send)


router = APIRouter(prefix=PREFIX, tags=["reports"], route_class=_ReportRoute)


@router.post("/streams/{stream_id}/reports", **describes(wire.BatchAnswer, bytes))
async def add_reports(request: Request, stream_id: Id) -> Response:
    """Store a batch of reports exactly once; a bad or late one is named in `rejected`, its neighbours are kept."""
    app_state = app_state_of(request)
    content_type = content_type_of(request)
    with body_lease(request, app_state, content_type) as held:
        body = await read_body(request, held, content_type)
        batch, refused = await batch_in(app_state, body, content_type, held)
        size, began = len(body), time.monotonic()
        # Free the body: the reports hold copies, and only one of the two is counted until the commit.
        del body
        stored = await store_batch(app_state, stream_id, batch, size)
        if refused:
            app_state.counters.count(rejected=len(refused))
            stored = _with_refused(stored, refused, len(batch.reports))
        app_state.memory.bodies.waited(time.monotonic() - began, size)
        return answer(stored)


def _with_refused(stored: wire.BatchAnswer, refused: Sequence[wire.RejectedReport], kept: int) -> wire.BatchAnswer:
    """Number the rejected reports of an answer as in the batch that was sent, refused reports included."""
    return msgspec.structs.replace(stored, rejected=merge_rejected(stored.rejected, refused, kept))


async def store_batch(app_state: AppState, stream_id: str, batch: wire.ReportBatch, size: int) -> wire.BatchAnswer:
    """Store the good reports of a batch; `size` is its body's. It returns once they are durable.

    Raises:
        Gone, NotFound: the run was deleted; no such stream.
        Busy: it does not fit beside what waits to be stored.
    """
    known = app_state.registry.cached(stream_id)
    fresh = known is None
    stream = known if known is not None else await run_in_threadpool(app_state.registry.load, stream_id)
    kept, rejected = await _checked(batch, stream, size)
    if not fresh and any(entry.code == "undeclared" for entry in rejected):
        stream = await run_in_threadpool(app_state.registry.load, stream_id)
        kept, rejected = await _checked(batch, stream, size)
    if batch.gaps:
        await run_in_threadpool(app_state.store.journal.record_gaps, stream, batch.gaps, app_state.clock())
    outcome = await _commit(app_state, ReportGroup(stream, kept, size)) if kept else GroupOutcome(0, 0)
    # Count only now, so that a batch that is refused and sent again is counted once.
    app_state.counters.count(rejected=len(rejected))
    if outcome.gone:
        app_state.registry.forget_run(stream.run_id)
        raise Gone(f"run {stream.run_id!r} was deleted; stop sending", field="stream_id")
    if outcome.late or outcome.too_many_names:
        places = accepted_indices(len(batch.reports), rejected)
        rejected += [_late(places[at], kept[at], outcome.frozen_step) for at in outcome.late]
        rejected += [_too_many_names(places[at], kept[at]) for at in outcome.too_many_names]
        rejected.sort(key=lambda entry: entry.index)
    return wire.BatchAnswer(accepted=outcome.accepted, duplicates=outcome.duplicates, rejected=rejected)


async def _commit(app_state: AppState, group: ReportGroup) -> GroupOutcome:
    run_id, admitted, stored = group.stream.run_id, sum(group.journal_bytes), 0
    app_state.bounds.admit(run_id, admitted)
    try:
        outcome = await app_state.writer.submit(group)
        stored = outcome.accepted_bytes
        return outcome
    finally:
        app_state.bounds.take_back(run_id, admitted - stored)


async def _checked(
    batch: wire.ReportBatch, stream: StreamRecord, size: int
) -> tuple[list[wire.Report], list[wire.RejectedReport]]:
    """Check a large batch in a thread: a million scalars take 50 CPU-ms, and other requests would wait."""
    if size > LARGE_BYTES:
        return await run_in_threadpool(check_batch, batch, stream)
    return check_batch(batch, stream)


def _late(index: int, report: wire.Report, frozen_step: int | None) -> wire.RejectedReport:
    return wire.RejectedReport(
        index=index,
        seq=report.seq,
        code="past_horizon",
        message=f"step {report.step} came too late: retention has dropped the fine points up to step "
        f"{frozen_step}, so its totals have no place; drop it, or keep them for longer",
        field="step",
        limit=frozen_step,
    )


def _too_many_names(index: int, report: wire.Report) -> wire.RejectedReport:
    limit = wire.LIMITS["scalar_names_per_stream"]
    return wire.RejectedReport(
        index=index,
        seq=report.seq,
        code="too_many_names",
        message=f"with those of step {report.step} the stream would have logged under more than {limit} names; log "
        "under few names, the step is not part of one",
        field="scalars",
        limit=limit,
    )
