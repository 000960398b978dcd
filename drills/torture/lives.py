"""One database, senders and a reader that go on all the time, and server lives that end badly one by one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter

import httpx
from collage_server.store import PostgresqlStore, SqliteStore
from collage_server.store.archive.file_storage import archive_files

from collage_monitor import wire
from drills.torture.archived import end_archived
from drills.torture.clients import Evaluator, Reader, Sender, ask
from drills.torture.disk import SmallDisk
from drills.torture.ledger import EVALUATORS, RANKS, Ledger
from drills.torture.life import gone
from drills.torture.verify import verify
from tests.ports import free_port
from tests.server.samples import stream_create
from tests.server.store.contract import LIMITS
from tests.server.store.postgresql import SETTINGS, Cluster, find_programs
from tests.server.store.seaweed import ObjectStore
from tests.waiting import PATIENCE_SECONDS

__all__ = ["Lives", "PostgresqlLives", "SqliteLives", "migrated_cluster"]

_BUSY = {"seal_interval_seconds": 0.05, "disk_reserve_bytes": 1, "shutdown_seconds": 4.0}


class Lives(ABC):
    """`end(kind)` lives and ends one life, or two that belong together; kills are counted by kind in `kills`."""

    kinds: tuple[str, ...] = ("anywhere", "starting", "commit", "answer", "seal", "two servers")

    def __init__(self, folder, births, seed):
        self.folder = folder
        self.births = births
        self.random = random.Random(seed)
        self.ports = (free_port(), free_port())
        self.urls = [f"http://127.0.0.1:{self.ports[0]}"]
        self.kills: Counter[str] = Counter()
        self.acknowledged: Counter[str] = Counter()
        self.findings: list[str] = []
        self.looks = 0
        self.evaluated = 0
        self.ledger = Ledger()
        self.clients: list[Sender | Evaluator | Reader] = []
        self.run_id = ""
        self.newest = None
        self.disk: SmallDisk | None = None
        self.orphans = 0
        self.objects: ObjectStore | None = None
        self.archive = str(folder / "archive")
        """A folder, or the URL of a bucket."""

    def arguments(self):
        """What a server needs beside its port."""
        return ["--no-auth", "--dir", self.folder]

    @abstractmethod
    def store(self):
        """The database opened from outside, as the verification does."""

    def files(self):
        """Archived files as a server sees them that has none in its cache."""
        return archive_files(self.archive, self.folder / "cache-of-who-verifies", 2**26)

    def start(self, which=0, die=None, **settings):
        """A server's life."""
        self.newest = self.births.start(
            "serve",
            [*self.arguments(), "--port", self.ports[which]],
            die=die,
            **{**_BUSY, "archive": self.archive, **settings},
        )
        return self.newest

    def kill(self, life, kind):
        """SIGKILL, if it has not ended itself."""
        life.kill()
        assert gone(life, PATIENCE_SECONDS)
        self.kills[kind] += 1

    def progress(self, count=1):
        """Wait until so many more reports are acknowledged."""
        wanted, deadline = self.ledger.total + count, time.monotonic() + PATIENCE_SECONDS
        while self.ledger.total < wanted and not self.findings and not self.ledger.findings:
            assert time.monotonic() < deadline, self.stacks()
            time.sleep(0.005)

    def stacks(self):
        """What the threads of the newest life are doing, at the end of the log."""
        assert self.newest is not None
        self.newest.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        return self.births.log.read_text(errors="replace")[-9000:]

    def begin(self, run_id):
        """A run of its own, its senders and its reader."""
        life = self.start()
        self.begin_sending(run_id)
        self.kill(life, "anywhere")

    def begin_sending(self, run_id):
        """Register the run with whoever serves, and let its senders and its reader begin."""
        self.run_id, self.ledger = run_id, Ledger()
        with httpx.Client(timeout=10.0, trust_env=False) as client:
            streams = [
                stream_create(f"{run_id}-{rank}", f"{run_id}-launch", rank=rank, world_size=RANKS)
                for rank in range(RANKS)
            ]
            for path, message in (
                ("/projects/p/runs", wire.RunCreate(run_id=run_id)),
                (f"/runs/{run_id}/attempts", wire.AttemptCreate(launch_id=f"{run_id}-launch", first_step=1)),
                *((f"/runs/{run_id}/streams", stream) for stream in streams),
                *(message for place in range(EVALUATORS) for message in self._beside(f"{run_id}-e{place}")),
            ):
                while ask(client, self.urls[0], "POST", path, message) is None:
                    threading.Event().wait(0.02)
        place = (self.ledger, self.urls, run_id)
        self.clients = [Sender(*place, self.random.random(), rank) for rank in range(RANKS)]
        self.clients += [Evaluator(*place, self.random.random(), number) for number in range(EVALUATORS)]
        self.clients.append(Reader(*place, self.random.random()))
        for thread in self.clients:
            thread.start()
        self.progress()

    def _beside(self, stream_id):
        """What registers an evaluator: a launch of its own, and its stream."""
        launch = wire.AttemptCreate(launch_id=stream_id, first_step=1, role="evaluator")
        yield f"/runs/{self.run_id}/attempts", launch
        yield f"/runs/{self.run_id}/streams", wire.StreamCreate(stream_id=stream_id, launch_id=stream_id)

    def end(self, kind):
        """One life that ends like this."""
        before = self.ledger.total
        getattr(self, f"end_{kind.replace(' ', '_')}", self.end_at_a_point)(kind)
        self.acknowledged[kind] += self.ledger.total - before

    def end_anywhere(self, kind):
        life = self.start()
        self.progress(self.random.randint(1, 30))
        time.sleep(0.1 * self.random.random())
        self.kill(life, kind)

    def end_starting(self, kind):
        life = self.start()
        time.sleep(0.3 * self.random.random())
        self.kill(life, kind)

    def end_at_a_point(self, kind):
        life = self.start(die=(kind, self.random.randint(1, 6 if kind == "file" else 30)))
        self.kill(life, kind if self._ends_itself(life) else "anywhere")

    def _ends_itself(self, life):
        """Whether it comes by its point before so many more reports are acknowledged that it should have."""
        enough, deadline = self.ledger.total + 1000, time.monotonic() + PATIENCE_SECONDS
        while self.ledger.total < enough and time.monotonic() < deadline:
            if gone(life, 0.05):
                return True
        return gone(life, 0)

    def end_two_servers(self, kind):
        lives = [self.start(0), self.start(1)]
        self.urls.append(f"http://127.0.0.1:{self.ports[1]}")
        self.progress(self.random.randint(10, 60))
        self.kill(lives[1], kind)
        self.urls.pop()
        self.progress(10)
        self.kill(lives[0], kind)

    def end_bucket_killed(self, kind):
        """The object store goes and comes back; the server lives on, and is killed then."""
        assert self.objects is not None
        life = self.start()
        self.progress(self.random.randint(1, 100))
        self.objects.kill()
        self.kills[kind] += 1
        self.progress(self.random.randint(1, 100))
        self.objects.start()
        self.progress(50)
        self.kill(life, kind)

    def end_disk_full(self, kind):
        """Full while reports come; half of the time killed and started on the full disk, too."""
        assert self.disk is not None
        life = self.start()
        self.progress(self.random.randint(1, 30))
        self.disk.fill(life.pid)
        time.sleep(0.2 + 0.5 * self.random.random())
        if self.disk.mounted and self.random.random() < 0.5:
            self.kill(life, kind)
            life = self.start()
            time.sleep(0.5 * self.random.random())
        self.disk.free(life.pid)
        self.revive()
        if gone(life, 0.05):
            life = self.start()
        self.progress(5)
        self.kill(life, kind)

    @abstractmethod
    def revive(self):
        """What an operator does after the disk was full, beside making room."""

    def finish(self):
        """Let the senders finish their batch, then verify the run in every way.

        Ranks end at different steps, so its end is sealed only once it has been silent: here that is soon.
        """
        life = self.start(stale_after_seconds=1.0)
        for client in self.clients:
            client.stopping.set()
        for client in self.clients:
            client.join(PATIENCE_SECONDS)
            assert not client.is_alive(), self.stacks()
        self.looks += self.clients[-1].looks  # type: ignore[union-attr]
        self.evaluated += sum(self.ledger.evaluated)
        verify(self.ledger, self.urls[0], self.run_id, self.store)
        self.findings += self.ledger.findings
        self.kill(life, "anywhere")
        if not self.findings:
            end_archived(self)


