"""The journal's bounds: what is refused, what is sealed for it, and that nothing stays full for good."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager

import pytest
from collage_server.errors import JournalFull
from collage_server.ingest.writer import JournalBounds
from collage_server.settings import FixedLimits, Settings
from collage_server.store import SqliteStore, records
from collage_server.store.records import report_bytes
from msgspec.structs import replace

from collage_monitor import wire
from tests.server.conftest import running
from tests.server.samples import report


def test_a_run_has_room_up_to_its_bound_and_others_beside_it():
    bounds = JournalBounds(100, 1000)
    bounds.admit("a", 60)
    bounds.admit("a", 40)
    with pytest.raises(JournalFull) as refused:
        bounds.admit("a", 1)
    assert (refused.value.status, refused.value.limit, refused.value.retry_after_seconds) == (429, 100, 2)
    bounds.admit("b", 100)


def test_all_runs_together_have_a_bound():
    bounds = JournalBounds(100, 150)
    bounds.admit("a", 100)
    with pytest.raises(JournalFull, match="all runs"):
        bounds.admit("b", 100)
    assert bounds.must_seal("a")
    bounds.count("a", 0)
    bounds.admit("b", 100)


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


def test_small_runs_are_left_alone_where_all_together_hold_too_much():
    bounds = JournalBounds(1000, 1000)
    for run_id, size in (("a", 400), ("b", 100), ("c", 1)):
        bounds.admit(run_id, size)
    assert [bounds.must_seal(run_id) for run_id in ("a", "b", "c")] == [True, True, False]


SMALL = FixedLimits(journal_run_bytes=20_000, seal_interval_seconds=1e6)
SENT = {
    "tiny": lambda seq: report(seq, seq + 1),
    "of one step": lambda seq: report(seq, 1),
    "scalars alone": lambda seq: report(seq, seq + 1, measured=False),
}


def sent(client, batch):
    return client.post("/api/v1/streams/s0/reports", content=batch, headers={"Content-Type": wire.MSGPACK})


@pytest.mark.slow
@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("ranks", [1, 2])
def test_sealing_is_due_whenever_the_bound_is_reached(tmp_path, kind, ranks):
    """Whoever is waited for: of two ranks one never reports; what was refused comes in after a look."""
    with running(Settings(folder=tmp_path, no_auth=True), limits=SMALL) as server:
        server.run()
        server.attempt()
        for rank in range(ranks):
            server.stream(stream_id=f"s{rank}", rank=rank, world_size=ranks)
        sealer = server.app.state.collage.sealer
        sealer.stop(10.0)
        refused = 0
        for seq in range(60):
            batch = wire.encode_batch(wire.ReportBatch(reports=[SENT[kind](seq)]))
            answer = sent(server.client, batch)
            if answer.status_code == 429:
                refused += 1
                assert answer.headers["retry-after"] == "2"
                assert answer.json()["error"]["code"] == "journal_full"
                sealer.stopping.clear()
                sealer.do_due_work()
                answer = sent(server.client, batch)
            assert answer.status_code == 200, answer.text
        assert refused > 1
        stored = server.app.state.collage.store.streams.of_run("r1")[0]
        assert (stored.reports, stored.missing) == (60, 0)
        assert server.app.state.collage.store.journal.bytes_of("r1") <= 20_000


@pytest.fixture
def bounded(tmp_path):
    """A run of one rank whose journal holds 20 kB, on a database for whose lock a commit waits 50 ms; unsealed."""
    chosen = Settings(folder=tmp_path, no_auth=True)
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0, busy_timeout_seconds=0.05)
    with running(chosen, store=store, limits=SMALL) as server:
        server.filled(steps=())
        server.app.state.collage.sealer.stop(10.0)
        server.app.state.collage.maintenance.stop(10.0)
        yield server


@contextmanager
def held_by_another(server):
    """No commit succeeds: another process writes, and does not end."""
    with closing(sqlite3.connect(server.app.state.collage.store.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


def outcomes(server, outcome):
    name = f'collage_server_reports_total{{outcome="{outcome}"}} '
    return next(float(line.removeprefix(name)) for line in server.get("/metrics").splitlines() if name in line)


@pytest.mark.slow
def test_what_no_commit_took_does_not_fill_the_journal(bounded):
    batch = wire.encode_batch(wire.ReportBatch(reports=[report(seq, seq + 1) for seq in range(3)]))
    with held_by_another(bounded):
        assert [sent(bounded.client, batch).status_code for _ in range(12)] == [503] * 12
        assert bounded.app.state.collage.bounds.waiting() == []
    assert sent(bounded.client, batch).json()["accepted"] == 3


@pytest.mark.slow
def test_what_is_stored_already_does_not_fill_the_journal(bounded):
    batch = wire.encode_batch(wire.ReportBatch(reports=[report(seq, seq + 1) for seq in range(3)]))
    assert [sent(bounded.client, batch).status_code for _ in range(30)] == [200] * 30


@pytest.mark.slow
def test_what_is_logged_takes_room_in_the_journal_too(bounded):
    """Two hundred scalars are more than most measurements: uncounted, they came in until the next count."""
    scalars = {f"name of a scalar {number:40}": 1 / 3 for number in range(200)}
    batches = [
        wire.encode_batch(wire.ReportBatch(reports=[report(seq, seq + 1, measured=False, scalars=scalars)]))
        for seq in range(2)
    ]
    assert [sent(bounded.client, batch).status_code for batch in batches] == [200, 429]
    app_state = bounded.app.state.collage
    in_database = app_state.store.journal.bytes_of("r1")
    assert in_database <= report_bytes(wire.decode_batch(batches[0], wire.MSGPACK).reports[0]) < 1.5 * in_database


def test_a_report_is_measured_once_on_its_way_into_the_journal(bounded, monkeypatch):
    measured = []

    def counting(report):
        measured.append(report.seq)
        return report_bytes(report)

    monkeypatch.setattr(records, "report_bytes", counting)
    batch = wire.encode_batch(wire.ReportBatch(reports=[report(seq, seq + 1) for seq in range(3)]))
    assert sent(bounded.client, batch).json()["accepted"] == 3
    assert measured == [0, 1, 2]


@pytest.mark.slow
def test_a_report_is_counted_as_rejected_once_however_often_its_batch_is_sent(bounded):
    bad = replace(report(0, 1), statistic_count=999)
    batch = wire.encode_batch(wire.ReportBatch(reports=[bad, report(1, 2)]))
    with held_by_another(bounded):
        assert [sent(bounded.client, batch).status_code for _ in range(3)] == [503] * 3
    assert sent(bounded.client, batch).json()["rejected"][0]["index"] == 0
    assert (outcomes(bounded, "rejected"), outcomes(bounded, "accepted")) == (1, 1)
