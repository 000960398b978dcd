"""HTTP under /api/v1, a resource a file."""

from __future__ import annotations

from fastapi import APIRouter, Depends

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
from collage_server.api.questions import refuse_unknown_parameters

__all__ = ["PREFIX", "api_router"]

PREFIX = "/api/v1"


def api_router() -> APIRouter:
    """All resources under the version's prefix; first what is asked for most, as routes are tried in turn."""
    router = APIRouter(prefix=PREFIX)
    router.include_router(reports.router)
    for module in (
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
        router.include_router(module.router, dependencies=[Depends(refuse_unknown_parameters)])
    return router
