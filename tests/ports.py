"""Ports and processes for tests that start the real command."""

import contextlib
import signal
import socket
import subprocess
import sys

import httpx

from tests.forking import SERVER, command, fork
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["command", "free_port", "interruptible", "running"]


def free_port():
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(arguments, health, log):
    """A process that answers at `health`; it is ended at the end, and its output is in `log`."""
    with log.open("wb") as output:
        process = _started(arguments, output)

        def answers():
            assert process.poll() is None, log.read_text()
            try:
                return httpx.get(health, timeout=PATIENCE_SECONDS, trust_env=False).is_success
            except httpx.HTTPError:
                return False

        try:
            until(answers, f"an answer at {health}")
            yield process
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _started(arguments, output):
    program, *rest = arguments
    if program == sys.executable:
        return fork(SERVER, *rest, output=output)
    return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def interruptible():
    """For `preexec_fn`: SIGINT as in a terminal; what runs in the background inherits it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
