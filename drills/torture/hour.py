"""`python -m drills.torture.hour`: one server for MINUTES, everything that may befall it at once, by a seed.

Three honest senders and a reader go on all the time (`lives.py`), beside every hostile sender of `hostile.py` and
whoever asks /healthz. Meanwhile lives end one after the other: killed anywhere and at chosen points, two servers on
one database, a clock that is days off, an import; with SQLite a full disk and a back-up that is restored; with
PostgreSQL its cluster and single backends killed. Printed: the server's memory at most, how long /healthz and
honest requests waited, what was lost or doubled. Ends with 1 if anything was.

A busy machine lengthens all that: beside them a bare application is asked the same, and the ratios are stated.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import httpx
import numpy as np
from collage_server.store import SqliteStore

from benchmarks._population import SMALL, register
from collage_monitor import wire
from drills.torture.disk import SmallDisk
from drills.torture.hostile import bare_server, bother, own_bytes
from drills.torture.ledger import report_of
from drills.torture.life import Births
from drills.torture.lives import Lives, PostgresqlLives, SqliteLives, migrated_cluster
from tests.waiting import until

__all__ = ["HostilePostgresqlLives", "HostileSqliteLives", "hour"]

DAYS = 3 * 86_400.0
DISK_MEBIBYTES = 512
LIVES_A_RUN = 20
ROWS = 20_000
COMMAND = (sys.executable, "-c", "from collage_monitor.command import main; main()")
EVALUATED = "collage_server_alerts_evaluated_timestamp_seconds "


def collage(*arguments):
    """A command's answer; an error that holds what it said if it ends with another number than 0."""
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments[0]} ended with {done.returncode}: {done.stderr}")
    return done.stdout


class HostileLives(Lives):
    """Lives under hostile senders; memory is that of the newest life."""

    def __init__(self, folder, births, seed, *cluster):
        super().__init__(folder, births, seed, *cluster)
        self.most_bytes = 0
        self.waits: list[float] = []

    def start(self, which=0, die=None, **settings):
        return super().start(which, die, alert_interval_seconds=0.5, **settings)

    def begin(self, run_id):
        """And the stream that hostile senders send to."""
        super().begin(run_id)
        life = self.start()
        until(self.is_registered, "the stream of hostile senders")
        self.kill(life, "anywhere")

    def is_registered(self):
        """Whether a server has it; while none answers, it has not."""
        with contextlib.suppress(OSError, RuntimeError):
            register(self.ports[0], "hostile", SMALL, 1)
            return True
        return False

    def watch(self, over):
        """Look at the memory until told that it is over."""
        while not over.wait(0.25):
            life = self.newest
            if life is not None:
                self.most_bytes = max(self.most_bytes, own_bytes(life.pid))

    def finish(self):
        super().finish()
        self.waits += self.ledger.waits

    def end_clock_off(self, kind):
        """Killed while its clock is days ahead or behind; the next one evaluates alerts as soon as it is up."""
        life = self.start(clock_off=self.random.choice([DAYS, -DAYS]))
        self.progress(self.random.randint(1, 20))
        self.kill(life, kind)
        began, life = time.time(), self.start()
        until(lambda: self.evaluated_at() > began, "a round of alerts after a clock was off")
        self.kill(life, "anywhere")

    def evaluated_at(self):
        """When the alerts were evaluated last, by the server's own word."""
        with contextlib.suppress(httpx.HTTPError):
            page = httpx.get(f"{self.urls[0]}/metrics", timeout=10.0, trust_env=False).text
            found = [line for line in page.splitlines() if line.startswith(EVALUATED)]
            return float(found[0].rpartition(" ")[2]) if found else 0.0
        return 0.0

    def end_imported(self, kind):
        """A curve file becomes a run while reports come; who is cut off goes on with the same run."""
        path = self.folder.parent / "curves.csv"
        path.write_text("step,loss\n" + "".join(f"{step},{1 / step}\n" for step in range(1, ROWS + 1)))
        run_id = f"imported-{self.random.randrange(10**9)}"
        life = self.start()
        self.progress()
        asked = ("import", path, "--server-url", self.urls[0], "--project", "p", "--run-id", run_id)
        with contextlib.suppress(RuntimeError):  # A busy server may refuse it; it is no loss.
            collage(*asked)
        self.progress()
        self.kill(life, kind)


class HostileSqliteLives(HostileLives, SqliteLives):
    """Beside that its disk fills up, and back-ups are restored."""

    kinds = (*SqliteLives.kinds, "clock off", "imported", "disk full", "restored")

    def end_restored(self, kind):
        """A back-up that was made meanwhile is whole, and has what was acknowledged before it began."""
        life = self.start()
        self.progress(self.random.randint(1, 20))
        acknowledged, _ = self.ledger.snapshot()
        with tempfile.TemporaryDirectory() as place:  # Beside the small disk, which copies would fill.
            copy, folder = Path(place) / "copy.sqlite", Path(place) / "restored"
            collage("backup", "make", copy, "--dir", self.folder)
            collage("backup", "restore", copy, "--dir", folder)
            store = SqliteStore(folder / "collage.sqlite", stale_after_seconds=600.0)
            store.open()
            counts = {stream.rank: stream.reports for stream in store.streams.of_run(self.run_id)}
            store.close()
        for rank, before in enumerate(acknowledged):
            if counts.get(rank, 0) < before:
                self.ledger.find(f"rank {rank}: a back-up has {counts.get(rank)} reports of {before}")
        self.progress()
        self.kill(life, kind)


