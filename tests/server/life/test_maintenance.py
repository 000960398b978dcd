"""Maintenance, the disk budget, and a disk that is really full: what expires, is refused, stays, and goes on."""

import shutil
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from collage_server.app import make_store
from collage_server.background import Maintenance
from collage_server.disk_guard import DiskGuard
from collage_server.errors import Busy
from collage_server.settings import Settings, SettingsError
from collage_server.store import Selection, Sizes
from collage_server.store.backup import back_up
from collage_server.store.engine.database_files import Ballast

from benchmarks._population import LARGE, batches
from collage_monitor import wire
from drills.torture.disk import SmallDisk
from tests.server.conftest import NOW, Clock, running
from tests.server.migrated import put_migrated
from tests.server.reads import model_points
from tests.server.samples import layer, report
from tests.server.store.stores import opened, seal_all
from tests.system import lacking

DAY = 86_400.0
GIB = 2**30
MIB = 2**20
RESERVE = 64 * MIB


class Disk:
    """A store that says how much space there is."""

    def __init__(self, used=0, free=100 * GIB):
        self.used = used
        self.free = free

    def sizes(self):
        return Sizes(self.used, self.free)


def guard_of(disk, budget=None, reserve=GIB):
    return DiskGuard(disk, budget_bytes=budget, reserve_bytes=reserve)


@pytest.mark.parametrize(
    ("full", "between", "room"),
    [
        (Disk(used=101), Disk(used=98), Disk(used=94)),
        (Disk(free=GIB - 1), Disk(free=GIB + 1), Disk(free=2 * GIB)),
    ],
)
def test_the_guard_closes_at_the_bound_and_opens_well_below(full, between, room):
    disk = Disk()
    guard = guard_of(disk, budget=100)
    for state, closed in ((room, False), (between, False), (full, True), (between, True), (room, False)):
        disk.used, disk.free = state.used, state.free
        guard.check_sizes()
        assert (guard.reason is not None) is closed


@pytest.mark.parametrize(
    ("free", "budget", "told"),
    [
        (None, 100, "101 bytes, its budget is 100"),
        (None, 100, "then VACUUM FULL, or raise COLLAGE_SERVER_DISK_BUDGET_BYTES"),
        (100 * GIB, 100, "delete runs or shorten the retention or raise"),
        (None, None, None),
    ],
)
def test_the_guard_names_the_bound_and_a_remote_disk_has_no_reserve(free, budget, told):
    guard = guard_of(Disk(used=101, free=free), budget=budget)
    guard.check_sizes()
    assert told in guard.reason if told else guard.reason is None


def test_the_guard_counts_commits_between_two_looks():
    disk = Disk(used=1000)
    guard = guard_of(disk, budget=2000)
    guard.check_sizes()
    disk.used = 1900
    guard.admit(400)
    for more in (200, 1):
        with pytest.raises(Busy, match="its budget is 2000"):
            guard.admit(more)
    disk.used = 100
    guard.check_sizes()
    guard.admit(900)


def test_sealing_takes_nothing_from_the_reserve():
    disk = Disk(free=2000)
    guard = guard_of(disk, reserve=1000)
    for free, may_seal in ((2000, True), (1000, True), (999, False)):
        disk.free = free
        guard.check_sizes()
        assert guard.may_seal == may_seal


