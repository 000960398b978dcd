"""Responses, and how routes describe them in OpenAPI.

Every route answers through `answer` and is described by `describes`, so that the HTTP page and the behaviour agree.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.responses import Response

from collage_monitor import wire

__all__ = ["answer", "describes", "error_response", "schemas"]

_REFERENCE: Final = "#/components/schemas/{name}"


def answer(body: Any, status: int = 200) -> Response:
    """An answer of the wire as JSON."""
    return Response(wire.encode_json(body), status_code=status, media_type=wire.JSON)


def error_response(status: int, body: wire.ErrorBody, headers: dict[str, str] | None = None) -> Response:
    """An error in the one shape."""
    content = wire.encode_json(wire.ErrorAnswer(error=body))
    return Response(content, status_code=status, media_type=wire.JSON, headers=headers)


def describes(
    kind: type | None,
    body: type | None = None,
    *,
    status: int = 200,
    also: int | None = None,
    many: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of a route, for OpenAPI: its input and answers, with their status (or `also`)."""
    extra: dict[str, Any] = {"responses": {"default": _content("An error.", _reference(wire.ErrorAnswer))}}
    if kind is not None:
        schema = _reference(kind)
        shown = {"type": "array", "items": schema} if many else schema
        for answered in filter(None, (status, also)):
            extra["responses"][str(answered)] = _content("As asked.", shown)
    if body is not None:
        taken = {"schema": _reference(body) if body is not bytes else {}}
        extra["requestBody"] = {"required": True, "content": {wire.JSON: taken, wire.MSGPACK: taken}}
    return {"response_class": Response, "status_code": status, "openapi_extra": extra}


def schemas() -> dict[str, Any]:
    """JSON schemas of everything on the wire, by name."""
    kinds = [kind for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    return msgspec.json.schema_components(kinds, ref_template=_REFERENCE)[1]


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def _content(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {wire.JSON: {"schema": schema}}}
