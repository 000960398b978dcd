"""Request guards: the host names under which the dashboard answers, and callbacks from its own pages only.

`app.py` installs both, so that no page is without. What is refused is fixed (`tests/dashboard/test_app.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from dash.exceptions import DependencyException
from flask import Flask, Response, request
from flask_compress import Compress
from flask_talisman import DENY, Talisman

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["install_compression", "install_guard"]

_CONTENT: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
    "base-uri 'self'; form-action 'self'"
)
"""Where the browser may load what from: this process alone. Dash needs scripts and styles in the page itself."""
_NOWHERE: Final = "'none'"


def install_guard(server: Flask, allowed_hosts: frozenset[str] | None, embed_in: Sequence[str] = ()) -> None:
    """Refuse foreign Host names (a rebound DNS name reads a local page otherwise) and foreign Origins (403).

    Every answer has headers that restrict what the browser may do with it. `embed_in`: the origins whose pages may
    show it in a frame; none: no page may, so that none can lead a reader's clicks astray.
    """

    @server.errorhandler(DependencyException)
    def no_such_file(error: Exception) -> Response:
        return Response("no component has this file\n", 404, mimetype="text/plain")

    @server.before_request
    def check() -> Response | None:
        host = urlsplit(f"//{request.host}").hostname
        if allowed_hosts is not None and host not in allowed_hosts:
            names = ", ".join(sorted(allowed_hosts))
            return Response(f"host {host!r} is not served here; use one of {names}\n", 403, mimetype="text/plain")
        origin = request.headers.get("Origin")
        # Without referrers a page's own form has the origin "null"; Sec-Fetch-Site says that the form is our own.
        own = origin == "null" and request.headers.get("Sec-Fetch-Site") == "same-origin"
        foreign = origin is not None and not own and urlsplit(origin).netloc != request.host
        if request.method not in {"GET", "HEAD"} and foreign:
            return Response(f"origin {origin!r} may not call this dashboard\n", 403, mimetype="text/plain")
        return None

    Talisman(
        server,
        content_security_policy=f"{_CONTENT}; frame-ancestors {' '.join(embed_in) or _NOWHERE}",
        referrer_policy="no-referrer",
        # The older header knows no origins; browsers go by the policy where both are there.
        frame_options=None if embed_in else DENY,
        permissions_policy={},
        # A dashboard on loopback speaks plain HTTP; beyond it, the proxy before it decides.
        force_https=False,
        strict_transport_security=False,
    )


_MOST_BYTES: Final = 16 * 2**20
_FOR_GOOD: Final = "public, max-age=31536000, immutable"
_VERSIONED: Final = ("/_dash-component-suites/", "/assets/")


class _CompressedFiles:
    """Compressed files by address, which holds their version; of other answers nothing is kept."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self._kept.get(key)

    def set(self, key: str, value: bytes) -> None:
        if any(part in key for part in _VERSIONED):
            self._kept[key] = value


class _Unpacked:
    """The application behind: a question that comes compressed, as `assets/flow.js` sends it, is unpacked for it.

    400: it cannot be unpacked; 413: it is larger than any page asks, packed or not.
    """

    def __init__(self, application: WSGIApplication) -> None:
        self._application = application

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("HTTP_CONTENT_ENCODING") != "gzip":
            return self._application(environ, start_response)
        packed = environ["wsgi.input"].read(min(int(environ.get("CONTENT_LENGTH") or 0), _MOST_BYTES))
        unpacking = zlib.decompressobj(wbits=31)
        try:
            body = unpacking.decompress(packed, _MOST_BYTES)
        except zlib.error:
            return Response("the question cannot be unpacked\n", 400)(environ, start_response)
        if unpacking.unconsumed_tail or not unpacking.eof:
            return Response("the question is too large, or cut\n", 413)(environ, start_response)
        del environ["HTTP_CONTENT_ENCODING"]
        environ |= {"wsgi.input": BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        return self._application(environ, start_response)


def install_compression(server: Flask) -> None:
    """Answers travel compressed, and questions may.

    Scripts and styles, 4 MB, are compressed once, and kept for good by browsers.
    """
    server.wsgi_app = _Unpacked(server.wsgi_app)  # type: ignore[method-assign]
    server.config.update(
        COMPRESS_MIMETYPES=["text/html", "text/css", "text/javascript", "application/json", "image/svg+xml"],
        COMPRESS_ALGORITHM=["br", "gzip"],
        COMPRESS_BR_LEVEL=5,
        COMPRESS_CACHE_BACKEND=_CompressedFiles,
        COMPRESS_CACHE_KEY=lambda asked: asked.full_path if asked.method == "GET" else "",
    )
    Compress(server)

    @server.after_request
    def keep_versions(response: Response) -> Response:
        if request.path.startswith("/assets/") and request.args.get("m") and response.status_code == 200:
            # Read whole, it is compressed once, and its file is closed here.
            response.direct_passthrough = False
            response.make_sequence()
            response.headers["Cache-Control"] = _FOR_GOOD
        elif "max-age=31536000" in response.headers.get("Cache-Control", ""):
            response.headers["Cache-Control"] = _FOR_GOOD
        return response
