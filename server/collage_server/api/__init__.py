"""HTTP under /api/v1, a resource a file."""

from __future__ import annotations

from starlette.routing import BaseRoute

from collage_server.api import (
    access,
    catalogue,
    curves,
    export,
    health,
    incidents,
    layer_answers,
    otlp,
    reports,
    run_table,
    runs,
    streams,
)

__all__ = ["api_routes"]


def api_routes() -> list[BaseRoute]:
    """The routes of all resources; the most requested come first, because routes are tried in turn."""
    routers = (
        reports.router,
        otlp.router,
        runs.router,
        run_table.router,
        streams.attempts_router,
        streams.router,
        curves.router,
        layer_answers.router,
        export.router,
        catalogue.router,
        streams.alerts_router,
        incidents.router,
        access.router,
        health.router,
    )
    return [route for router in routers for route in router.routes]
