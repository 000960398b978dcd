"""Routers of resources under the version's prefix, and a route that costs little between match and endpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, Depends
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from collage_server.api.questions import refuse_unknown_parameters

__all__ = ["PREFIX", "DirectRoute", "resource"]

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
