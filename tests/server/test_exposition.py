"""/metrics as exact text, the clock standing still."""

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from collage_server.alerts.condition_evaluation import Evaluation
from collage_server.disk_guard import DiskGuard
from collage_server.errors import Busy, Gone
from collage_server.exposition import exposition, samples
from collage_server.store import schema
from collage_server.store.reading import snapshot
from collage_server.store.reading.snapshot import Snapshot
from collage_server.store.runs import run_store
from collage_server.summariser import Summariser, newest_points
from msgspec.structs import replace as replace_fields
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from collage_monitor import wire
from collage_monitor.alerts import enabled_alerts
from tests.server.samples import LAYERS, block, layer, report, watch
from tests.server.statements import statements_on
from tests.waiting import PATIENCE_SECONDS, until

_VOLATILE = re.compile("collage_server_(memory_|sealer_round|oldest_unsealed|journal_bytes|alerts_lease_held)")
EXPECTED = Path(__file__).with_name("exposition.txt")


def kept_rows(server, *run_ids):
    """What is written of the newest steps, by run."""
    with server.store.points.snapshot() as now:
        return now.kept_points(run_ids)


def stable(text):
    """Without the durations of commits, which no clock can freeze, memory, and what threads have come to."""
    lines = [line for line in text.splitlines(keepends=True) if "commit_seconds_" not in line]
    return "".join(line for line in lines if line.startswith("#") or _VOLATILE.match(line) is None)


def shown(server, *run_ids):
    """Whether each is on the page."""
    page = server.get("/metrics")
    return [f'run_id="{run_id}"' in page for run_id in run_ids]


def test_the_page_is_exactly_this(server, monkeypatch):
    monkeypatch.setattr(DiskGuard, "left_ratio", 0.5)
    server.filled(name='odd "name"\\ with\nbreaks')
    logged = {"validation_loss": float("nan"), "reports_dropped": 2.0}
    server.reports([report(5, 60, measured=False, scalars=logged)])
    server.reports([report(0, 10)])
    page = server.get("/metrics")
    assert stable(page) == EXPECTED.read_text(encoding="utf-8")
    _, _, durations = page.partition("# TYPE collage_server_commit_seconds histogram\n")
    lines = durations.partition("#")[0].splitlines()
    assert lines[-3].startswith('collage_server_commit_seconds_bucket{le="+Inf"}')
    assert lines[-2].startswith("collage_server_commit_seconds_count ")
    assert lines[-1].startswith("collage_server_commit_seconds_sum ")
    counts = [float(line.rpartition(" ")[2]) for line in lines[:-1]]
    assert counts == sorted(counts)
    assert counts[-2] == counts[-1] > 0


def test_at_most_fifteen_series_a_run(server):
    server.run()
    server.attempt()
    server.stream(watch=watch("plus"))
    scalars = dict.fromkeys(("loss", "validation_loss", "agent_overhead_ratio", "reports_dropped", "x"), 1.0)
    server.reports([report(0, 10, scalars=scalars)])
    families = text_string_to_metric_families(server.get("/metrics"))
    samples = [sample for family in families for sample in family.samples if "run_id" in sample.labels]
    assert 10 < len(samples) <= 15
    assert {sample.labels["strategy"] for sample in samples} == {"plus"}


@pytest.mark.slow
def test_only_running_and_fresh_runs_are_shown(server, clock):
    server.filled("r1", "s1")
    server.filled("r2", "s2")
    server.send("PATCH", "/runs/r1", wire.RunUpdate(state="finished"), wire.Run)
    assert shown(server, "r1", "r2") == [False, True]
    clock.now += 601
    assert shown(server, "r2") == [False]
    server.reports([report(9, 90)], "s2")
    assert shown(server, "r2") == [True]


@pytest.mark.slow
def test_a_resume_counts_its_steps_from_none_until_it_reports(server):
    def gauge(name):
        line = next((line for line in server.get("/metrics").splitlines() if line.startswith(f"{name}{{")), None)
        return line and float(line.rpartition(" ")[2])

    server.filled(steps=range(10, 1010, 10))
    assert gauge("collage_steps_since_resume") is None
    server.attempt(launch_id="launch-2", first_step=900)
    assert (gauge("collage_step"), gauge("collage_steps_since_resume")) == (1000, 0)
    server.stream(stream_id="s1", launch_id="launch-2")
    assert gauge("collage_steps_since_resume") == 0
    server.reports([report(0, 904)], "s1")
    assert (gauge("collage_step"), gauge("collage_steps_since_resume")) == (904, 5)
    server.attempt(launch_id="launch-3", first_step=905)
    assert gauge("collage_steps_since_resume") == 0


