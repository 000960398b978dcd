"""The contract's client on an application in this process."""

from __future__ import annotations

from contextlib import contextmanager

import httpx

from collage_monitor.client import Client


class Bridge(httpx.BaseTransport):
    """Hands requests of httpx to a test client. `refuse` says how many of them fail first."""

    def __init__(self, client, refuse=0):
        self.client = client
        self.refuse = refuse

    def handle_request(self, request):
        if self.refuse and request.method == "POST":
            self.refuse -= 1
            return httpx.Response(
                503, headers={"Retry-After": "0"}, json={"error": {"code": "busy", "message": "wait"}}
            )
        answer = self.client.request(
            request.method,
            request.url.raw_path.decode(),
            content=request.read(),
            headers={"Content-Type": request.headers.get("Content-Type", "")},
        )
        return httpx.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)


@contextmanager
def transfer(server, refuse=0):
    """A transfer client that speaks to this server."""
    with Client("http://127.0.0.1", transport=Bridge(server.client, refuse)) as client:
        yield client
