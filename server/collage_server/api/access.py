"""Access: tokens, made, listed and revoked, and the audit of what administrators and operators did."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.answers import answer, describes
from collage_server.api.bodies import message
from collage_server.api.parameters import Id
from collage_server.api.routing import resource
from collage_server.app_state import app_state_of
from collage_server.auth import administration
from collage_server.auth.bearer import audit_fields, principal_of

__all__ = ["router"]

router = resource("access")


@router.post("/tokens", **describes(wire.TokenCreated, wire.TokenCreate, status=201))
async def create_token(request: Request) -> Response:
    """Make a token; `secret` is said in this answer and never again."""
    app_state = app_state_of(request)
    create = await message(request, wire.TokenCreate)
    created = await run_in_threadpool(
        partial(administration.create_token, **audit_fields(request)),
        app_state.store.access,
        create,
        app_state.clock(),
        principal_of(request).actor,
    )
    app_state.directory.forget()
    return answer(created, 201)


@router.get("/tokens", **describes(wire.TokenList))
def list_tokens(request: Request) -> Response:
    """Every token without its secret, newest first, revoked ones too."""
    return answer(wire.TokenList(tokens=app_state_of(request).store.access.tokens()))


@router.delete("/tokens/{token_id}", **describes(wire.Token))
async def revoke_token(request: Request, token_id: Id) -> Response:
    """Revoke a token: at once in this process, within five seconds in every other of this database."""
    app_state = app_state_of(request)
    revoked = await run_in_threadpool(
        partial(administration.revoke_token, **audit_fields(request)),
        app_state.store.access,
        token_id,
        app_state.clock(),
        principal_of(request).actor,
    )
    app_state.directory.forget()
    return answer(revoked)


@router.get("/audit", **describes(wire.AuditLogPage))
def audit(
    request: Request,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """A page of the audit log, newest first: tokens made and revoked, runs deleted."""
    return answer(app_state_of(request).store.access.audit_log(cursor, limit))
