"""Guards at the door: the names under which the dashboard answers, and callbacks from its own pages only."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from flask import Flask, Response, request

__all__ = ["LOOPBACK_HOSTS", "install_guard"]

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
        "frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def install_guard(server: Flask, allowed_hosts: frozenset[str] | None) -> None:
    """Refuse foreign Host names (a rebound DNS name reads a local page otherwise) and foreign Origins (403)."""

    @server.before_request
    def check() -> Response | None:
        host = urlsplit(f"//{request.host}").hostname
        if allowed_hosts is not None and host not in allowed_hosts:
            names = ", ".join(sorted(allowed_hosts))
            return Response(f"host {host!r} is not served here; use one of {names}\n", 403, mimetype="text/plain")
        origin = request.headers.get("Origin")
        if request.method not in {"GET", "HEAD"} and origin and urlsplit(origin).netloc != request.host:
            return Response(f"origin {origin!r} may not call this dashboard\n", 403, mimetype="text/plain")
        return None

    @server.after_request
    def harden(response: Response) -> Response:
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response
