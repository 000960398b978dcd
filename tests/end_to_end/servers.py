"""A real server in a process of its own."""

import json
from contextlib import contextmanager

import httpx

from tests.forking import SERVER, fork
from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS, until


class KillableServer:
    """`collage-monitor serve` that can be killed and started again on the same port and folder."""

    def __init__(self, folder, log):
        self.folder = folder
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, **limits):
        """Start it with these fixed limits, and wait until it answers."""
        with self.log.open("ab") as output:
            words = ("serve", "--port", self.port, "--dir", self.folder)
            self.process = fork(SERVER, "-m", "tests.server.limited", json.dumps(limits), *words, output=output)
        until(self.answers, "the server's first answer")

    def answers(self):
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/readyz", timeout=PATIENCE_SECONDS, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def kill(self):
        self.process.kill()
        self.process.wait()


@contextmanager
def killable_server(folder):
    """One that has started, on a folder below this one; it is killed at the end."""
    server = KillableServer(folder / "data", folder / "server.log")
    server.start()
    try:
        yield server
    finally:
        server.kill()
