"""Every failure as an answer in the one JSON error shape.

The shape is `wire.ErrorAnswer`'s and fixed; `errors.py` has each error's status and code
(`tests/server/test_errors.py`).
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from collage_monitor import wire
from collage_server.api.responses import error_response
from collage_server.errors import ServerError

__all__ = ["answer_to"]

_LOG: Final = logging.getLogger(__name__)
_BOUNDS: Final = ("le", "ge", "lt", "gt", "max_length", "min_length")


def answer_to(error: Exception, scope: Scope) -> Response:
    """The response to whatever a request of this scope raised: an error of ours, the framework's, or a bug."""
    request_id: str | None = scope.get("state", {}).get("request_id")
    if isinstance(error, ServerError):
        return _ours(error, request_id)
    if isinstance(error, HTTPException):
        return _routing(error, scope, request_id)
    if isinstance(error, RequestValidationError):
        return _parameters(error, request_id)
    return _bug(error, scope, request_id)


def _ours(error: ServerError, request_id: str | None) -> Response:
    headers = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(error.retry_after_seconds)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    body = wire.ErrorBody(
        code=error.code, message=error.message, field=error.field, limit=error.limit, request_id=request_id
    )
    return error_response(error.status, body, headers)


def _routing(error: HTTPException, scope: Scope, request_id: str | None) -> Response:
    status = HTTPStatus(error.status_code)
    asked = f"{scope['method']} {quote(scope['path'])}"
    message = f"{asked}: {status.phrase.lower()}; GET /openapi.json lists the routes"
    body = wire.ErrorBody(code=status.name.lower(), message=message, request_id=request_id)
    headers = dict(error.headers or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_methods(scope))
    return error_response(error.status_code, body, headers)


def _methods(scope: Scope) -> list[str]:
    """All methods that the path allows: the router names only the first route's."""
    routes = [route for route in scope["app"].router.routes if isinstance(route, Route)]
    there = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
    return sorted({method for route in there for method in route.methods or ()})


def _parameters(error: RequestValidationError, request_id: str | None) -> Response:
    first: dict[str, Any] = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:])
    context = first.get("ctx", {})
    limit = next((float(context[name]) for name in _BOUNDS if name in context), None)
    body = wire.ErrorBody(
        code="unprocessable", message=f"{field}: {first['msg']}", field=field, limit=limit, request_id=request_id
    )
    return error_response(HTTPStatus.UNPROCESSABLE_ENTITY, body)


def _bug(error: Exception, scope: Scope, request_id: str | None) -> Response:
    """Nobody foresaw it: it is logged whole, the answer names only its kind."""
    _LOG.error("%s %s failed", scope["method"], quote(scope["path"]), exc_info=error)
    body = wire.ErrorBody(
        code="internal_error",
        message=f"the server failed ({type(error).__name__}); its log says more under this request_id",
        request_id=request_id,
    )
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, body)
