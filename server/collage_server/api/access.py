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
from collage_server.auth import administration
from collage_server.auth.bearer import audit_fields, principal_of
from collage_server.components import components_of

__all__ = ["router"]

router = resource("access")


@router.post("/tokens", **describes(wire.TokenCreated, wire.TokenCreate, status=201))
async def create_token(request: Request) -> Response:
    """Make a token; `secret` is said in this answer and never again."""
    components = components_of(request)
    create = await message(request, wire.TokenCreate)
    created = await run_in_threadpool(
        partial(administration.create_token, **audit_fields(request)),
        components.store.access,
        create,
        components.clock(),
        principal_of(request).actor,
    )
    components.directory.forget()
    return answer(created, 201)


@router.get("/tokens", **describes(wire.TokenList))
def list_tokens(request: Request) -> Response:
    """Every token without its secret, newest first, revoked ones too."""
    return answer(wire.TokenList(tokens=components_of(request).store.access.tokens()))


@router.delete("/tokens/{token_id}", **describes(wire.Token))
async def revoke_token(request: Request, token_id: Id) -> Response:
    """Revoke a token: at once in this process, within five seconds in every other of this database."""
    components = components_of(request)
    revoked = await run_in_threadpool(
        partial(administration.revoke_token, **audit_fields(request)),
        components.store.access,
        token_id,
        components.clock(),
        principal_of(request).actor,
    )
    components.directory.forget()
    return answer(revoked)


@router.get("/audit", **describes(wire.AuditLogPage))
def audit(
    request: Request,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """A page of the audit log, newest first: tokens made and revoked, runs deleted."""
    return answer(components_of(request).store.access.audit_log(cursor, limit))
