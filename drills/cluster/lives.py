"""Servers behind HAProxy that go on while the pieces below and beside them are killed one by one."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import httpx

from drills.cluster.bucket import VOLUMES
from drills.cluster.database import NODES
from drills.torture.life import gone
from drills.torture.lives import PostgresqlLives
from tests.forking import Program
from tests.ports import free_port
from tests.waiting import PATIENCE_SECONDS, until

__all__ = ["PRIMARY", "REST", "ClusterLives", "free_ports"]

PRIMARY = ("postgres", "patroni", "postgres and patroni")
"""What is killed of the primary's node, in turns."""
REST = ("server", "etcd member", "etcd", "haproxy", "rolling upgrade", "volume server")
_WITHOUT_ETCD_SECONDS = 40.0
"""Longer than a primary's lease."""
_WITHOUT_VOLUME_SECONDS = 90.0


def free_ports():
    """One for each server."""
    return tuple(free_port() for _ in NODES)


@contextmanager
def _pauses(ledger):
    """Seconds between two acknowledgements, of whichever sender, while the context lasts."""
    found, ended = [0.0], threading.Event()

    def look():
        known, since = ledger.total, time.monotonic()
        while not ended.wait(0.01):
            if ledger.total != known:
                found.append(time.monotonic() - since)
                known, since = ledger.total, time.monotonic()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


class ClusterLives(PostgresqlLives):
    """The senders know HAProxy's address alone."""

    def __init__(self, folder, births, seed, cluster, ports, objects):
        super().__init__(folder, births, seed, cluster, "collage")
        self.ports = ports
        self.objects = self.volumes = objects
        self.archive = objects.new_bucket()
        self.urls = [cluster.server_url]
        self.servers: list[Program] = []
        self.failovers = 0
        self.archived_meanwhile = 0
        """Files that were archived while a volume server was away."""
        self.longest: dict[str, float] = {}
        """Seconds between two acknowledgements at most, by kind."""

    def begin(self, run_id):
        """All servers, and the run's senders and reader."""
        self.servers = [self.start(which) for which in range(len(self.ports))]
        for which in range(len(self.ports)):
            self._ready(which)
        self.begin_sending(run_id)

    def start(self, which=0, die=None, **settings):
        """Three servers that seal all the time would keep each other from archiving."""
        return super().start(which, die, **{"seal_interval_seconds": 1.0, **settings})

    def _ready(self, which):
        def answers():
            assert self.servers[which].poll() is None, self.births.log.read_text(errors="replace")[-3000:]
            try:
                return httpx.get(f"http://127.0.0.1:{self.ports[which]}/readyz", trust_env=False).is_success
            except httpx.HTTPError:
                return False

        until(answers, f"server {which}")

    def end(self, kind):
        """One piece killed under load, and back; the longest pause between two acknowledgements, in seconds."""
        until(self.cluster.is_whole, "a whole cluster")
        self.progress(self.random.randint(10, 60))
        with _pauses(self.ledger) as pauses:
            super().end(kind)
        self.kills[kind] += 1
        longest = max(pauses)
        self.longest[kind] = max(self.longest.get(kind, 0.0), longest)
        return longest

    def _end_primary(self, kind):
        old = until(self.cluster.leader, "a primary")
        if "postgres" in kind:
            self.cluster.kill_postgres(old)
        if "patroni" in kind:
            self.cluster.kill_piece(f"patroni{old}")
        new = until(lambda: self._follower_of(old, kind), f"a primary after node {old}")
        self.failovers += new != old
        self.progress(30)
        if "patroni" in kind:
            self.cluster.start_piece(f"patroni{old}")
        until(self.cluster.is_whole, f"node {old} as a standby")

    def _follower_of(self, old, kind):
        """Patroni that is killed cannot say that it is primary; PostgreSQL alone may be back before anyone asks."""
        found = self.cluster.leader()
        return None if found == old and "patroni" in kind else found

    def end_postgres(self, kind):
        self._end_primary(kind)

    def end_patroni(self, kind):
        self._end_primary(kind)

    def end_postgres_and_patroni(self, kind):
        self._end_primary(kind)

    def end_server(self, kind):
        which = self.random.randrange(len(self.servers))
        self.servers[which].kill()
        assert gone(self.servers[which], PATIENCE_SECONDS)
        self.progress(100)
        self.servers[which] = self.start(which)
        self._ready(which)

    def end_etcd_member(self, kind):
        node = self.random.choice(NODES)
        self.cluster.kill_piece(f"etcd{node}")
        self.progress(300)
        self.cluster.start_piece(f"etcd{node}")

    def end_etcd(self, kind):
        """All members: the primary goes on, as it reaches the other nodes."""
        for node in NODES:
            self.cluster.kill_piece(f"etcd{node}")
        deadline = time.monotonic() + _WITHOUT_ETCD_SECONDS
        while time.monotonic() < deadline:
            self.progress(10)
        for node in NODES:
            self.cluster.start_piece(f"etcd{node}")

    def end_haproxy(self, kind):
        self.cluster.kill_piece("haproxy")
        time.sleep(self.random.random())
        self.cluster.start_piece("haproxy")
        self.progress(30)

    def end_rolling_upgrade(self, kind):
        """Each server is told to end and started again; the next only when it is ready."""
        for which, server in enumerate(self.servers):
            server.terminate()
            assert gone(server, PATIENCE_SECONDS)
            self.progress(30)
            self.servers[which] = self.start(which)
            self._ready(which)
            self.progress(30)

    def end_volume_server(self, kind):
        """Files go on being archived on the other two, if any is due in this time."""
        number = self.random.choice(VOLUMES)
        before, deadline = self._archived(), time.monotonic() + _WITHOUT_VOLUME_SECONDS
        self.volumes.kill_volume(number)
        self.progress(100)
        while self._archived() == before and time.monotonic() < deadline:
            self.progress(10)
        self.archived_meanwhile += self._archived() - before
        self.volumes.start_volume(number)
        until(lambda: self.volumes.volumes_known() == len(VOLUMES), f"volume server {number}")

    def _archived(self):
        """Rows of files that were ever named: their number falls only with the run."""
        return int(self.cluster.execute("SELECT count(*) FROM segment", "collage") or 0)

    def close(self):
        """End the servers, also after a failure."""
        for server in self.servers:
            server.kill()

    def finish(self):
        """Let all but one server end and lose a volume server for good, then verify the run in every way."""
        for server in self.servers:
            server.terminate()
            assert gone(server, PATIENCE_SECONDS)
        self.volumes.kill_volume(VOLUMES[0])
        super().finish()
        self.volumes.start_volume(VOLUMES[0])
        until(lambda: self.volumes.volumes_known() == len(VOLUMES), "the last volume server")
