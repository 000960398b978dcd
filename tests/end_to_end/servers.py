"""A real server in a process of its own."""

import signal
import subprocess

import httpx

from tests.ports import command, free_port
from tests.waiting import PATIENCE_SECONDS, until


class KillableServer:
    def __init__(self, folder, log):
        self.folder = folder
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes]

    def start(self):
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command("serve", "--port", self.port, "--dir", self.folder), stdout=output, stderr=output
            )
        until(self.answers, "the server's first answer")

    def answers(self):
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/readyz", timeout=PATIENCE_SECONDS, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
