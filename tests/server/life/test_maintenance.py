"""Maintenance and the disk budget in the running application: what expires, what is refused, and what goes on."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from collage_server.background import Maintenance
from collage_server.disk_guard import DiskGuard
from collage_server.errors import Busy
from collage_server.settings import Settings, SettingsError
from collage_server.store import Selection, Sizes

from collage_monitor import wire
from tests.server.conftest import NOW, Clock, running
from tests.server.migrated import put_migrated
from tests.server.reads import model_points
from tests.server.samples import report
from tests.server.store.stores import opened

DAY = 86_400.0
GIB = 2**30


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


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_when_the_budget_is_reached(server):
    server.filled(steps=range(1, 3))
    app_state = server.app.state.collage
    app_state.guard._budget_bytes = app_state.store.sizes().used_bytes + 200_000
    accepted, seq = 2, 2
    while True:
        app_state.guard.check_sizes()
        batch = wire.encode_batch(wire.ReportBatch(reports=[report(seq + i, seq + i + 1) for i in range(50)]))
        headers = {"Content-Type": wire.MSGPACK}
        answer = server.client.post("/api/v1/streams/s0/reports", content=batch, headers=headers)
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
    """Let purges end so, one after the other; the list of those to come."""
    left = list(outcomes)

    def purge(_):
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(store.retention, "purge", purge)
    return left


def maintenance_of(store, **more):
    return Maintenance(store, guard_of(store), clock=Clock(), **more)


def test_a_round_that_fails_is_logged_and_the_next_one_works(store, monkeypatch, caplog):
    left = purging(store, monkeypatch, ValueError("broken"), True, True, False)
    maintenance = maintenance_of(store, days={})
    maintenance.attempt(maintenance.once)
    assert "maintenance failed" in caplog.text
    maintenance.once()
    assert left == []


def test_the_disk_is_watched_while_a_round_is_long(store, monkeypatch):
    purging(store, monkeypatch, *[True] * 5, False)
    looks, sizes = iter(range(100)), store.sizes
    monkeypatch.setattr(store, "sizes", lambda: (next(looks), sizes())[1])
    maintenance_of(store, days={}, disk_seconds=0.0).once()
    assert next(looks) == 5


def test_a_run_whose_retention_fails_holds_up_no_other_and_no_purge(store, monkeypatch, caplog):
    def expire(run_id, _):
        if run_id == "a":
            raise ValueError("a statistic of a newer server")
        expired.append(run_id)
        return 0

    expired: list[str] = []
    left = purging(store, monkeypatch, False)
    monkeypatch.setattr(store.retention, "sealed_runs", lambda: ["a", "b"])
    monkeypatch.setattr(store.retention, "expire", expire)
    maintenance_of(store, days={1: 1.0}).once()
    assert (expired, left) == (["b"], [])
    assert "retention of run a failed" in caplog.text