@pytest.mark.slow
def test_a_run_that_is_deleted_meanwhile_takes_no_other_with_it(server, clock, monkeypatch):
    for run_id in ("r1", "r2"):
        server.filled(run_id, f"{run_id}-s")
    read, listed = Snapshot.latest_of, Snapshot.run_page

    def deleted_first(*asked):
        with contextlib.suppress(Gone):
            server.store.runs.delete("r1", clock())
        return read(*asked)

    def deleted_afterwards(*asked):
        page = listed(*asked)
        server.store.runs.delete("r3", clock())
        return page

    monkeypatch.setattr(Snapshot, "latest_of", deleted_first)
    assert shown(server, "r1", "r2") == [False, True]
    monkeypatch.undo()
    server.filled("r3", "r3-s")
    monkeypatch.setattr(Snapshot, "run_page", deleted_afterwards)
    of_one_moment = server.get("/runs", wire.RunPage).runs
    assert [run.run_id for run in of_one_moment] == ["r3", "r2"]
    assert all(run.latest["edq_ratio"] is not None for run in of_one_moment)
    monkeypatch.undo()
    assert [run.run_id for run in server.get("/runs", wire.RunPage).runs] == ["r2"]


@pytest.mark.slow
def test_a_run_that_cannot_be_read_takes_no_other_with_it(server, monkeypatch, caplog):
    for run_id in ("r1", "r2"):
        server.filled(run_id, f"{run_id}-s")
    assert shown(server, "r1") == [True]

    def broken(now, run_ids):
        if "r1" in run_ids:
            raise ValueError("r1")
        return read(now, run_ids)

    read = Snapshot.latest_of
    monkeypatch.setattr(Snapshot, "latest_of", broken)
    for step in (100, 110):
        for run_id in ("r1", "r2"):
            server.reports([report(step, step)], f"{run_id}-s")
        assert shown(server, "r1", "r2") == [False, True]
        told = [record.getMessage() for record in caplog.records if record.name.startswith("collage_server")]
        [line] = [words for words in told if "r1" in words]
        assert line.startswith("run r1 cannot be read")
    monkeypatch.undo()
    assert shown(server, "r1") == [True]


def test_a_database_that_does_not_answer_is_no_run_s_failure(server, monkeypatch):
    server.filled()

    def lost(*_):
        raise OperationalError(None, None, Exception("gone"))

    monkeypatch.setattr(snapshot, "read_live_runs", lost)
    with pytest.raises(Busy):
        exposition(server.state)
    monkeypatch.undo()
    monkeypatch.setattr(Snapshot, "latest_of", lost)
    with pytest.raises(Busy):
        server.state.summariser.keep_points()


