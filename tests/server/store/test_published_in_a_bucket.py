"""A project's table in a bucket: published, asked, made anew, a run deleted."""

import obstore
import pytest
from collage_server.publishing import publish
from collage_server.store import SqliteStore, archive_files
from obstore.store import from_url

from collage_monitor.command.query import open_fleet
from tests.server import fleet
from tests.server.migrated import put_migrated
from tests.server.store.contract import LIMITS, NOW

pytestmark = pytest.mark.slow

RUNS = fleet.FLEET[3:5]
"""One of them resumed: a file of it is copied."""


@pytest.fixture
def store(tmp_path, bucket):
    archive = archive_files(f"{bucket}/cold", tmp_path / "cache", 2**30)
    store = SqliteStore(put_migrated(tmp_path), stale_after_seconds=600.0, limits=LIMITS, archive=archive)
    store.open()
    fleet.fill(store, RUNS)
    fleet.archive_all(store, RUNS)
    yield store
    store.close()


def steps(archive):
    with open_fleet(archive) as connection:
        sql = "select run, count(*), sum(lost) from layers join runs using (project, run) group by run order by run"
        return connection.sql(sql).fetchall()


def test_a_bucket_holds_the_table_beside_the_files(store, bucket):
    archive = f"{bucket}/cold"
    assert publish(store, "p").runs == 2
    found = steps(archive)
    assert [(run, rows) for run, rows, _ in found] == [("light-3", 240), ("plain-wide", 240)]
    assert publish(store, "p").added == 0
    objects = from_url(archive, client_options={"allow_http": True})
    log = [entry["path"] for part in obstore.list(objects) for entry in part if "_delta_log" in entry["path"]]
    obstore.delete(objects, log)
    assert publish(store, "p").added > 0
    assert steps(archive) == found
    store.runs.delete("plain-wide", NOW)
    while store.retention.purge(100):
        pass
    publish(store, "p")
    assert steps(archive) == found[:1]
    kept = [entry["path"] for part in obstore.list(objects) for entry in part]
    assert not any("plain-wide" in path and "visible-" in path for path in kept)
