"""Answers about runs, kept until the run changes: a dashboard that polls finished runs costs next to nothing.

An answer is known by its route, its parameters, and the revisions of its runs; the same makes its ETag.
`answer_cache.AnswerCache` is the memory; this looks answers up there, and sends 304 to a client that has the
answer.

A new kind of answer about runs needs nothing but `respond`. `RunRevision` defines a revision: it must change with
everything that the answer shows (`tests/server/test_answers.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.app_state import app_state_of
from collage_server.store import RunRevision, state_at

__all__ = ["Revisions", "respond", "revisions_of"]

Revisions = Mapping[str, tuple[RunRevision, str]]
"""Revision and state by run."""


def revisions_of(request: Request, run_ids: Sequence[str]) -> Revisions:
    """Revision and state of each run, as they are before anything else is read.

    Raises:
        NotFound: no such run.
        Gone: it was deleted.
    """
    app_state = app_state_of(request)
    now, stale_after = app_state.clock(), app_state.limits.stale_after_seconds
    return {
        run_id: (revision, state_at(revision.state, revision.updated_at, now, stale_after))
        for run_id, revision in app_state.store.runs.revisions(run_ids).items()
    }


def respond(
    request: Request, runs: Sequence[str] | Revisions, make: Callable[[], Any], *, keep: bool = True
) -> Response:
    """The answer to this request, from the cache if the runs have not changed; 304 if the client has it.

    `runs` are ids, or the revisions of these runs where they are known already.
    """
    revisions = runs if isinstance(runs, Mapping) else revisions_of(request, runs)
    parameters = sorted(request.query_params.multi_items(), key=itemgetter(0))  # Repeated ones keep their order.
    key = (request.url.path, tuple(parameters), tuple(revisions.items()))
    etag = f'"{hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    body: Any = app_state_of(request).answers.encoded(key, make) if keep else make()
    return Response(wire.encode_json(body), media_type=wire.JSON, headers=headers)
