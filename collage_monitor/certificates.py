"""The certificates that clients trust. Needs the extra `client` (httpx)."""

from __future__ import annotations

import os
import ssl

import httpx

from collage_monitor.errors import ServerUnreachable

__all__ = ["trusted_certificates"]


def trusted_certificates(address: str) -> ssl.SSLContext | bool:
    """The value of `verify` for an HTTP client to the address: SSL_CERT_FILE or SSL_CERT_DIR, for https only.

    A team's server may have a self-made certificate.

    Raises:
        ServerUnreachable: the certificates cannot be read.
    """
    if not address.startswith("https:"):
        return True
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        known = os.environ.get("SSL_CERT_FILE")
        raise ServerUnreachable(
            f"{address}: SSL_CERT_FILE={known!r} cannot be read ({error}); name a PEM file, or unset it"
        ) from error
