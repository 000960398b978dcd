"""Access: tokens, sessions of people who sign in through a provider, and the audit log.

Who may call each route is in `auth/roles.py`, what happens in `auth/administration.py` and `auth/oidc.py`. Messages
are the contract's; a secret is in one answer only (`tests/server/test_access.py`, `test_provider_sign_in.py`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import parse_qs

from fastapi import Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.bodies import body_lease, message, read_body
from collage_server.api.query_parameters import Id
from collage_server.api.responses import answer, describes
from collage_server.api.routing import resource_router
from collage_server.app_state import app_state_of
from collage_server.auth import administration
from collage_server.auth.bearer import audit_fields, principal_of
from collage_server.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from collage_server.auth.oidc import Provider

__all__ = ["router"]

router = resource_router("access")
_MOST_FIELDS: Final = 16
_NOT_KEPT: Final = {"Cache-Control": "no-store"}


@router.post("/tokens", **describes(wire.TokenCreated, wire.TokenCreate, status=201))
async def create_token(request: Request) -> Response:
    """Make a token; only this answer contains its `secret`."""
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
    """A page of the audit log, newest first: tokens made and revoked, sessions begun and ended, runs deleted and
    restored."""
    return answer(app_state_of(request).store.access.audit_log(cursor, limit))


def _provider_of(request: Request) -> Provider:
    provider = app_state_of(request).provider
    if provider is None:
        raise NotFound(
            "people sign in here by token alone; COLLAGE_SERVER_OIDC_ISSUER and its neighbours name a provider"
        )
    return provider


@router.get("/sign-in", **describes(wire.SignInOffer))
def offer(request: Request) -> Response:
    """Whether people may sign in through a provider, and its host."""
    provider = app_state_of(request).provider
    return answer(wire.SignInOffer(provider=None if provider is None else provider.name))


@router.post("/sign-in", **describes(wire.SignInRequest))
async def begin_sign_in(request: Request) -> Response:
    """Begin a sign-in; a dashboard leads the browser to the address and keeps the rest for POST /sessions."""
    return answer(await _provider_of(request).begin())


@router.post("/sessions", **describes(wire.TokenCreated, wire.SignInFinish, status=201))
async def create_session(request: Request) -> Response:
    """Finish a sign-in: a token for a session, with the roles of the person's groups."""
    app_state, provider = app_state_of(request), _provider_of(request)
    person = await provider.person(await message(request, wire.SignInFinish))
    created = await run_in_threadpool(
        partial(administration.open_session, **audit_fields(request)),
        app_state.store.access,
        person,
        app_state.settings,
        app_state.clock(),
        principal_of(request).actor,
    )
    app_state.directory.forget()
    return answer(created, 201)


@router.post("/sign-out", **describes(wire.SignedOut))
async def sign_out(request: Request) -> Response:
    """End the session whose token asks; any other token stays."""
    app_state, provider, principal = app_state_of(request), _provider_of(request), principal_of(request)
    if not principal.is_session:
        return answer(wire.SignedOut(log_out_url=None))
    end = partial(administration.end_session, **audit_fields(request))
    await run_in_threadpool(end, app_state.store.access, principal.actor, app_state.clock())
    app_state.directory.forget()
    return answer(wire.SignedOut(log_out_url=await provider.log_out_url()))


@router.post("/back-channel-log-out", **describes(None))
async def back_channel_log_out(request: Request) -> Response:
    """End the sessions that a provider's `logout_token` (a form field) is about."""
    app_state, provider = app_state_of(request), _provider_of(request)
    with body_lease(request, app_state, wire.JSON) as held:
        text = bytes(await read_body(request, held, wire.JSON)).decode("latin-1")
    try:
        [token] = parse_qs(text, max_num_fields=_MOST_FIELDS)["logout_token"]
    except (KeyError, ValueError) as error:
        raise BadRequest("send one logout_token, as a form", field="logout_token") from error
    log_out, now = await provider.log_out(token), app_state.clock()
    end = partial(administration.end_sessions, **audit_fields(request))
    await run_in_threadpool(end, app_state.store.access, log_out, now)
    app_state.directory.forget()
    return Response(headers=_NOT_KEPT)
