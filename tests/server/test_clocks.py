"""Every stored deadline, written by a server whose clock was days off and that was killed; then it is right."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from collage_server.alerts import Messenger
from collage_server.alerts.targets import Target
from collage_server.auth.administration import end_sessions
from collage_server.clock import DatabaseClock
from collage_server.errors import BadRequest
from collage_server.settings import Settings
from collage_server.store import LogOut, NewEvent, RunQuery, SqliteStore, state_at
from collage_server.store.runs.run_summary import SummaryStore

from collage_monitor import wire
from tests.server.conftest import NOW, Clock, running
from tests.server.migrated import put_migrated
from tests.server.reads import due_runs
from tests.server.store.incidents import LOW

DAY = 86_400.0
AHEAD, BEHIND = 3 * DAY, -3 * DAY
STALE = 600.0


@pytest.fixture(params=[AHEAD, BEHIND], ids=["ahead", "behind"])
def off(request):
    """Seconds that the server's clock was off."""
    return request.param


def opened(folder):
    store = SqliteStore(folder / "collage.sqlite", stale_after_seconds=STALE)
    store.open()
    return store


@pytest.fixture
def store(tmp_path):
    put_migrated(tmp_path)
    found = opened(tmp_path)
    found.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
    yield found
    found.close()


def test_log_out_token_of_a_provider(store, off):
    """It says itself until when it holds: kept that long, it counts once."""
    taken = LogOut(b"1" * 32, NOW + 120, "ada", None)
    end_sessions(store.access, taken, NOW + min(off, 0.0))
    with pytest.raises(BadRequest):
        end_sessions(store.access, taken, NOW)


def test_sign_of_life_of_a_run(tmp_path, off):
    """Of a run that ended in silence alerts would wait for three days before they say that it stalled."""
    put_migrated(tmp_path)
    with running(Settings(folder=tmp_path, no_auth=True), Clock(NOW + off)) as server:
        server.filled()
    for passed, state in ((0.0, "running" if off > 0 else "stale"), (STALE + 1, "stale")):
        store = opened(tmp_path)
        store.runs.bring_back(NOW)
        (run,) = store.runs.page(RunQuery(), NOW, STALE).runs
        assert run.updated_at <= NOW
        assert state_at(run.state, run.updated_at, NOW + passed, STALE) == state
        store.close()


@pytest.mark.slow
def test_a_server_brings_signs_of_life_back_when_it_starts(tmp_path, caplog):
    put_migrated(tmp_path)
    for passed, shown in ((AHEAD, True), (0.0, True), (STALE + 1, False)):
        with running(Settings(folder=tmp_path, no_auth=True), Clock(NOW + passed)) as server:
            if passed == AHEAD:
                server.filled()
            assert ('run_id="r1"' in server.get("/metrics")) == shown
    assert caplog.text.count("a clock was ahead") == 1


def test_retention_of_events_incidents_and_the_audit_log(store, off):
    """By their age: what is dated ahead stays as much longer, what is dated behind goes as much sooner."""
    for name in ("first", "second"):
        store.events.add("r1", [NewEvent(origin=name, kind="retention", text=name)], NOW + off)
    for until, left in ((NOW - 5 * DAY, 2), (NOW + off + 1, 1)):
        store.expiry.expire(until, NOW)
        with store.points.snapshot() as snapshot:
            assert snapshot.event_count("r1")[0] == left


class Refusing(Target):
    """A target that is away, and how often it was asked."""

    name = "webhook"
    asked = 0

    def send(self, _):
        self.asked += 1
        raise OSError


def test_message_about_an_incident(store, off):
    """However old it seems, it is tried; a pause that was begun by a clock that was ahead holds nothing back."""
    store.incidents.fire(replace(LOW, started_at=NOW + off), NOW + off)
    clock, target = Clock(NOW + off), Refusing()
    work = Messenger(store, [target], clock=clock, interval_seconds=1.0)
    if off > 0:
        work.do_due_work()
        clock.now = NOW
        work.do_due_work()
        assert target.asked == 2, "the clock was set back while the target was away"
    clock.now = NOW
    restarted_one = Messenger(store, [target], clock=clock, interval_seconds=1.0)
    work.stop(1.0)
    before = target.asked
    restarted_one.do_due_work()
    assert target.asked == before + 1


def test_what_other_code_evaluated(store, off, monkeypatch):
    """What a clock that was ahead has dated would not be made anew after an upgrade."""
    assert due_runs(store)
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + off)
        store.summaries.put(store.runs.get("r1"), wire.Overview(run_id="r1"), "old")
    assert [entry.run_id for entry in SummaryStore(store).due(10, "new")] == ["r1"]


def test_the_clock_of_a_database_goes_on_whatever_becomes_of_the_machine_s(store, monkeypatch):
    own, passed = Clock(NOW + AHEAD), Clock(0.0)
    clock = DatabaseClock(store, own, passed)
    clock.follow()
    assert clock() == NOW + AHEAD, "on SQLite there is no other"
    monkeypatch.setattr(store, "own_time", lambda: NOW)
    clock.follow()
    passed.now, own.now = 10.0, NOW + BEHIND
    assert clock() == NOW + 10.0


KINDS = {
    "lease of alerts, of messages",
    "silence",
    "session of a person",
    "log-out token of a provider",
    "sign of life of a run",
    "retention of points, events, incidents, the audit log",
    "message about an incident",
    "overview and newest step that other code made",
}
"""A test each stands above; of leases and silences in `store/incidents.py`, of sessions in sign-in's tests."""


def test_the_documented_table_has_each_stored_deadline():
    text = Path("docs/operations.md").read_text().partition("## Clocks")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) +\|", text, re.MULTILINE)
    assert {row for row in rows[1:] if not row.startswith("-")} == KINDS
