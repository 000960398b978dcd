"""A PostgreSQL cluster of a benchmark's own, durable as it comes, with one migrated database."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from collage_server.store import PostgresqlStore

from tests.server.store.postgresql import Cluster, find_programs

__all__ = ["run_cluster"]


@contextmanager
def run_cluster() -> Iterator[tuple[str, int] | None]:
    """(URL of a database with this server's schema, process id of the cluster); None without PostgreSQL here."""
    programs = find_programs()
    if programs is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(folder, programs)
        cluster.create()
        cluster.start()
        try:
            cluster.execute("CREATE DATABASE benchmark")
            url = cluster.url("benchmark")
            PostgresqlStore(url, stale_after_seconds=600.0).migrate()
            if cluster.process is None:
                raise RuntimeError("the cluster ended at once")
            yield url, cluster.process.pid
        finally:
            cluster.stop()
