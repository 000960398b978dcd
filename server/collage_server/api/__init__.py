"""HTTP under /api/v1, a resource a file."""

from __future__ import annotations

from fastapi import APIRouter

from collage_server.api import (
    alertmanager,
    attempts,
    audit,
    catalogue,
    compare,
    correlation,
    events,
    export,
    heatmap,
    histogram,
    latest,
    layers,
    reports,
    runs,
    series,
    streams,
    tokens,
    worst,
)

__all__ = ["PREFIX", "api_router"]

PREFIX = "/api/v1"


def api_router() -> APIRouter:
    """All resources under the version's prefix; first what is asked for most, as routes are tried in turn."""
    router = APIRouter(prefix=PREFIX)
    for module in (
        reports,
        runs,
        attempts,
        streams,
        series,
        heatmap,
        histogram,
        latest,
        layers,
        worst,
        events,
        compare,
        correlation,
        export,
        catalogue,
        alertmanager,
        tokens,
        audit,
    ):
        router.include_router(module.router)
    return router
