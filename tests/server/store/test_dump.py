"""Back-up of a PostgreSQL with its own tools, by the documented commands: what is restored, and what is lost."""

from __future__ import annotations

import subprocess

import pytest
from collage_server.store import PostgresqlStore, ReportGroup

from collage_monitor import wire
from tests.server.samples import report
from tests.server.store.contract import LIMITS, NOW, StoreContract
from tests.server.store.seen import seal_all, seen, unchanged

pytestmark = pytest.mark.slow


def opened(url):
    store = PostgresqlStore(url, stale_after_seconds=600.0, limits=LIMITS)
    store.open()
    return store


def test_a_dump_taken_while_a_server_serves_is_restored_into_an_empty_database(
    cluster, database, empty_database, tmp_path
):
    served = opened(database)
    stream = StoreContract.fill(served)
    served.journal.append([ReportGroup(stream, [report(i, i + 1) for i in range(80)])], NOW)
    assert seal_all(served) == 2
    before = seen(served)
    dump = [cluster.programs / "pg_dump", "--format=custom", f"--file={tmp_path / 'dump'}", database]
    subprocess.run(dump, check=True, capture_output=True)
    served.journal.append([ReportGroup(stream, [report(80, 81)])], NOW)
    served.runs.create("p", wire.RunCreate(run_id="later"), NOW)
    served.close()
    restore = [cluster.programs / "pg_restore", f"--dbname={empty_database}", tmp_path / "dump"]
    subprocess.run(restore, check=True, capture_output=True)
    again = opened(empty_database)
    try:
        unchanged(before, seen(again))
        with again.points.snapshot() as now:
            assert list(now.records(["r1"])) == ["r1"]
        # The loss window: what came after the dump began. Its sender repeats it, and it is stored once.
        outcome = again.journal.append([ReportGroup(stream, [report(i, i + 1) for i in range(70, 81)])], NOW)[0]
        assert (outcome.accepted, outcome.duplicates) == (1, 10)
        assert again.runs.get("r1").last_step == 81
    finally:
        again.close()
