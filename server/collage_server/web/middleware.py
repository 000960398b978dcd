"""What stands before every route: a request id, a log record, an answer to bugs, and who may ask."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Final
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from collage_server.auth.bearer import Access
from collage_server.auth.principals import Principal
from collage_server.errors import Busy, ServerError
from collage_server.logs import REQUEST_ID
from collage_server.web.failures import bug_of, error_of

__all__ = ["AccessControl", "RequestIdentity"]

_HEADER: Final = "x-request-id"
_LONGEST_ID: Final = 64
_LOG: Final = logging.getLogger("collage_server.requests")
_GOING_DOWN: Final = Busy("the server is going down; send this request again later", retry_after_seconds=1)


class RequestIdentity:
    """Gives each request an id, the client's own where it sends a sane one, answers with it, and logs with it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_HEADER, "")
        sane = 0 < len(given) <= _LONGEST_ID and given.replace("-", "").isalnum() and given.isascii()
        request_id = given if sane else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[_HEADER] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not status:
                await error_of(_GOING_DOWN, request_id)(scope, receive, send_with_id)
            raise
        except Exception as error:
            if status:
                raise
            await bug_of(error, scope, request_id)(scope, receive, send_with_id)
        _log(scope, status, time.perf_counter() - started)


def _log(scope: Scope, status: int, seconds: float) -> None:
    level = logging.DEBUG if status < 400 else logging.INFO if status < 500 else logging.WARNING
    if not _LOG.isEnabledFor(level):
        return
    principal: Principal | None = scope["state"].get("principal")
    # The query is left out: it may hold what a person searched for.
    about = {
        "method": scope["method"],
        "path": quote(scope["path"]),
        "status": status,
        "duration_seconds": round(seconds, 6),
        "actor": None if principal is None else principal.actor,
    }
    _LOG.log(level, "%(method)s %(path)s %(status)s in %(duration_seconds).6f s", about, extra=about)


class AccessControl:
    """Admits requests by token, role and project, and leaves their principal in the request's state."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope["state"]["principal"] = await self.access.admit(
                    scope["method"], scope["path"], scope["query_string"], Headers(scope=scope)
                )
            except ServerError as error:
                await error_of(error, scope["state"]["request_id"])(scope, receive, send)
                return
        await self.app(scope, receive, send)
