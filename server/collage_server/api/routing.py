"""Routers of resources under /api/v1, their description at /openapi.json, and the server's few pages for people.

Every `api/` module with routes under /api/v1 but `reports.py` makes its router by `resource_router`; `app.py` calls
`add_description_and_pages`. The prefix is fixed. Pages load nothing; `/` and
`/runs/…` lead to the dashboard (`tests/server/test_errors.py`).
"""

from __future__ import annotations

import html
from typing import Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from collage_server.api.query_parameters import refuse_unknown_parameters
from collage_server.api.responses import schemas

__all__ = ["PREFIX", "add_description_and_pages", "resource_router"]

PREFIX: Final = "/api/v1"
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PAGE: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Collage Monitor API</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
td{{padding:.2rem .8rem .2rem 0;vertical-align:top}}code{{white-space:nowrap}}</style></head><body>
<h1>Collage Monitor API</h1>
<p>The full description for tools: <a href="/openapi.json">/openapi.json</a>. Errors have one shape:
<code>{{"error": {{"code", "message", "field", "limit", "request_id"}}}}</code>. Non-finite numbers are the strings
"NaN", "Infinity", "-Infinity"; undefined is null.</p>
<table>{rows}</table></body></html>"""
_NO_DASHBOARD: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Collage Monitor</title>
<style>body{font:15px/1.5 system-ui,sans-serif;max-width:40rem;margin:2rem auto;padding:0 1rem}</style></head><body>
<h1>Collage Monitor</h1>
<p>This is the server: it keeps runs, and answers programs. The pages are the dashboard's, which runs beside it:
<code>collage-monitor serve dashboard --server-url ADDRESS</code>, with this page's address, prints where to open
them.
On one machine <code>collage-monitor up</code> starts both.</p>
<p>In a terminal: <code>collage-monitor list</code>, <code>collage-monitor show RUN</code>. For programs:
<a href="/docs">the API</a>.</p></body></html>"""


def resource_router(tag: str) -> APIRouter:
    """A router for the routes of one resource, or of several that the description lists together."""
    return APIRouter(prefix=PREFIX, tags=[tag], dependencies=[Depends(refuse_unknown_parameters)])


def add_description_and_pages(app: FastAPI, dashboard_url: str | None = None) -> None:
    """Describe messages and answers by the wire's own schemas, and serve the page of routes.

    dashboard_url: where the addresses of pages lead; None: to a page that says how to start a dashboard.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            described.setdefault("components", {}).setdefault("schemas", {}).update(schemas())
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

    @app.get("/", include_in_schema=False)
    @app.get("/runs/{run_id}", include_in_schema=False)
    def page(run_id: str | None = None) -> Response:
        """The answer at the address of a page that only the dashboard has; from it clients learn where that is."""
        if dashboard_url is None:
            return HTMLResponse(_NO_DASHBOARD, headers=_PAGE_HEADERS)
        path = "" if run_id is None else f"run/{quote(run_id, safe='')}"
        return RedirectResponse(f"{dashboard_url.rstrip('/')}/{path}", headers=_PAGE_HEADERS)

    @app.get("/docs", include_in_schema=False)
    def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(_PAGE.format(rows="".join(_rows(openapi()))), headers=_PAGE_HEADERS)


def _rows(described: dict[str, Any]) -> list[str]:
    return [
        f"<tr><td><code>{method.upper()} {html.escape(path)}</code></td>"
        f"<td>{html.escape(operation.get('description', ''))}</td></tr>"
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    ]
