"""Ports and processes for tests that start the real command."""

import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import httpx

from tests.forking import SERVICES, command, fork
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["command", "free_port", "interruptible", "running"]


_PORTS = range(20_000, 32_000)
"""Below those that a system gives to connections, and to whoever asks for any port."""


@cache
def _free_ports():
    """Never the same one twice, in this process or in another of this machine; in another order in each."""
    return _taken(random.SystemRandom().sample(_PORTS, len(_PORTS)))


def _taken(ports):
    """Those of the ports that nobody uses, each taken as it is asked for: a locked file holds it until this process
    ends, for nobody may be listening on it yet, or any more."""
    folder = Path(tempfile.gettempdir(), f"collage-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    for port in ports:
        descriptor = os.open(folder / str(port), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        if _is_free(port):
            yield port


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