class SqliteLives(Lives):
    """Servers on one file."""

    kinds = (*Lives.kinds, "second writer")

    def store(self):
        return SqliteStore(
            self.folder / "collage.sqlite", stale_after_seconds=600.0, limits=LIMITS, archive=self.files()
        )

    def end_second_writer(self, kind):
        """Another program holds the file's lock with changes of its own, and is killed."""
        life = self.start()
        self.progress()
        other = self.births.start("hold", [self.folder / "collage.sqlite", 0.2 + 0.3 * self.random.random()])
        assert gone(other, PATIENCE_SECONDS)
        self.kills[kind] += 1
        self.progress()
        self.kill(life, kind)

    def revive(self):
        """Nothing: SQLite goes on as soon as there is room."""


@contextlib.contextmanager
def migrated_cluster(folder, settings=SETTINGS):
    """A cluster in a folder of its own, its database `postgres` with this server's schema."""
    programs = find_programs()
    assert programs is not None, "no PostgreSQL programs (initdb, postgres); install postgresql"
    folder.mkdir(exist_ok=True)
    cluster = Cluster(folder, programs, settings)
    cluster.create()
    cluster.start()
    try:
        PostgresqlStore(cluster.url("postgres"), stale_after_seconds=600.0).migrate()
        yield cluster
    finally:
        cluster.stop()


