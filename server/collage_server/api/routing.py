"""Routers of resources under the version's prefix, and a route that costs little on its way to the endpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, Depends
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from collage_server.api.questions import refuse_unknown_parameters

__all__ = ["PREFIX", "DirectRoute", "Routes", "resource"]

PREFIX: Final = "/api/v1"


def resource(tag: str) -> APIRouter:
    """A router for the routes of one resource, or of several that the description lists together."""
    return APIRouter(prefix=PREFIX, tags=[tag], dependencies=[Depends(refuse_unknown_parameters)])


class DirectRoute(APIRoute):
    """Calls a coroutine function with the request and the path's parameters, and sends the `Response` it returns.

    The signature describes it, and a parameter beyond its bounds is answered, as for any other route. Nothing
    else is solved, hence no exit stacks.

    Raises:
        TypeError: the signature asks for more: query, header or body parameters, or dependencies.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        asked = self.dependant
        more = (asked.query_params, asked.header_params, asked.cookie_params, asked.body_params, asked.dependencies)
        if any(more):
            raise TypeError(f"{path} takes more than the request and its path's parameters: make it an APIRoute")
        self.app = self._call

    def given(self, scope: Scope) -> dict[str, str] | None:
        """The path's parameters of a request for this route, None of any other."""
        if scope["type"] != "http" or scope["method"] not in (self.methods or ()):
            return None
        found = self.path_regex.match(scope["path"])
        return None if found is None else found.groupdict()

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        given: dict[str, Any] = scope["path_params"]
        checked: dict[str, Any] = {}
        errors: list[Any] = []
        for field in self.dependant.path_params:
            checked[field.name], wrong = field.validate(given[field.alias], loc=("path", field.alias))
            errors += wrong or ()
        if errors:
            raise RequestValidationError(errors)
        response = await self.endpoint(Request(scope, receive, send), **checked)
        await response(scope, receive, send)


class Routes:
    """What stands behind the door: direct routes first, then the framework's router and the stack that it needs."""

    def __init__(self, router: APIRouter) -> None:
        self._direct = [route for route in router.routes if isinstance(route, DirectRoute)]
        self._others: ASGIApp = AsyncExitStackMiddleware(router)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for route in self._direct:
            given = route.given(scope)
            if given is not None:
                scope["path_params"] = given
                await route.app(scope, receive, send)
                return
        await self._others(scope, receive, send)
