"""The journal's bounds: what is refused, what is sealed for it, and that nothing stays full for good.

And what one project may hold: refused with 422 and the limit, and no other project feels it.
"""

import sqlite3
from contextlib import closing, contextmanager
from unittest.mock import Mock

import pytest
from collage_server.auth.quotas import Quotas
from collage_server.errors import JournalFull, Unprocessable
from collage_server.ingest.writer import JournalBounds
from collage_server.settings import FixedLimits
from collage_server.store import SqliteStore, records
from collage_server.store.records import report_bytes
from msgspec.structs import replace

from collage_monitor import wire
from tests.server.conftest import Clock, running
from tests.server.guarded import guarded_server
from tests.server.samples import report
from tests.server.statements import statements_on


def test_a_run_and_all_runs_together_have_room_up_to_their_bounds():
    bounds = JournalBounds(100, 250)
    bounds.admit("a", 60)
    bounds.admit("a", 40)
    with pytest.raises(JournalFull) as refused:
        bounds.admit("a", 1)
    assert (refused.value.status, refused.value.limit, refused.value.retry_after_seconds) == (429, 100, 2)
    bounds.admit("b", 100)
    with pytest.raises(JournalFull, match="all runs"):
        bounds.admit("c", 100)
    assert bounds.must_seal("a")
    bounds.count("a", 0)
    bounds.admit("c", 100)


@pytest.mark.parametrize("bounds", [JournalBounds(10, 1000), JournalBounds(1000, 10)])
def test_what_comes_to_an_empty_journal_is_taken_however_large(bounds):
    bounds.admit("a", 500)
    with pytest.raises(JournalFull):
        bounds.admit("a", 500)
    bounds.count("a", 0)
    bounds.admit("a", 500)


def test_half_of_a_bound_or_a_refusal_presses_and_wakes_the_sealer():
    woken = []
    bounds = JournalBounds(100, 1000)
    bounds.on_pressure = lambda: woken.append(True)
    bounds.admit("a", 40)
    assert (bounds.must_seal("a"), woken) == (False, [])
    bounds.admit("a", 10)
    assert (bounds.must_seal("a"), woken) == (True, [True])
    bounds.count("a", 30)
    with pytest.raises(JournalFull):
        bounds.admit("a", 80)
    assert bounds.must_seal("a"), "else it would never have room for so much"
    bounds.count("a", 0)
    bounds.end_round()
    assert not bounds.must_seal("a")
    bounds = JournalBounds(1000, 1000)
    for run_id, size in (("a", 400), ("b", 100), ("c", 1)):
        bounds.admit(run_id, size)
    pressed = [bounds.must_seal(run_id) for run_id in ("a", "b", "c")]
    assert pressed == [True, True, False], "small runs are left alone where all together hold too much"