@pytest.mark.slow
def test_runs_that_are_read_together_say_what_each_says_alone(server, monkeypatch):
    """Of one process or several, shown and hidden, sealed and not: the page is one, and that of exact answers."""
    # What others leave of the disk changes between two pages.
    monkeypatch.setattr(DiskGuard, "left_ratio", 0.5)
    server.state.summariser.stop(PATIENCE_SECONDS)
    server.filled("plain", "s0", steps=[10, 20])
    server.filled("nothing", "s1", steps=[])
    server.filled("other", "s2", steps=[10])
    server.filled("sealed", "s3", steps=range(10, 2600, 10))
    server.state.sealer.do_due_work()
    server.filled("twice", "s4", steps=[10])
    server.reports([report(1, 10), report(2, 20), report(3, 20)], "s4")
    server.filled("hidden", "s5", steps=[10, 20, 30])
    server.attempt("hidden", "launch-2", first_step=20)
    with_ranks(server, "ranks", [LAYERS] * 2, [1, 2])
    # Replicas; ranks of which one lags behind and goes on logging; shards of which each knows its own layers.
    own = [LAYERS[:2], LAYERS[1:], LAYERS[:1]]
    with_ranks(server, "replicas", [LAYERS] * 3, [2] * 3, replicas=range(3), log=True)
    with_ranks(server, "lagging", [LAYERS] * 3, [1, 2, 2], log=True)
    with_ranks(server, "own-layers", own, [2] * 3, log=True)
    # The newest step is the end of a sealed part: 64 steps are one. Of some, there is more to know.
    server.filled("sealed-alone", "e0", steps=range(10, 650, 10))
    server.filled("sealed-hidden", "e1", steps=range(10, 650, 10))
    with_ranks(server, "sealed-ranks", [LAYERS] * 3, [64] * 3)
    with_ranks(server, "sealed-own-layers", own, [64] * 3)
    with_ranks(server, "sealed-replicas", [LAYERS] * 2, [64] * 2, replicas=(0, 1))
    with_ranks(server, "sealed-late", [LAYERS] * 2, [64, 63])
    server.state.sealer.do_due_work()
    server.store.sealing.seal("sealed-late", server.clock(), journal_full=True)
    server.reports([report(63, 640, rank=1)], "sealed-late-1")
    server.attempt("sealed-hidden", "launch-2", first_step=600)
    page = stable(server.get("/metrics"))
    assert page.count("collage_edq_ratio{") == 15
    run_ids = [run.run_id for run in server.get("/runs?limit=100", wire.RunPage).runs]
    kept = {run_id: row.point for run_id, row in kept_rows(server, *run_ids).items()}
    with server.store.points.snapshot() as now:
        assert kept == newest_points(now, now.records(run_ids), layers=True)
        monkeypatch.setattr(Snapshot, "kept_points", lambda *_: {})
        for run_id in run_ids:
            assert newest_points(now, now.records([run_id]), layers=True) == {run_id: kept[run_id]}


@pytest.mark.slow
@pytest.mark.parametrize("behind", [0, 5])
def test_a_state_that_a_server_whose_clock_lags_behind_states_is_seen(server, clock, behind):
    """It seemed older than the last report, and what was kept of the run as new as the run."""
    server.state.summariser.stop(PATIENCE_SECONDS)
    server.filled(steps=[10])
    server.get("/metrics")
    store = server.store
    server.reports([report(1, 20)])
    assert kept_rows(server, "r1")["r1"].point.step == 10
    assert server.get("/runs/r1/latest", wire.Latest).step == 20, "a row that is out of date is no answer"
    clock.now -= behind
    for state in ("finished", "running", "failed"):
        server.get("/metrics")
        assert list(kept_rows(server, "r1")) == ["r1"]
        assert store.summaries.due_points(10) == {}
        server.send("PATCH", "/runs/r1", wire.RunUpdate(state=state))
        assert list(store.summaries.due_points(10)) == ["r1"]


@pytest.mark.slow
def test_servers_of_two_releases_do_not_take_turns(server):
    """Each would have written the rows of all runs anew, every second, for as long as both serve."""
    store, summariser = server.store, server.state.summariser
    summariser.stop(PATIENCE_SECONDS)
    server.filled(steps=[10])
    server.get("/metrics")
    summariser.stopping.clear()
    summariser.keep_overviews()
    (kept,) = kept_rows(server, "r1").values()
    assert kept.point is not None
    others = replace_fields(kept.point, made_by="other", step=9)
    store.summaries.put_points({"r1": kept._replace(point=others)})
    assert store.summaries.due_points(10) == {}
    assert "collage_edq_ratio{" in server.get("/metrics")
    assert server.get("/runs/r1/latest", wire.Latest).step == 10, "what one run is asked for is this release's"
    with store.engine.begin() as connection:
        old = {"is_evaluated": True, "made_by": "other", "made_at": 0.0}
        connection.execute(update(schema.run_summary).values(old))
    summariser.keep_overviews()
    assert kept_rows(server, "r1") == {"r1": kept}, "an upgrade makes them anew"


@pytest.mark.slow
def test_newest_steps_are_written_while_evaluations_rest(server):
    """One thread does both; an evaluation that nobody waits for makes it rest for a multiple of its time."""
    server.state.summariser.stop(PATIENCE_SECONDS)
    server.filled(steps=[10])
    both = Summariser(server.store, interval_seconds=0.01, share_of_time=1e-5)
    both.do_due_work()
    server.reports([report(1, 20)])
    both.start()
    until(lambda: server.get("/runs/r1/overview", wire.Overview).last_step == 20, "the evaluation that it rests of")
    server.reports([report(2, 30)])
    until(lambda: kept_rows(server, "r1")["r1"].point.step == 30, "the newest step")
    assert server.get("/runs/r1/overview", wire.Overview).last_step == 20
    both.stop(PATIENCE_SECONDS)


