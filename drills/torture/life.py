"""A server's life, `serve` or `migrate` in a process of its own, that may be told to kill itself.

It does so with SIGKILL, at a point that a clock outside would seldom hit.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.forking import SERVER, fork
from tests.server.limited import limit_servers, limits_and_variables

__all__ = ["POINTS", "Births", "gone"]

POINTS = {
    "seal": r"^(INSERT INTO|DELETE FROM) (point_chunk|model_chunk|layer_chunk|scalar_chunk|report|entry)",
    "archive": r"^(INSERT INTO|DELETE FROM|UPDATE) (segment|segment_gone|layer_chunk) ",
    "migration": r"",
}
"""Where a life kills itself: before the count-th such statement. Three points are none: "commit" lies behind the
reports' last statement, before their commit is sent; "answer" between a commit and its answers; "file" on both
sides of each file that is put where it stays."""

_IMPORTED = (*SERVER, "collage_server.command.migrate", "tests.server.store.contract")


class Births:
    """Starts lives as processes of their own that write to one log; at the end of the block none is left."""

    def __init__(self, log):
        self.log = Path(log)
        self._lives = []
        self.environment: dict[str, str] = {}
        """What every life finds in its environment beside its settings."""
        self.limits: dict[str, int] = {}
        """Fields of `SealLimits` that are not those of the contract's tests, which seal in tiny slices."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for life in self._lives:
            if life.poll() is None:
                life.kill()
                life.wait()

    def start(self, verb, arguments=(), *, die=None, clock_off=0.0, **settings):
        """A new life. `die`: (point, count). `clock_off`: so many seconds is its clock ahead.

        `settings` may name fixed limits, too.
        """
        fixed, variables = limits_and_variables(settings)
        given = {"verb": verb, "arguments": [str(argument) for argument in arguments], "die": die}
        order = json.dumps({**given, "clock_off": clock_off, "limits": self.limits, "fixed": fixed})
        with self.log.open("ab") as output:
            life = fork(
                _IMPORTED,
                "-m",
                "drills.torture.life",
                order,
                environment={**os.environ, **self.environment, **variables},
                output=output,
            )
        self._lives = [life, *(other for other in self._lives if other.poll() is None)]
        return life


def gone(life, seconds):
    """Wait until the life has ended; False if it has not in time."""
    try:
        life.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(point, count):
    """Make this process kill itself at the count-th time it comes by."""
    from collage_server.ingest.writer import Writer
    from collage_server.store.journal import report_journal as journal
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
    if point == "file":
        _arm_files(passed)
        return
    pattern = re.compile(POINTS[point])

    @event.listens_for(Engine, "before_cursor_execute")
    def look(_connection, _cursor, statement, _parameters, _context, _many):
        if pattern.match(statement):
            passed()


def _arm_files(passed):
    from collage_server.store.archive.file_storage import Bucket, Folder

    for kind in (Folder, Bucket):

        def put(self, made, path, then=kind.put):
            passed()
            then(self, made, path)
            passed()

        kind.put = put  # type: ignore[method-assign]


def _small_chunks(limits):
    """Chunks of few points, so that short lives seal and archive."""
    from collage_server.command import serve as command
    from collage_server.store import SqliteStore
    from collage_server.store.sealing import archive_plan

    from tests.server.store.contract import LIMITS

    archive_plan._CHUNKS = {1: 2, 16: 2}  # type: ignore[misc]
    make_store = command.make_store  # type: ignore[attr-defined]

    def make_small_store(settings):
        store = make_store(settings)
        store.sealing.limits = replace(LIMITS, **limits)
        if isinstance(store, SqliteStore):
            # Whoever holds the file's lock is gone by then.
            store._busy_timeout_seconds = 2.0
        return store

    command.make_store = make_small_store  # type: ignore[attr-defined, assignment]


def _hold(path, seconds):
    """Another program that writes to the file and keeps its lock: a transaction that is never committed."""
    connection = sqlite3.connect(path, timeout=5.0, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE run_latest SET reports = reports + 1000")
    time.sleep(float(seconds))
    _die()


def _expire(run_id, folder, database=None):
    """Retention drops all that it may, and what it leaves behind in files is swept at once."""
    from collage_server.command import serve as command
    from collage_server.settings import settings_from_environment

    place = {"folder": folder, "database": database, "no_auth": True}
    store = command.make_store(settings_from_environment(**place))  # type: ignore[attr-defined]
    store.open()
    store.retention.expire(run_id, {1: 1e12, 16: 1e12})
    assert store.archiving is not None
    store.archiving.sweep(time.time() + 1e5)
    store.close()


def main(order):
    """Live as the order says."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    if order["verb"] == "hold":
        _hold(*order["arguments"])
    if order["clock_off"]:
        right = time.time
        time.time = lambda: right() + order["clock_off"]
    if order["die"]:
        _arm(*order["die"])
    from collage_server.command.migrate import migrate
    from collage_server.command.serve import serve

    limit_servers(order["fixed"])
    _small_chunks(order["limits"])
    if order["verb"] == "expire":
        _expire(*order["arguments"])
        return
    {"serve": serve, "migrate": migrate}[order["verb"]].main(order["arguments"], standalone_mode=False)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
