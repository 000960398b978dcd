"""Every failure as an answer in the one JSON error shape."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from collage_monitor import wire
from collage_server.api.answers import error_response
from collage_server.errors import ServerError

__all__ = ["add_error_handlers", "bug_of", "error_of"]

_LOG: Final = logging.getLogger(__name__)
_BOUNDS: Final = ("le", "ge", "lt", "gt", "max_length", "min_length")


def error_of(error: ServerError, request_id: str | None) -> Response:
    """The response to an error of ours."""
    headers = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(error.retry_after_seconds)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    body = wire.ErrorBody(
        code=error.code, message=error.message, field=error.field, limit=error.limit, request_id=request_id
    )
    return error_response(error.status, body, headers)


def bug_of(error: Exception, scope: Scope, request_id: str | None) -> Response:
    """The response to an error that nobody foresaw: it is logged whole, the answer names only its kind."""
    _LOG.error("%s %s failed", scope["method"], quote(scope["path"]), exc_info=error)
    body = wire.ErrorBody(
        code="internal_error",
        message=f"the server failed ({type(error).__name__}); its log says more under this request_id",
        request_id=request_id,
    )
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, body)


def add_error_handlers(app: FastAPI) -> None:
    """Teach the application the one shape for its own errors, bad parameters and unknown routes."""
    app.add_exception_handler(ServerError, _ours)
    app.add_exception_handler(HTTPException, _routing)
    app.add_exception_handler(RequestValidationError, _parameters)


def _request_id(request: Request) -> str | None:
    return getattr(request.state, "request_id", None)


async def _ours(request: Request, error: Exception) -> Response:
    if not isinstance(error, ServerError):
        raise error
    return error_of(error, _request_id(request))


async def _routing(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    status = HTTPStatus(error.status_code)
    message = f"{request.method} {request.url.path}: {status.phrase.lower()}; GET /openapi.json lists the routes"
    body = wire.ErrorBody(
        code=status.name.lower(), message=message, field=None, limit=None, request_id=_request_id(request)
    )
    return error_response(error.status_code, body, dict(error.headers or {}))


async def _parameters(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    first: dict[str, Any] = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:])
    context = first.get("ctx", {})
    limit = next((float(context[name]) for name in _BOUNDS if name in context), None)
    body = wire.ErrorBody(
        code="unprocessable",
        message=f"{field}: {first['msg']}",
        field=field,
        limit=limit,
        request_id=_request_id(request),
    )
    return error_response(HTTPStatus.UNPROCESSABLE_ENTITY, body)
