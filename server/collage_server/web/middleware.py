"""Middleware before every route: a request id, a log record, an answer to every failure, access control.

While the disk guard has a reason, requests that would store something new are answered 503.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Final
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from collage_server.auth.bearer import AccessPolicy
from collage_server.auth.principals import Principal
from collage_server.disk_guard import DiskGuard
from collage_server.errors import Busy
from collage_server.logs import REQUEST_ID
from collage_server.memory_budget import MemoryBudget
from collage_server.web.failures import answer_to

__all__ = ["AccessControl", "AnswerMemory", "ReadOnlyGate", "RequestIdentity", "client_of"]

_HEADER: Final = b"x-request-id"
_LONGEST_ID: Final = 64
_LOG: Final = logging.getLogger("collage_server.requests")
_GOING_DOWN: Final = Busy("the server is going down; send this request again later", retry_after_seconds=1)
_STORES_NOTHING_NEW: Final = ("GET", "HEAD", "OPTIONS", "PATCH", "DELETE")
_SMALL: Final = ("/acknowledge", "/restore", "/sign-in", "/sessions", "/sign-out", "/back-channel-log-out")
"""What people need to see why a disk is full: a row each at most, and sessions that are over go."""


class RequestIdentity:
    """Gives each request an id, the client's own if it sends a sane one, answers with it, and logs with it.

    Every error raised behind it becomes an answer. The request's state has the headers as a dictionary; of equal
    names it keeps the first.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))
        given = headers.get(_HEADER)
        request_id = secrets.token_hex(8) if given is None or not _is_sane(given) else given.decode()
        state = scope.setdefault("state", {})
        state["request_id"], state["headers"] = request_id, headers
        REQUEST_ID.set(request_id)
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_HEADER, request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not status:
                await answer_to(_GOING_DOWN, scope)(scope, receive, send_with_id)
            raise
        except ClientDisconnect:
            return  # The client has gone.
        except Exception as error:
            if status:
                raise
            await answer_to(error, scope)(scope, receive, send_with_id)
        _log(scope, status, time.perf_counter() - started)


def client_of(scope: Scope) -> str | None:
    """The client's address: as a trusted proxy reports it, otherwise the connection's."""
    client = scope.get("client")
    return None if client is None else str(client[0])


def _is_sane(given: bytes) -> bool:
    return 0 < len(given) <= _LONGEST_ID and given.replace(b"-", b"").isalnum()


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
        "client": client_of(scope),
    }
    _LOG.log(level, "%(method)s %(path)s %(status)s in %(duration_seconds).6f s", about, extra=about)


class AccessControl:
    """Admits requests by token, role and project; their state holds the principal, and the project of a POST."""

    def __init__(self, app: ASGIApp, access: AccessPolicy) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            state = scope["state"]
            method, path = scope["method"], scope["path"]
            state["principal"] = await self.access.admit(
                method, path, scope["query_string"], state["headers"], client_of(scope)
            )
            if method == "POST":
                state["project"] = await self.access.project_of(method, path)
        await self.app(scope, receive, send)


class ReadOnlyGate:
    """Refuses requests that add rows while the server is read-only; a new route counts as one unless declared."""

    def __init__(self, app: ASGIApp, guard: DiskGuard) -> None:
        self.app = app
        self.guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _stores(scope):
            self.guard.require_room()
        await self.app(scope, receive, send)


class AnswerMemory:
    """Charges the memory of a GET's reads and answer to the budget, until the answer is sent."""

    def __init__(self, app: ASGIApp, memory: MemoryBudget) -> None:
        self.app = app
        self.memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        with self.memory.lease("answers"):
            await self.app(scope, receive, send)


def _stores(scope: Scope) -> bool:
    return scope["method"] not in _STORES_NOTHING_NEW and not str(scope["path"]).endswith(_SMALL)
