"""Forks servers: imports them once, so that a life costs milliseconds; then `serve` or `migrate` in a new process.

Orders come as JSON lines on standard input, process ids go back on standard output. A life may be told to kill
itself, with SIGKILL, at a point that a clock outside would seldom hit.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from pathlib import Path

__all__ = ["POINTS", "Zygote", "gone"]

POINTS = {
    "seal": r"^(INSERT INTO|DELETE FROM) (point_chunk|model_chunk|layer_chunk|scalar_chunk|report|entry)",
    "migration": r"",
}
"""Where a life kills itself: before the count-th such statement. Two points are none: "commit" lies behind the
reports' last statement, before their commit is sent; "answer" between a commit and its answers."""

_IMPORTED = (
    "collage_server.app",
    "collage_server.command.serve",
    "collage_server.command.migrate",
    "psycopg",
    "tests.server.store.contract",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
)


class Zygote:
    """The harness's side: `start` returns the process id of a new life."""

    def __init__(self, log):
        self.log = Path(log)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, verb, arguments=(), *, die=None, **settings):
        """`die`: (point, count). `settings` reach the server through its environment."""
        order = {
            "verb": verb,
            "arguments": [str(argument) for argument in arguments],
            "die": die,
            "environment": {f"COLLAGE_SERVER_{name.upper()}": str(value) for name, value in settings.items()},
            "log": str(self.log),
        }
        given, answered = self._process.stdin, self._process.stdout
        assert given is not None
        assert answered is not None
        given.write(json.dumps(order) + "\n")
        given.flush()
        return int(answered.readline())

    def close(self):
        """Lives go on; end them first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def gone(pid, seconds):
    """Wait until the process has ended; False if it has not in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(point, count):
    """Make this process kill itself at the count-th time it comes by."""
    from collage_server.ingest.writer import Writer
    from collage_server.store.journal import reports as journal
    from sqlalchemy import Engine, event

    left = [count]

    def passed():
        left[0] -= 1
        if left[0] == 0:
            _die()

    if point == "answer":
        deliver = Writer._deliver

        def deliver_or_die(self, batch, outcomes):
            passed()
            deliver(self, batch, outcomes)

        Writer._deliver = deliver_or_die  # type: ignore[method-assign]
        return
    if point == "commit":
        commit = journal._commit

        def die_or_commit(cursor):
            passed()
            commit(cursor)

        journal._commit = die_or_commit
        return
    pattern = re.compile(POINTS[point])

    @event.listens_for(Engine, "before_cursor_execute")
    def look(_connection, _cursor, statement, _parameters, _context, _many):
        if pattern.match(statement):
            passed()


def _small_chunks():
    """Chunks of few points, so that short lives seal."""
    from collage_server import app
    from collage_server.command import serve as command

    from tests.server.store.contract import LIMITS

    make_store = app.make_store

    def make_small_store(settings):
        store = make_store(settings)
        store.sealing.limits = LIMITS
        return store

    command.make_store = make_small_store  # type: ignore[attr-defined]


def _hold(path, seconds):
    """Another program that writes to the file and keeps its lock: a transaction that is never committed."""
    connection = sqlite3.connect(path, timeout=5.0, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE run_latest SET reports = reports + 1000")
    time.sleep(float(seconds))
    _die()


def _live(order):
    with open(order["log"], "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(order["environment"])
    if order["verb"] == "hold":
        _hold(*order["arguments"])
    if order["die"]:
        _arm(*order["die"])
    from collage_server.command.migrate import migrate
    from collage_server.command.serve import serve

    _small_chunks()
    {"serve": serve, "migrate": migrate}[order["verb"]].main(order["arguments"], standalone_mode=False)


def main():
    """Read orders until standard input ends."""
    for name in _IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                _live(json.loads(line))
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
