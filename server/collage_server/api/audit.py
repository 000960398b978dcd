"""Audit: what administrators and operators did."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from collage_monitor import wire
from collage_server.api.answers import answer, describes
from collage_server.api.routing import resource
from collage_server.components import components_of

__all__ = ["router"]

router = resource("access")


@router.get("/audit", **describes(wire.ActPage))
def audit(
    request: Request,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """A page of the audit log, newest first: tokens made and revoked, runs deleted."""
    return answer(components_of(request).store.access.acts(cursor, limit))
