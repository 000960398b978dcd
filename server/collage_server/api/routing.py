"""Routers of resources under the version's prefix."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Depends

from collage_server.api.parameters import refuse_unknown_parameters

__all__ = ["PREFIX", "resource"]

PREFIX: Final = "/api/v1"


def resource(tag: str) -> APIRouter:
    """A router for the routes of one resource, or of several that the description lists together."""
    return APIRouter(prefix=PREFIX, tags=[tag], dependencies=[Depends(refuse_unknown_parameters)])
