"""The accountant: who holds how much, who waits for whom, what is refused, and what the settings make of it."""

import logging
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from collage_server import memory_budget
from collage_server.app import create_app
from collage_server.errors import Busy, NeedsTooMuch
from collage_server.memory_budget import (
    MemoryBudget,
    available_memory,
    begin_stream,
    held_rows,
    hold,
    released_afterwards,
    reserve,
)
from collage_server.settings import FixedLimits, Settings
from collage_server.store import NewEvent
from collage_server.store.runs import incidents
from collage_server.summariser import _warn_of_a_cut, evaluate, evaluate_what_fits

from collage_monitor import wire
from tests.server.conftest import NOW, Clock, running
from tests.server.migrated import put_migrated
from tests.server.samples import report, report_of_totals
from tests.waiting import until

MIB = 2**20


@pytest.fixture
def budget(monkeypatch):
    """Nobody is patient."""
    for name in ("answers", "evaluations", "sealing"):
        monkeypatch.setitem(memory_budget._PATIENCE_SECONDS, name, 0.0)
    return MemoryBudget(512 * MIB, 128 * MIB)


def test_what_a_lease_holds_is_given_back_at_its_end_even_after_an_error(budget):
    hold(10**12)
    assert list(held_rows((row, 10**12) for row in range(3))) == [0, 1, 2]
    assert sum(budget.held.values()) == 0, "without a lease nobody is charged"
    with suppress(ZeroDivisionError), budget.lease("answers"):
        hold(10 * MIB)
        with released_afterwards():
            hold(20 * MIB)
            assert budget.held["answers"] == 30 * MIB
        assert budget.held["answers"] == 10 * MIB
        raise ZeroDivisionError
    assert budget.held["answers"] == 0