SMALL = FixedLimits(journal_run_bytes=20_000, seal_interval_seconds=1e6)
SENT = {
    "tiny": lambda seq: report(seq, seq + 1),
    "of one step": lambda seq: report(seq, 1),
    "scalars alone": lambda seq: report(seq, seq + 1, measured=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("ranks", [1, 2])
def test_sealing_is_due_whenever_the_bound_is_reached(settings, kind, ranks):
    """Whoever is waited for: of two ranks one never reports; what was refused comes in after a look."""
    with running(settings, limits=SMALL) as server:
        server.ranks(ranks)
        sealer = server.state.sealer
        sealer.stop(10.0)
        refused = 0
        for seq in range(60):
            answer = server.sent(SENT[kind](seq))
            if answer.status_code == 429:
                refused += 1
                assert answer.headers["retry-after"] == "2"
                assert answer.json()["error"]["code"] == "journal_full"
                sealer.stopping.clear()
                sealer.do_due_work()
                answer = server.sent(SENT[kind](seq))
            assert answer.status_code == 200, answer.text
        assert refused > 1
        stored = server.store.streams.of_run("r1")[0]
        assert (stored.reports, stored.missing) == (60, 0)
        assert server.store.journal.bytes_of("r1") <= 20_000


@pytest.fixture
def bounded(settings):
    """A run of one rank whose journal holds 20 kB, on a database for whose lock a commit waits 50 ms; unsealed."""
    store = SqliteStore(settings.folder / "collage.sqlite", stale_after_seconds=600.0, busy_timeout_seconds=0.05)
    with running(settings, store=store, limits=SMALL) as server:
        server.filled(steps=())
        server.state.sealer.stop(10.0)
        server.state.maintenance.stop(10.0)
        yield server


THREE = [report(seq, seq + 1) for seq in range(3)]


@contextmanager
def held_by_another(server):
    """No commit succeeds: another process writes, and does not end."""
    with closing(sqlite3.connect(server.store.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


@pytest.mark.slow
def test_neither_what_no_commit_took_nor_what_is_stored_already_fills_the_journal(bounded):
    with held_by_another(bounded):
        assert [bounded.sent(*THREE).status_code for _ in range(12)] == [503] * 12
        assert bounded.state.bounds.waiting() == []
    assert bounded.sent(*THREE).json()["accepted"] == 3
    assert [bounded.sent(*THREE).status_code for _ in range(30)] == [200] * 30


@pytest.mark.slow
def test_what_is_logged_takes_room_in_the_journal_too(bounded):
    """Two hundred scalars are more than most measurements: uncounted, they came in until the next count."""
    scalars = {f"name of a scalar {number:40}": 1 / 3 for number in range(200)}
    reports = [report(seq, seq + 1, measured=False, scalars=scalars) for seq in range(2)]
    assert [bounded.sent(one).status_code for one in reports] == [200, 429]
    in_database = bounded.store.journal.bytes_of("r1")
    assert in_database <= report_bytes(reports[0]) < 1.5 * in_database


def test_a_report_is_measured_once_on_its_way_into_the_journal(bounded, monkeypatch):
    measured = Mock(wraps=report_bytes)
    monkeypatch.setattr(records, "report_bytes", measured)
    assert bounded.sent(*THREE).json()["accepted"] == 3
    assert [one.args[0].seq for one in measured.call_args_list] == [0, 1, 2]


@pytest.mark.slow
def test_a_report_is_counted_as_rejected_once_however_often_its_batch_is_sent(bounded):
    reports = [replace(report(0, 1), statistic_count=999), report(1, 2)]
    with held_by_another(bounded):
        assert [bounded.sent(*reports).status_code for _ in range(3)] == [503] * 3
    assert bounded.sent(*reports).json()["rejected"][0]["index"] == 0
    page = bounded.get("/metrics")
    for outcome in ("rejected", "accepted"):
        assert f'collage_server_reports_total{{outcome="{outcome}"}} 1.0' in page


def create(guarded, run_id, project="p", tags=()):
    message = wire.RunCreate(run_id=run_id, tags=list(tags))
    return guarded.ask("POST", f"/api/v1/projects/{project}/runs", message=message)


def check_refused(answer, field, limit, advice="put new ones into another project"):
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert (error["field"], error["limit"]) == (field, limit)
    assert error["message"].endswith(f"delete runs of it, or {advice}")


def test_what_one_project_may_hold(tmp_path):
    """Tags count once, however many runs bear them."""
    bounds = FixedLimits(tags_per_project=3, layers_per_project=5)
    with guarded_server(tmp_path, bounds, runs_per_project=3) as guarded:
        assert create(guarded, "a", tags=["x", "y"]).status_code == 201
        assert create(guarded, "b", tags=["x", "y", "z"]).status_code == 201
        for run_id in ("c", "a"):
            check_refused(create(guarded, run_id, tags=["w"]), "tags_per_project", 3)
        for tags, status in ((["w"], 422), (["z"], 200)):
            answer = guarded.ask("PATCH", "/api/v1/runs/a", message=wire.RunUpdate(tags=tags))
            assert answer.status_code == status
        assert create(guarded, "c").status_code == 201
        raised = "start the server with a higher COLLAGE_SERVER_RUNS_PER_PROJECT"
        check_refused(create(guarded, "d"), "runs_per_project", 3, raised)
        assert create(guarded, "a").status_code == 200, "resuming is always allowed"
        assert create(guarded, "d", project="q").status_code == 201
        guarded.ask("DELETE", "/api/v1/runs/c")
        guarded.fill("p", "a")
        assert create(guarded, "e").status_code == 201
        guarded.ask("DELETE", "/api/v1/runs/e")
        guarded.fill("p", "b")
        check_refused(create(guarded, "f"), "layers_per_project", 5)


def test_creating_a_run_costs_the_same_in_a_project_of_many(tmp_path):
    """Runs, tags and layers of the whole project were counted for each: 4.8 ms became 10."""

    def rows_read(guarded, run_id):
        with statements_on(guarded.app.state.collage.store.engine) as asked:
            assert create(guarded, run_id, tags=["x"]).status_code == 201
        return [statement for statement in asked if "count(" in statement or "sum(" in statement]

    with guarded_server(tmp_path) as guarded:
        assert len(rows_read(guarded, "first")) == 3
        for i in range(20):
            assert rows_read(guarded, f"r{i}") == []


def test_a_count_is_remembered_below_half_of_the_limit_for_seconds(tmp_path):
    time, counts = Clock(0.0), []
    store = SqliteStore(tmp_path / "unopened.sqlite", stale_after_seconds=600.0).access
    quotas = Quotas(10, FixedLimits(), store, monotonic=time)

    def adding(held):
        def count():
            counts.append(held)
            return held

        quotas.check("p", "runs", 1, count)

    for held in range(1, 7):
        adding(held)
    assert counts == [1, 6], "up to the half of it nothing was counted again"
    for held in range(7, 11):
        adding(held)
    assert counts == [1, 6, 7, 8, 9, 10]
    with pytest.raises(Unprocessable):
        adding(11)
    other = Quotas(10, FixedLimits(), store, monotonic=time)
    other.check("p", "runs", 1, lambda: 2)
    time.now = 11.0
    with pytest.raises(Unprocessable):
        other.check("p", "runs", 1, lambda: 12)