@pytest.mark.slow
def test_read_only_refuses_what_would_be_stored_and_answers_the_rest(server):
    server.filled(steps=range(10, 60, 10))
    guard = server.app.state.collage.guard
    guard._store = Disk(free=5)
    guard.check_sizes()
    error = server.reports([report(9, 90)], status=503)
    assert error.code == "busy"
    assert "the disk has 5 bytes left" in error.message
    assert error.request_id
    answer = server.client.post("/api/v1/projects/p/runs", json={"run_id": "r2"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
    for path, message in (
        ("/runs/r1/notes", wire.NoteCreate(text="a note")),
        ("/silences", wire.SilenceCreate(seconds=60.0, run_id="r1")),
        ("/tokens", wire.TokenCreate(name="t", role="read", projects=None)),
        ("/alerts/alertmanager", b"{}"),
    ):
        assert server.post(path, message, status=503).code == "busy"
    ready = server.get("/readyz", wire.Health)
    assert ready.status.startswith("read-only: the disk has 5 bytes left")
    assert server.series("loss").steps == [10, 20, 30, 40, 50]
    assert server.client.get("/api/v1/runs/r1/export").status_code == 200
    assert server.client.get("/metrics").status_code == 200
    server.send("PATCH", "/runs/r1", wire.RunUpdate(notes="kept"))
    server.send("DELETE", "/runs/r1")
    guard._store = Disk()
    guard.check_sizes()
    server.filled("r3", "s3")
    assert server.get("/readyz", wire.Health).status == "ok"


def post_reports(server, batch):
    headers = {"Content-Type": wire.MSGPACK}
    return server.client.post("/api/v1/streams/s0/reports", content=wire.encode_batch(batch), headers=headers)


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_when_the_budget_is_reached(server):
    server.filled(steps=range(1, 3))
    app_state = server.app.state.collage
    app_state.guard._budget_bytes = app_state.store.sizes().used_bytes + 200_000
    accepted, seq = 2, 2
    while True:
        app_state.guard.check_sizes()
        reports = [report(seq + i, seq + i + 1) for i in range(50)]
        answer = post_reports(server, wire.ReportBatch(reports=reports))
        if answer.status_code == 503:
            break
        accepted += answer.json()["accepted"]
        seq += 50
        assert seq < 5000
    assert len(server.series("loss", points=5000).steps) == accepted


@pytest.mark.slow
def test_retention_by_settings(tmp_path):
    clock = Clock()
    settings = Settings(folder=tmp_path, no_auth=True, retention_raw_days=30, retention_coarse_days=365)
    with running(settings, clock=clock) as server:
        server.filled(steps=range(1, 601))
        app_state = server.app.state.collage
        # The newest chunk keeps its points, so it must have begun.
        app_state.store.sealing.limits = replace(app_state.store.sealing.limits, part_bytes=1)
        server.seal()

        def counts():
            return model_points(app_state.store, "r1", ["lost"], Selection()).counts.tolist()

        for days, expected in ((29, [1] * 600), (31, [16] * 32 + [1] * 88), (366, [256] * 2 + [1] * 88)):
            clock.now = NOW + days * DAY
            app_state.maintenance.once()
            assert counts() == expected, days
        assert len(server.series("edq_ratio", points=1000).steps) == 90
        assert len(server.series("loss", points=1000).steps) == 600
        events = server.get("/runs/r1/events", wire.EventPage).events
        told = [(event.kind, event.time) for event in events[1:]]
        assert told == [("retention", NOW + days * DAY) for days in (31, 366)]
        assert all(event.text.startswith("retention dropped 2 chunk levels ") for event in events[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("days", "kept"), [(None, ["second", "first"]), (30, ["second"])])
def test_the_audit_log_is_kept_for_good_or_as_long_as_its_setting_says(tmp_path, days, kept):
    clock = Clock()
    settings = Settings(folder=tmp_path, no_auth=True, retention_event_days=1, retention_audit_days=days)
    with running(settings, clock=clock) as server:
        for name in ("first", "second"):
            server.post("/tokens", wire.TokenCreate(name=name, role="read", projects=None), status=201)
            clock.now += 20 * DAY
        server.app.state.collage.maintenance.once()
        entries = server.get("/audit", wire.AuditLogPage).acts
        assert [entry.details["name"] for entry in entries] == kept


def test_settings_of_retention_are_checked(tmp_path):
    for raw in (None, 5):
        with pytest.raises(SettingsError, match="keep them no longer"):
            Settings(folder=tmp_path, no_auth=True, retention_raw_days=raw, retention_coarse_days=3)
    with pytest.raises(SettingsError, match="DISK_BUDGET_BYTES=0 must be a positive whole number"):
        Settings(folder=tmp_path, no_auth=True, disk_budget_bytes=0)
    assert Settings(folder=tmp_path, no_auth=True).retention_days == {}


def test_a_database_file_that_is_gone_takes_no_more_reports(tmp_path):
    """It would be written to until the server ends, and acknowledged."""
    with running(Settings(folder=tmp_path, no_auth=True), clock=Clock()) as server:
        server.filled()
        store, guard = server.app.state.collage.store, server.app.state.collage.guard
        (tmp_path / "collage.sqlite").rename(tmp_path / "moved")
        guard.check_sizes()
        assert "put it back" in server.reports([report(9, 90)], status=503).message
        with store.reading(), pytest.raises(Busy), store.reading():
            pytest.fail("a database was made anew")
        store._longest_log = 0
        before = sorted(tmp_path.iterdir())
        store.checkpoint_log()
        assert not store.release_space()
        assert sorted(tmp_path.iterdir()) == before, "upkeep leaves the log to the file that it belongs to"
        (tmp_path / "moved").rename(tmp_path / "collage.sqlite")
        guard.check_sizes()
        assert server.reports([report(9, 90)]).accepted == 1


@pytest.fixture
def store(tmp_path):
    with closing(opened(put_migrated(tmp_path))) as store:
        yield store


def purging(store, monkeypatch, *outcomes):
    """Let purges end so, one after the other."""
    monkeypatch.setattr(store.retention, "purge", mock.Mock(side_effect=outcomes))


def maintenance_of(store, **more):
    return Maintenance(store, guard_of(store), clock=Clock(), **more)


def test_the_database_is_checked_a_minute_after_the_start_and_once_a_day(store, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("collage_server.background.time.monotonic", lambda: clock.now)
    maintenance = maintenance_of(store, days={})
    checks = mock.Mock(wraps=store.check_database)
    monkeypatch.setattr(store, "check_database", checks)
    for seconds, count in ((59, 0), (60, 1), (86_459, 1), (86_460, 2)):
        clock.now = NOW + seconds
        maintenance.once()
        assert (checks.call_count, maintenance.damaged_rows) == (count, 0 if count else None)


def test_a_round_that_fails_is_logged_and_the_next_one_works(store, monkeypatch, caplog):
    purging(store, monkeypatch, ValueError("broken"), True, True, False)
    maintenance = maintenance_of(store, days={})
    maintenance.attempt(maintenance.once)
    assert "maintenance failed" in caplog.text
    maintenance.once()
    assert store.retention.purge.call_count == 4


def test_the_disk_is_watched_while_a_round_is_long(store, monkeypatch):
    purging(store, monkeypatch, *[True] * 5, False)
    monkeypatch.setattr(store, "sizes", mock.Mock(wraps=store.sizes))
    maintenance_of(store, days={}, disk_seconds=0.0).once()
    assert store.sizes.call_count == 5


def test_a_run_whose_retention_fails_holds_up_no_other_and_no_purge(store, monkeypatch, caplog):
    purging(store, monkeypatch, False)
    expire = mock.Mock(side_effect=[ValueError("a statistic of a newer server"), 0])
    monkeypatch.setattr(store.retention, "sealed_runs", lambda: ["a", "b"])
    monkeypatch.setattr(store.retention, "expire", expire)
    maintenance_of(store, days={1: 1.0}).once()
    assert [call.args[0] for call in expire.call_args_list] == ["a", "b"]
    assert store.retention.purge.call_count == 1
    assert "retention of run a failed" in caplog.text


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
    kept: dict[str, Any] = {"retention_raw_days": 30, "retention_event_days": 30, "disk_reserve_bytes": RESERVE}
    settings = Settings(folder=disk.folder / "data", no_auth=True, alerts="off", **kept)
    store: Any = make_store(settings)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_server_starts_on_a_full_disk_and_deletes(disk, small):
    small.filled(steps=range(1, 11))
    small.client.__exit__(None, None, None)
    disk.fill(0)
    with running(small.app.state.collage.settings, clock=small.clock) as again:
        assert again.get("/readyz", wire.Health).status.startswith("read-only")
        again.send("DELETE", "/runs/r1")
    small.client.__enter__()


@pytest.mark.slow
def test_reports_leave_the_reserve_to_others(disk, small):
    """However fast they come: between two looks at the disk, too."""
    small.run()
    small.attempt()
    small.stream(layers=[layer(f"layer.{i}") for i in range(LARGE.layers)], statistics=list(LARGE.statistics))
    look(small)
    accepted = 0
    for batch in batches(LARGE, 0, 1000, 25, 0):
        answer = post_reports(small, batch)
        if answer.status_code != 200:
            break
        accepted += answer.json()["accepted"]
    assert answer.status_code == 503, "the journal's bound comes first"
    assert int(answer.headers["retry-after"]) > 0
    assert shutil.disk_usage(disk.folder).free > RESERVE - 32 * MIB, "a commit's log, and its file"
    streams = small.get("/runs/r1/streams", wire.StreamList).streams
    assert (accepted > 0, streams[0].reports) == (True, accepted)


def test_ballast_takes_space_only_where_there_is_twice_as_much(tmp_path):
    enough, *others = (Ballast(tmp_path / f"{size}", size) for size in (MIB, shutil.disk_usage(tmp_path).free, 0))
    enough.keep()
    assert (enough.bytes, (tmp_path / f"{MIB}").stat().st_mode & 0o777) == (MIB, 0o600)
    enough.release()
    assert enough.bytes == MIB, "the disk has room"
    for other in others:
        other.keep()
        assert other.bytes == 0
    assert not (tmp_path / "0").exists()