def with_ranks(server, run_id, layers, counts, replicas=None, log=False):
    """A run whose ranks report so many steps each, of these layers; `log`: and a logged value after them."""
    server.run(run_id)
    server.attempt(run_id)
    for rank, (names, count) in enumerate(zip(layers, counts, strict=True)):
        replica = 0 if replicas is None else replicas[rank]
        stream_id, given = f"{run_id}-{rank}", [layer(name, replica) for name in names]
        place = {"rank": rank, "world_size": len(layers), "replica": replica}
        server.stream(run_id, stream_id=stream_id, layers=given, **place)
        steps = range(10, 10 * count + 10, 10)
        blocks = [block(step, rank, len(names)) for step in steps]
        reports = [report(i, step, values=blocks[i], rank=rank) for i, step in enumerate(steps)]
        server.reports([*reports, *([report(99, steps[-1] + 5, measured=False)] if log else [])], stream_id)


def statements_of(server):
    """How many statements a page takes, and the rows behind it; after `stop_threads`."""
    with statements_on(server.store.engine) as asked:
        server.get("/metrics")
    assert asked
    return len(asked)


@pytest.mark.slow
def test_many_runs_take_as_many_statements_as_one_and_those_that_log_alone_none(server):
    """A page of a thousand runs took twenty statements for each of them.

    Nothing is read but its record of a run that measures nothing.
    """
    server.stop_threads()
    server.run("empty")
    alone = statements_of(server)
    server.filled("logs", "s-logs", steps=[])
    server.reports([report(i, i, measured=False, scalars={"loss": 1.0}) for i in range(50)], "s-logs")
    assert statements_of(server) <= alone
    kept = kept_rows(server, "empty", "logs")
    assert [(run_id, row.point) for run_id, row in sorted(kept.items())] == [("empty", None), ("logs", None)]
    server.filled("r0", "s0")
    alone = statements_of(server)
    for i in range(1, 20):
        server.filled(f"r{i}", f"s{i}", steps=[10 * i])
    assert statements_of(server) == alone


def of_runs(server, *asked):
    """The samples that alerts are given about runs."""
    return [sample for sample in samples(server.state, *asked) if "run_id" in dict(sample.labels)]


def runs_of(found):
    return {dict(sample.labels)["run_id"] for sample in found}


def test_a_round_of_alerts_reads_what_it_asks_for_and_no_whole_record_of_a_run(server, monkeypatch):
    """Configurations, tags and what was watched are not shown: reading them was two thirds of a round.

    A run that says nothing costs a round its row alone.
    """
    server.filled("r1", "s1")
    server.run("empty")
    page, everything = stable(server.get("/metrics")), of_runs(server)
    asked = Evaluation(enabled_alerts()).series
    given = of_runs(server, asked)
    assert given == [sample for sample in everything if sample.name in asked]
    assert (runs_of(given), "empty" in runs_of(everything)) == ({"r1"}, True)
    assert "empty" in runs_of(of_runs(server, ["collage_unmeasured_seconds"]))
    monkeypatch.setattr(run_store, "_records", lambda *_: 1 / 0)
    assert stable(exposition(server.state).decode()) == page
    assert of_runs(server) == everything


@pytest.mark.slow
def test_many_runs_whose_newest_step_is_sealed_take_as_many_statements_as_one(server):
    server.stop_threads()
    sealing = server.store.sealing
    sealing.limits = replace(sealing.limits, part_bytes=1)
    counts = []
    for more in (range(1), range(1, 12)):
        for i in more:
            with_ranks(server, f"r{i}", [LAYERS] * 2, [64] * 2)
            assert sealing.seal(f"r{i}", server.clock())
            assert not server.store.journal.bytes_of(f"r{i}")
        counts.append(statements_of(server))
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_many_runs_are_all_shown(server, monkeypatch):
    monkeypatch.setattr("collage_server.exposition._PAGE", 2)
    for i in range(5):
        server.filled(f"r{i}", f"s{i}", steps=[10])
    assert shown(server, *(f"r{i}" for i in range(5))) == [True] * 5
