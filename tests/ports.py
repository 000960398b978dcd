"""Ports and processes for tests that start the real command."""

import contextlib
import random
import signal
import socket
import subprocess
import sys
from functools import cache

import httpx

from tests.forking import SERVICES, command, fork
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["command", "free_port", "interruptible", "running"]


_PORTS = range(20_000, 32_000)
"""Below those that a system gives to connections, and to whoever asks for any port."""


@cache
def _free_ports():
    """Never the same one twice in a process, and in another order in each."""
    return filter(_is_free, random.SystemRandom().sample(_PORTS, len(_PORTS)))


def _is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port():
    """A port that nobody listens on, and that stays free until it is used, and while who used it is away."""
    return next(_free_ports())


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
        return fork(SERVICES, *rest, output=output)
    return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def interruptible():
    """For `preexec_fn`: SIGINT as in a terminal; what runs in the background inherits it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
