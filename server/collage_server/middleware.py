"""What stands before every route: a request id, and who may ask."""

from __future__ import annotations

import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from collage_server.auth import Access
from collage_server.errors import ServerError
from collage_server.failures import error_of

__all__ = ["AccessControl", "RequestIdentity"]

_HEADER: Final = "x-request-id"
_LONGEST_ID: Final = 64


class RequestIdentity:
    """Gives each request an id, the client's own where it sends a sane one, and answers with it."""

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

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


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
