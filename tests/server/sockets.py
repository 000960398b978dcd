"""An application behind a real socket of this process, and clients that speak HTTP byte by byte."""

import socket
import threading
from contextlib import contextmanager

import uvicorn
from collage_server.app import create_app
from collage_server.command.serve import uvicorn_config
from collage_server.settings import FixedLimits, Settings

from tests.server.conftest import Clock
from tests.waiting import PATIENCE_SECONDS, until

HEAD = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"


class Listening:
    """A server's application, its port, and the thread of its event loop."""

    def __init__(self, app, port, thread):
        self.app = app
        self.port = port
        self.thread = thread

    @property
    def app_state(self):
        return self.app.state.collage

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)

    def ask(self, request):
        """All that the server says to these bytes, up to the end of the connection."""
        with self.connect() as client:
            client.sendall(request)
            return everything(client)


@contextmanager
def listening(folder, clock=None, limits=None, **settings):
    """`Listening` on a fresh folder; without a token unless one is set."""
    chosen = Settings(folder=folder, **{"no_auth": "token" not in settings, "port": 0} | settings)
    limits = FixedLimits(**{"shutdown_seconds": 2.0} | (limits or {}))
    app = create_app(chosen, clock=clock or Clock(), limits=limits)
    server = uvicorn.Server(uvicorn_config(app, chosen, limits))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), "the server")
        assert server.started
        yield Listening(app, server.servers[0].sockets[0].getsockname()[1], thread)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)


def everything(client):
    """What comes until the other side closes."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def status_of(answer):
    """The status of the first answer in these bytes."""
    return int(answer.split(b" ", 2)[1]) if answer else None