class HostilePostgresqlLives(HostileLives, PostgresqlLives):
    """Beside that its cluster is killed; a full disk and back-ups are PostgreSQL's own business."""

    kinds = (*PostgresqlLives.kinds, "clock off", "imported")


class Asked:
    """One kind of request to one port, again and again: how long each answer took, of all that came."""

    def __init__(self, port, method, path, body=None):
        self.waits = []
        self._request = (method, path, body, {} if body is None else {"Content-Type": wire.MSGPACK})
        self._client = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)

    def ask(self):
        """While nobody serves there is no answer."""
        try:
            self._client.connect() if self._client.sock is None else None
            began = time.perf_counter()
            self._client.request(*self._request)
            self._client.getresponse().read()
            self.waits.append(time.perf_counter() - began)
        except (OSError, http.client.HTTPException):
            self._client.close()


def ask_in_turn(port, bare, end, queue):
    """Waits for /healthz of the server, of the bare application, and for reports that the bare one only decodes."""
    reports = wire.encode_batch(wire.ReportBatch(reports=[report_of(0, step) for step in range(1, 4)]))
    asked = (
        Asked(port, "GET", "/healthz"),
        Asked(bare, "GET", "/healthz"),
        Asked(bare, "POST", "/reports", reports),
    )
    while time.monotonic() < end:
        for one in asked:
            one.ask()
            time.sleep(0.02)
    queue.put([one.waits for one in asked])


@contextlib.contextmanager
def lives_on(backend, folder, seed):
    """Lives on `sqlite`, on a small disk, or on a cluster of `postgresql`."""
    if backend == "postgresql":
        with migrated_cluster(folder / "cluster") as cluster, Births(folder / "servers.log") as births:
            yield HostilePostgresqlLives(folder / "data", births, seed, cluster)
        return
    disk = SmallDisk(folder / "disk", DISK_MEBIBYTES)
    with contextlib.closing(disk), Births(folder / "servers.log") as births:
        lives = HostileSqliteLives(disk.folder / "data", births, seed)
        lives.disk = disk
        yield lives


def hour(minutes, seed, folder, say=print, backend="sqlite"):
    """(findings, figures by name)."""
    with lives_on(backend, folder, seed) as lives, bare_server() as bare:
        return _hour(minutes, seed, lives, bare, say)


def _hour(minutes, seed, lives, bare, say):
    end, over, context = time.monotonic() + 60 * minutes, threading.Event(), get_context("spawn")
    health = context.Queue()
    others = [
        context.Process(target=bother, args=(lives.ports[0], 60 * minutes, seed), daemon=True),
        context.Process(target=ask_in_turn, args=(lives.ports[0], bare, end, health), daemon=True),
    ]
    threading.Thread(target=lives.watch, args=(over,), daemon=True).start()
    try:
        for process in others:
            process.start()
        _live(lives, end, say)
        waits, bare_waits, bare_reports = health.get(timeout=120.0)
    finally:
        over.set()
        for process in others:
            process.terminate()
    acknowledged = sum(lives.acknowledged.values())
    return lives.findings, {
        "disk": lives.disk.how if lives.disk else "not filled",
        "kills": dict(sorted(lives.kills.items())),
        "acknowledged": acknowledged,
        "memory, MiB at most": round(lives.most_bytes / 2**20),
        "/healthz p99, ms": _late(waits),
        "/healthz p99 / bare": _ratio(waits, bare_waits),
        "honest request p99, ms": _late(lives.waits),
        "honest p99 / bare": _ratio(lives.waits, bare_reports),
        "load": ", ".join(f"{value:.1f}" for value in os.getloadavg()),
    }


def _live(lives, end, say):
    number = 0
    due: list[str] = []
    while time.monotonic() < end and not lives.findings:
        number += 1
        lives.begin(f"r{number}")
        for _ in range(LIVES_A_RUN):
            due = due or lives.random.sample(lives.kinds, len(lives.kinds))
            lives.end(due.pop())
            if time.monotonic() > end or lives.ledger.findings:
                break
        lives.finish()
        say(f"run {number}: {sum(lives.kills.values())} kills, {len(lives.findings)} findings")


def _late(waits):
    return round(1000 * float(np.quantile(waits, 0.99))) if waits else math.nan


def _ratio(waits, bare):
    return round(_late(waits) / max(_late(bare), 1), 1) if waits and bare else math.nan


def main():
    """Figures on standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--backend", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    sys.stdout.write(f"seed {chosen.seed}\n")
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o755)  # PostgreSQL runs as another user.
        findings, figures = hour(
            chosen.minutes,
            chosen.seed,
            Path(home),
            lambda text: sys.stderr.write(f"{text}\n"),
            chosen.backend,
        )
    for name, value in figures.items():
        sys.stdout.write(f"{name:<24} {value}\n")
    sys.stdout.write(f"lost or doubled          {len(findings)}\n")
    for finding in findings:
        sys.stdout.write(f"  {finding}\n")
    if chosen.json is not None:
        chosen.json.write_text(
            json.dumps({"seed": chosen.seed, "figures": figures, "findings": findings}, indent=1)
        )
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