def test_rows_are_charged_before_they_come_and_what_could_never_fit_is_refused_at_once(budget):
    with budget.lease("answers") as lease:
        rows = held_rows((row, MIB // 4) for row in range(9))
        next(rows)
        assert lease.held >= MIB
        assert len(list(rows)) == 8
        assert 9 * MIB // 4 <= lease.held <= 4 * MIB
    with budget.lease("answers"), pytest.raises(NeedsTooMuch) as refused:
        hold(129 * MIB)
    assert (refused.value.status, refused.value.limit) == (422, 128 * MIB)


def test_what_does_not_fit_beside_others_waits_for_them_and_then_for_another_time(budget, monkeypatch):
    monkeypatch.setitem(memory_budget._PATIENCE_SECONDS, "evaluations", 30.0)
    began = threading.Event()
    found = []

    def evaluation():
        with budget.lease("evaluations"):
            began.set()
            hold(180 * MIB)
            found.append(budget.held["evaluations"])

    with budget.lease("answers"):
        hold(100 * MIB)
        thread = threading.Thread(target=evaluation)
        thread.start()
        began.wait(10.0)
        assert not found
    thread.join(10.0)
    assert found == [180 * MIB]
    with budget.lease("evaluations"):
        hold(192 * MIB)
        with budget.lease("answers"), pytest.raises(Busy) as refused:
            hold(65 * MIB)
    assert (refused.value.status, refused.value.retry_after_seconds) == (503, 2)


def test_where_the_process_has_grown_to_its_limit_all_but_one_wait(budget, monkeypatch):
    """Four exports of 20,000 layers took 712 MiB of 512: the heap kept what was no longer used."""
    grown, trimmed = [100 * MIB], []
    monkeypatch.setattr(memory_budget, "private_bytes", lambda: grown[0])
    monkeypatch.setattr(memory_budget, "trim_heap", lambda: trimmed.append(True))
    budget = MemoryBudget(512 * MIB, 128 * MIB)
    grown[0] = 500 * MIB
    with budget.lease("answers") as one, budget.lease("answers") as other:
        one.hold(20 * MIB)
        assert not trimmed
        with pytest.raises(Busy):
            other.hold(20 * MIB)
        assert trimmed
        other.hold(MIB // 2)
        grown[0] = 400 * MIB
        other.hold(20 * MIB)
    assert budget.held["answers"] == 0


def test_memory_that_was_there_before_the_server_is_not_its_own(monkeypatch):
    monkeypatch.setattr(memory_budget, "private_bytes", lambda: 2000 * MIB)
    budget = MemoryBudget(512 * MIB, 128 * MIB)
    with budget.lease("answers") as one, budget.lease("answers") as other:
        one.hold(20 * MIB)
        other.hold(20 * MIB)


def test_what_is_reserved_waits_for_nobody(budget):
    with budget.lease("answers") as stream:
        hold(10 * MIB)
        reserve(60 * MIB)
        with budget.lease("evaluations"):
            hold(192 * MIB)
            stream.hold(50 * MIB)
            stream.release(10 * MIB)
            stream.hold(50 * MIB)
            assert budget.held == {"answers": 60 * MIB, "evaluations": 192 * MIB}
            with pytest.raises(Busy):
                stream.hold(5 * MIB)
        stream.hold(MIB)
        assert budget.held["answers"] == 61 * MIB
        stream.release(0)
        assert budget.held["answers"] == 60 * MIB
    assert not +budget.held


def test_of_two_streams_that_take_much_the_second_waits_and_questions_do_not(budget):
    with budget.lease("answers") as stream:
        reserve(100 * MIB)
        assert budget.held["answers"] == 64 * MIB, "half of the share"
        with budget.lease("answers"):
            with pytest.raises(Busy):
                reserve(100 * MIB)
            hold(40 * MIB)
        stream.hold(100 * MIB)
        assert budget.held["answers"] == 100 * MIB
    assert not +budget.held


def test_what_a_stream_needs_beyond_its_reserved_half_no_other_stream_may_reserve(budget):
    """A large export waited for small ones until its patience ended, and broke off in the middle of its file."""
    with budget.lease("answers") as large:
        reserve(100 * MIB)
        for _ in range(2):
            with budget.lease("answers"), pytest.raises(Busy):
                reserve(40 * MIB)
        with budget.lease("answers"):
            reserve(28 * MIB)
            large.hold(100 * MIB)
    with budget.lease("answers"):
        reserve(128 * MIB)
    assert not +budget.held


def test_a_stream_is_patient_only_from_its_reservation_on(budget):
    """Exports that found out at once what there is held a part each, and waited for each other, half a minute."""
    with budget.lease("answers") as one, budget.lease("answers") as other:
        begin_stream()
        other.hold(60 * MIB)
        one.hold(60 * MIB)
        with pytest.raises(Busy):
            other.hold(60 * MIB)
        one.end()
        other.hold(2**40)
        assert budget.held["answers"] == 128 * MIB, "a stream takes piece after piece, however large it is"
        other.release(0)
        reserve(60 * MIB)
        release = threading.Timer(0.0, one.end)
        one.hold(60 * MIB)
        release.start()
        other.hold(128 * MIB)
    assert not +budget.held


def test_sealing_goes_on_whatever_it_needs(budget):
    with budget.lease("answers"):
        hold(128 * MIB)
        with budget.lease("sealing") as lease:
            hold(10**12)
            hold(1)
            assert lease.held == 128 * MIB


def test_the_setting_is_a_size_and_by_default_half_of_what_there_is_within_bounds(tmp_path):
    there = available_memory()
    assert there is not None
    half = min(max(there // 2, 512 * MIB), 4096 * MIB)
    sizes: list[tuple[dict[str, Any], int]] = [({"memory": "512M"}, 512 * MIB), ({"memory": "1G"}, 2**30)]
    for stated, limit in [*sizes, ({"memory": str(300 * MIB)}, 300 * MIB), ({}, half)]:
        app = create_app(Settings(folder=tmp_path, no_auth=True, **stated))
        assert app.state.collage.memory.limit_bytes == limit, stated


@pytest.fixture
def small(tmp_path):
    """A server with the least memory, and a run."""
    put_migrated(tmp_path)
    least = Settings(folder=tmp_path, no_auth=True, memory="256M")
    with running(least, Clock(), limits=FixedLimits(seal_interval_seconds=1e6)) as server:
        server.run()
        server.attempt()
        yield server


def declare(server, layers, *statistics, status=200, run_id="r1", stream_id="s0"):
    named = [wire.Layer(name=f"l{i}", shape=[1], dtype="bfloat16", elements=1) for i in range(layers)]
    create = wire.StreamCreate(stream_id=stream_id, launch_id="launch-1", layers=named, statistics=list(statistics))
    return server.post(f"/runs/{run_id}/streams", create, wire.Stream, status)


@pytest.mark.slow
def test_layers_and_heatmaps_beyond_the_budget_are_refused_and_smaller_ones_are_not(small):
    most = small.store.streams.most_numbers
    states = [f"state_decrement_observed_sum/s{i}" for i in range(most // 1000)]
    declare(small, 1000, *states)
    error = declare(small, 1001, *states, "elements", status=422)
    assert (error.field, error.limit, "--memory" in error.message) == ("layers", most, True)
    small.run("r2")
    small.attempt("r2")
    declare(small, 3000, "measured_steps", "intended_squared_sum", run_id="r2", stream_id="s2")
    error = small.get("/runs/r2/heatmap?metric=intended_norm&points=1000", status=422)
    assert error.code == "needs_too_much"
    assert small.get("/runs/r2/heatmap?metric=intended_norm&points=20", wire.Heatmap).values is not None
    assert small.state.memory.held["answers"] == 0


@pytest.mark.slow
def test_an_evaluation_that_does_not_fit_is_cut_to_the_newest_part_and_says_so(server, caplog):
    """4,000 reports take 24 MiB; there are 9."""
    _warn_of_a_cut.cache_clear()
    server.stop_threads()
    server.filled(steps=())
    for first in range(0, 4000, 2000):
        server.reports([report(seq, seq + 1) for seq in range(first, first + 2000)])
    store, memory_budget = server.store, server.state.memory
    with store.points.snapshot() as snapshot:
        whole = evaluate(snapshot, snapshot.records(["r1"])["r1"])
    memory_budget.working_bytes = 12 * MIB
    with memory_budget.lease("evaluations"), store.points.snapshot() as snapshot:
        found, begin = evaluate_what_fits(snapshot, snapshot.records(["r1"])["r1"])
    assert begin is not None
    assert 2000 < begin < 4000
    assert whole.last_step == found.last_step == 4000
    assert memory_budget.held["evaluations"] == 0
    caplog.set_level(logging.WARNING, "collage_server.summariser")
    server.state.summariser.start()
    until(lambda: "does not fit into --memory" in caplog.text, "a line that says so")
    until(lambda: 'evaluations_cut_total{evaluation="overview"} 1' in server.get("/metrics"), "the counter")
    server.reports([report(4000, 4001)])
    until(lambda: 'evaluations_cut_total{evaluation="overview"} 2' in server.get("/metrics"), "another cut")
    assert caplog.text.count("does not fit into --memory") == 1, "once an hour a run"
    shown = [line for line in server.get("/metrics").splitlines() if line.startswith("collage_server_memory_")]
    owners = {line.split('"')[1] for line in shown if "owner" in line}
    assert owners == {"process", "bodies", "caches", "answers", "evaluations", "sealing"}


@pytest.mark.slow
def test_events_that_could_never_fit_at_once_are_refused_and_exported_some_at_a_time(small):
    """A list of 10,000 notes as long as they may be took 400 MiB, and an export all of a run's: it was nobody's."""
    note = "\N{CHART WITH DOWNWARDS TREND}" * 2000
    some = [NewEvent(origin=f"note/{number}", kind="note", text=note) for number in range(1500)]
    small.store.events.add("r1", some, NOW)
    assert small.get("/runs/r1/events?limit=10000", status=422).code == "needs_too_much"
    assert len(small.get("/runs/r1/events?limit=100", wire.EventPage).events) == 100
    lines = small.client.get("/api/v1/runs/r1/export").text.splitlines()
    assert sum('"kind":"event"' in line for line in lines) == 1 + 1500
    assert lines[-1] == '{"kind":"end","steps":0}'


@pytest.mark.slow
def test_an_export_that_does_not_fit_is_refused_before_it_begins(small, monkeypatch):
    """It broke off in the middle, which a reader takes for a server that died."""
    monkeypatch.setattr("collage_server.memory_budget._PATIENCE_OF_STREAMS", 0.05)
    names = [f"state_decrement_observed_sum/s{i}" for i in range(19)]
    declare(small, 1000, "measured_steps", *names)
    small.reports([report_of_totals(seq, seq + 1, np.ones((20, 1000))) for seq in range(20)])
    memory_budget = small.state.memory
    with memory_budget.lease("evaluations"):
        hold(48 * MIB)
        with memory_budget.lease("sealing"):
            hold(10 * MIB)
            answer = small.client.get("/api/v1/runs/r1/export?format=csv")
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
    assert small.client.get("/api/v1/runs/r1/export?format=csv").text.count("\n") == 1 + 20 * 1001
    until(lambda: not +memory_budget.held)  # An evaluation may be at work beside.


def test_an_incident_holds_few_labels_and_short_ones_and_few_silences_hold_at_a_time(server, monkeypatch):
    """One alert could bring 16 MiB of them, and a list has a thousand incidents."""
    server.run()
    for labels, status in (({f"label {number}": "" for number in range(63)}, 422), ({"instance": "x" * 4000}, 200)):
        alert = wire.AlertmanagerAlert(status="firing", labels={"alertname": "Own", "run_id": "r1", **labels})
        server.post("/alerts/alertmanager", wire.AlertmanagerMessage(alerts=[alert]), status=status)
    (found,) = server.get("/events", wire.IncidentPage).events
    assert found.labels == {"alertname": "Own", "run_id": "r1", "instance": "x" * 512}
    monkeypatch.setattr(incidents, "_MOST_SILENCES", 2)
    body = {"seconds": 60.0, "project": "p"}
    statuses = [server.client.post("/api/v1/silences", json=body).status_code for _ in range(3)]
    assert statuses == [201, 201, 422]