class PostgresqlLives(Lives):
    """Any number of servers on one cluster, which is killed as well."""

    kinds = (*Lives.kinds, "cluster killed", "cluster stopped at once", "backend killed")

    def __init__(self, folder, births, seed, cluster, database="postgres"):
        super().__init__(folder, births, seed)
        self.cluster = cluster
        self.url = cluster.url(database)

    def arguments(self):
        return [*super().arguments(), "--database", self.url]

    def store(self):
        return PostgresqlStore(self.url, stale_after_seconds=600.0, limits=LIMITS, archive=self.files())

    def start(self, which=0, die=None, **settings):
        """Once the cluster has recovered: a server that finds none ends with a sentence."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self.cluster.execute("SELECT 1")
                return super().start(which, die, **settings)
            except subprocess.CalledProcessError:
                assert time.monotonic() < deadline, "the cluster does not recover"
                time.sleep(0.05)

    def end_cluster_killed(self, kind, number=signal.SIGKILL):
        """The server lives on, and must find the database again."""
        life = self.start()
        self.progress(self.random.randint(1, 30))
        self.cluster.end(number)
        self.kills[kind] += 1
        time.sleep(0.3 * self.random.random())
        self.restart()
        self.progress()
        self.kill(life, kind)

    def end_cluster_stopped_at_once(self, kind):
        self.end_cluster_killed(kind, signal.SIGQUIT)

    def end_backend_killed(self, kind):
        """One of PostgreSQL's own processes: the postmaster then restarts them all."""
        life = self.start()
        self.progress(self.random.randint(1, 30))
        found = self.cluster.execute("SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'")
        mine = [int(line) for line in found.split()]
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.random.choice(mine), signal.SIGKILL)
        time.sleep(0.3)
        self.kills[kind] += 1
        self.progress()
        self.kill(life, kind)

    def revive(self):
        """A cluster that cannot write its log ends."""
        for _ in range(20):
            process = self.cluster.process
            if process is not None and process.poll() is not None:
                return self.restart()
            time.sleep(0.05)
        return None

    def restart(self):
        """Once its last processes have noticed; memory that they share keeps a new one out until then."""
        for _ in range(50):
            try:
                return self.cluster.start()
            except AssertionError:
                time.sleep(0.1)
        raise TimeoutError("the cluster does not start again")
