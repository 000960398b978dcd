"""HTTP under /api/v1, a resource a file."""

from __future__ import annotations

from starlette.routing import BaseRoute

from collage_server.api import (
    alertmanager,
    attempts,
    audit,
    catalogue,
    curves,
    export,
    latest,
    layers,
    reports,
    runs,
    streams,
    tokens,
)

__all__ = ["api_routes"]


def api_routes() -> list[BaseRoute]:
    """The routes of all resources; first what is asked for most, as routes are tried in turn."""
    modules = (
        reports,
        runs,
        attempts,
        streams,
        curves,
        latest,
        layers,
        export,
        catalogue,
        alertmanager,
        tokens,
        audit,
    )
    return [route for module in modules for route in module.router.routes]
