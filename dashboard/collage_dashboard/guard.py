"""Request guards: the host names under which the dashboard answers, and callbacks from its own pages only."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from flask import Flask, Response, request
from flask_talisman import DENY, Talisman

__all__ = ["LOOPBACK_HOSTS", "install_guard"]

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_CONTENT: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
    "frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)
"""Where the browser may load what from: this process alone. Dash needs scripts and styles in the page itself."""


def install_guard(server: Flask, allowed_hosts: frozenset[str] | None) -> None:
    """Refuse foreign Host names (a rebound DNS name reads a local page otherwise) and foreign Origins (403).

    Every answer says what the browser may do with it.
    """

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

    Talisman(
        server,
        content_security_policy=_CONTENT,
        referrer_policy="no-referrer",
        frame_options=DENY,
        permissions_policy={},
        # A dashboard on loopback speaks plain HTTP; beyond it, the proxy before it decides.
        force_https=False,
        strict_transport_security=False,
    )
