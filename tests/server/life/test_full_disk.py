"""A disk that is really full: what was accepted stays, new reports wait, and what gives space back works."""

from __future__ import annotations

import shutil

import pytest
from collage_server.app import make_store
from collage_server.settings import Settings
from collage_server.store.backup import back_up
from collage_server.store.engine.database_files import Ballast

from benchmarks._population import LARGE, batches
from collage_monitor import wire
from drills.torture.disk import SmallDisk
from tests.server.conftest import NOW, Clock, running
from tests.server.samples import report
from tests.server.store.stores import seal_all
from tests.system import lacking

pytestmark = pytest.mark.slow

MIB = 2**20
DAY = 86_400.0
RESERVE = 64 * MIB


@pytest.fixture
def disk(tmp_path):
    made = SmallDisk(tmp_path / "disk", 160)
    try:
        if not made.mounted:
            lacking("no right to mount a small file system; run as root, or with CAP_SYS_ADMIN")
        yield made
    finally:
        made.free(0)
        made.close()


@pytest.fixture
def small(disk):
    """A server on the small disk, which looks at it only when told."""
    settings = Settings(
        folder=disk.folder / "data",
        no_auth=True,
        disk_reserve_bytes=RESERVE,
        retention_raw_days=30,
        retention_event_days=30,
        alerts="off",
    )
    store = make_store(settings)
    store._busy_timeout_seconds = 1.0
    with running(settings, Clock(), store=store) as server:
        for thread in (server.app.state.collage.maintenance, server.app.state.collage.sealer):
            thread.stop(60.0)
            thread.stopping.clear()
        yield server


def look(server):
    """What maintenance does every two seconds."""
    server.app.state.collage.maintenance._disk_due = 0.0
    server.app.state.collage.maintenance._watch_disk()


def test_a_full_disk_keeps_what_was_accepted_and_lets_go_of_it(disk, small, tmp_path):
    for run_id, stream_id in (("r1", "s1"), ("r2", "s2")):
        small.filled(run_id, stream_id, steps=range(1, 601))
        seal_all(small.app.state.collage.store, run_id, small.clock() + 1000.0)
    look(small)
    labels = {"alertname": "CollageEdqLow", "run_id": "r1", "project": "p"}
    for status in ("firing", "resolved"):
        alert = wire.AlertmanagerAlert(status=status, labels=labels)
        small.post("/alerts/alertmanager", wire.AlertmanagerMessage(alerts=[alert]), wire.AlertmanagerAnswer)
    assert [entry.state for entry in small.get("/events", wire.IncidentPage).events] == ["resolved"]
    disk.fill(0)
    look(small)
    assert shutil.disk_usage(disk.folder).free == 0
    error = small.reports([report(900, 900)], "s1", status=503)
    assert "read-only: the disk has" in error.message
    small.send("PATCH", "/runs/r1", wire.RunUpdate(notes="kept"))
    assert back_up(disk.folder / "data" / "collage.sqlite", tmp_path / "copy").runs == 2
    small.clock.now = NOW + 31 * DAY
    small.app.state.collage.maintenance.once()
    assert [event.kind for event in small.get("/runs/r1/events", wire.EventPage).events] == ["retention"]
    assert small.get("/events", wire.IncidentPage).events == []
    assert len(small.series("loss", points=1000).steps) == 600
    small.send("DELETE", "/runs/r2")
    small.get("/runs/r2", status=410)
    disk.free(0)
    look(small)
    assert small.reports([report(900, 900)], "s1").accepted == 1


def test_a_server_starts_on_a_full_disk_and_deletes(disk, small):
    small.filled(steps=range(1, 11))
    small.client.__exit__(None, None, None)
    disk.fill(0)
    with running(small.app.state.collage.settings, clock=small.clock) as again:
        assert again.get("/readyz", wire.Health).status.startswith("read-only")
        again.send("DELETE", "/runs/r1")
    small.client.__enter__()


def test_reports_leave_the_reserve_to_others(disk, small):
    """However fast they come: between two looks at the disk, too."""
    small.run()
    small.attempt()
    layers = [
        wire.Layer(name=f"layer.{i}", shape=[8, 8], dtype="bfloat16", elements=64) for i in range(LARGE.layers)
    ]
    small.stream(layers=layers, statistics=list(LARGE.statistics))
    look(small)
    accepted = 0
    for batch in batches(LARGE, 0, 1000, 25, 0):
        body = wire.encode_batch(batch)
        answer = small.client.post(
            "/api/v1/streams/s0/reports", content=body, headers={"Content-Type": wire.MSGPACK}
        )
        if answer.status_code != 200:
            break
        accepted += answer.json()["accepted"]
    assert answer.status_code == 503, "the journal's bound comes first"
    assert int(answer.headers["retry-after"]) > 0
    assert shutil.disk_usage(disk.folder).free > RESERVE - 32 * MIB, "a commit's log, and its file"
    streams = small.get("/runs/r1/streams", wire.StreamList).streams
    assert (accepted > 0, streams[0].reports) == (True, accepted)


def test_ballast_takes_space_only_where_there_is_twice_as_much(tmp_path):
    enough = Ballast(tmp_path / "ballast", MIB)
    enough.keep()
    assert (enough.bytes, (tmp_path / "ballast").stat().st_mode & 0o777) == (MIB, 0o600)
    enough.release()
    assert enough.bytes == MIB, "the disk has room"
    too_much = Ballast(tmp_path / "too-much", shutil.disk_usage(tmp_path).free)
    too_much.keep()
    assert too_much.bytes == 0
    nothing = Ballast(tmp_path / "nothing", 0)
    nothing.keep()
    assert not (tmp_path / "nothing").exists()
