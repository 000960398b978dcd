"""Who may ask: a bearer token; without one only this machine, and no foreign web page."""

from __future__ import annotations

import hmac
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from collage_server.errors import Forbidden, Unauthorised
from collage_server.settings import LOOPBACK_HOSTS, Settings

__all__ = ["OPEN_PATHS", "Access"]

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
"""Answered to anyone: they hold no data."""
_SCHEME: Final = "bearer "


class Access:
    """Decides by path and headers; the token is compared in constant time."""

    def __init__(self, settings: Settings) -> None:
        self._token = None if settings.token is None else settings.token.encode()

    def check(self, path: str, headers: Headers) -> None:
        """Let the request pass.

        Raises:
            Unauthorised: a token is configured, and the request does not carry it.
            Forbidden: none is configured, and the request names a foreign host or origin.
        """
        if self._token is None:
            _check_local(headers)
        elif path not in OPEN_PATHS:
            self._check_token(headers.get("authorization", ""))

    def _check_token(self, header: str) -> None:
        if not header[: len(_SCHEME)].lower() == _SCHEME:
            raise Unauthorised("no token; send the header Authorization: Bearer TOKEN", field="Authorization")
        given = header[len(_SCHEME) :].strip().encode()
        if self._token is None or not hmac.compare_digest(given, self._token):
            raise Unauthorised(
                "this token is not known here; the local server's stands in the file `token` of its data folder",
                field="Authorization",
            )


def _check_local(headers: Headers) -> None:
    """Against DNS rebinding and foreign pages: the Host, and the Origin where there is one, must be loopback."""
    host = headers.get("host", "")
    if _name(f"//{host}") not in LOOPBACK_HOSTS:
        raise Forbidden(f"host {host!r} may not ask a server without tokens; use http://127.0.0.1", field="Host")
    origin = headers.get("origin")
    if origin is not None and _name(origin) not in LOOPBACK_HOSTS:
        raise Forbidden(f"pages of {origin!r} may not ask a server without tokens", field="Origin")


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
