"""What every backend must tell of a run: launches, gaps, counts that grow, and nothing twice."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from collage_server.errors import Gone, NotFound
from collage_server.store import NewEvent, ReportGroup
from collage_server.store.runs.events import add_events

from collage_monitor import wire
from tests.server.samples import report, stream_create
from tests.server.store.contract import NOW, StoreContract
from tests.waiting import at_once


def told(store, run_id="r1", after=0):
    return [(event.event, event.kind, event.step) for event in store.events.read(run_id, after, 1000).events]


def counts(seq, step, **scalars):
    return report(seq, step, measured=False, scalars=scalars)


class EventsContract:
    """Subclasses give the fixture `store` (open, empty)."""

    def test_launches_are_told_once_and_keep_their_lowest_step(self, store):
        StoreContract.fill(store)
        for launch, step in (("launch-2", 60), ("launch-1", 1), ("launch-2", 50), ("launch-2", 70)):
            store.streams.create_attempt("r1", wire.AttemptCreate(launch_id=launch, first_step=step), NOW + 5)
        assert told(store) == [(1, "attempt", 1), (2, "attempt", 50)]
        first, second = store.events.read("r1", 0, 10).events
        assert (first.time, second.time, second.attempt) == (NOW, NOW + 5, 2)
        assert second.text == "attempt 2 began at step 50"
        for stream, begin in (("s1", 55), ("s2", None)):
            create = stream_create(stream, "launch-2", measured_from=begin)
            store.streams.create_stream("r1", create, NOW + 6)
            text = store.events.read("r1", 0, 10).events[1].text
            measures = "" if begin is None else f" and measures from step {begin} on"
            assert text == f"attempt 2 began at step 50{measures}: older attempts' points from there on are hidden"

    def test_a_second_process_on_a_rank_is_told(self, store):
        StoreContract.fill(store)
        store.streams.create_stream("r1", stream_create("s0"), NOW)
        store.streams.create_stream("r1", stream_create("other", rank=1), NOW)
        assert len(told(store)) == 1
        store.streams.create_stream("r1", stream_create("s9", process_id=77), NOW)
        assert told(store)[1:] == [(2, "rank_twice", None)]
        assert "process 77 " in store.events.read("r1", 1, 10).events[0].text

    def test_a_conversion_is_told_once_a_run(self, store):
        StoreContract.fill(store)
        watch = wire.WatchInfo(optimizer="A", conversion=wire.Conversion(source="plain", target="light", step=50))
        for stream, rank in (("s7", 2), ("s8", 3), ("s7", 2)):
            create = msgspec.structs.replace(stream_create(stream, rank=rank), watch=watch)
            store.streams.create_stream("r1", create, NOW)
        assert told(store)[1:] == [(2, "conversion", 50)]
        text = "weights were converted from plain to light after step 50, where their residuals began empty"
        assert store.events.read("r1", 1, 10).events[0].text == text

    def test_a_broken_expectation_is_told_once_a_launch(self, store):
        StoreContract.fill(store)
        breach = wire.Breach(expectation="weights", text="expected weights in float32, kept are bfloat16", step=11)
        watch = wire.WatchInfo(optimizer="A", expected="weights=float32", broken=[breach])
        for stream, rank in (("s7", 2), ("s8", 3), ("s7", 2)):
            create = msgspec.structs.replace(stream_create(stream, rank=rank), watch=watch)
            store.streams.create_stream("r1", create, NOW)
        assert told(store)[1:] == [(2, "expectation", 11)]
        assert store.events.read("r1", 1, 10).events[0].text == breach.text

    def test_a_launch_that_keeps_otherwise_than_the_one_before_is_told(self, store):
        StoreContract.fill(store)

        def launched(attempt, stream, **states):
            seen = wire.Fingerprint(parameters={"float32": 9}, states=states)
            watch = wire.WatchInfo(optimizer="A", observed_strategy="plain", fingerprint=seen)
            store.streams.create_attempt(
                "r1", wire.AttemptCreate(launch_id=f"kept-{attempt}", first_step=attempt), NOW
            )
            create = msgspec.structs.replace(
                stream_create(stream, rank=4), watch=watch, launch_id=f"kept-{attempt}"
            )
            store.streams.create_stream("r1", create, NOW)

        launched(2, "k2", exp_avg="bfloat16", exp_avg_sq="bfloat16")
        launched(3, "k3", exp_avg="float32", exp_avg_sq="float32")
        launched(4, "k4", exp_avg="float32", exp_avg_sq="float32")
        told_of = [event for event in store.events.read("r1", 1, 20).events if event.kind == "kept_otherwise"]
        assert [(event.attempt, event.text.partition(": ")[2]) for event in told_of] == [
            (3, "exp_avg bfloat16 → float32; exp_avg_sq bfloat16 → float32")
        ]

    def test_gaps_are_told_when_they_are_new(self, store):
        stream = StoreContract.fill(store)
        full = [wire.ReportGap(first_seq=1, last_seq=2, reason="spool full")]
        store.journal.record_gaps(stream, full, NOW)
        store.journal.record_gaps(stream, full, NOW)
        store.journal.record_gaps(stream, [wire.ReportGap(first_seq=2, last_seq=5, reason="spool full")], NOW + 1)
        texts = [event.text for event in store.events.read("r1", 1, 10).events]
        assert texts == [
            "2 reports of rank 0 will never come (spool full)",
            "3 reports of rank 0 will never come (spool full)",
        ]

    def test_counts_are_told_at_powers_of_two(self, store):
        stream = StoreContract.fill(store)
        values = [0.0, 1.0, 1.0, 2.0, 3.0, 9.0, float("nan"), 10.0, 20.0]
        for i, value in enumerate(values):
            store.journal.append([ReportGroup(stream, [counts(i, 10 * i, skipped_steps=value, loss=3.0)])], NOW)
        store.journal.append([ReportGroup(stream, [counts(99, 5, skipped_steps=1e6)])], NOW)
        found = [(event.step, event.text.split(" has ")[1]) for event in store.events.read("r1", 1, 10).events]
        assert found == [
            (10, "skipped 1 step since attach"),
            (30, "skipped 2 steps since attach"),
            (50, "skipped 9 steps since attach"),
            (80, "skipped 20 steps since attach"),
        ]
        store.journal.append([ReportGroup(stream, [counts(100, 1000, reports_dropped=3.0)])], NOW)
        assert told(store)[-1] == (6, "reports_dropped", 1000)

    def test_a_batch_writes_events_in_the_order_of_runs(self, store, monkeypatch):
        """Two servers that write events of the same runs would else wait for each other for ever."""
        streams = [StoreContract.fill(store, run, f"{run}-s") for run in ("b", "a")]
        told_of = []

        def recorded(connection, run_id, *rest):
            told_of.append(run_id)
            return add_events(connection, run_id, *rest)

        monkeypatch.setattr("collage_server.store.journal.report_journal.add_events", recorded)
        for i, ordered in enumerate((streams, streams[::-1])):
            groups = [ReportGroup(stream, [counts(i, i + 1, skipped_steps=2.0**i)]) for stream in ordered]
            store.journal.append(groups, NOW)
        assert told_of == ["a", "b"] * 2

    def test_the_same_origin_is_told_once_and_the_cursor_goes_on(self, store):
        StoreContract.fill(store)
        events = [NewEvent(origin=f"alert/{i}", kind="alert", text="t", layers=["a"] * 20) for i in (1, 2, 1)]
        assert store.events.add("r1", events, NOW) == 2
        assert store.events.add("r1", events, NOW) == 0
        assert [event.event for event in store.events.read("r1", 1, 1).events] == [2]
        assert [event.event for event in store.events.read("r1", 2, 10).events] == [3]
        assert len(store.events.read("r1", 2, 10).events[0].layers) == 8

    def test_events_go_with_their_run(self, store):
        StoreContract.fill(store)
        with pytest.raises(NotFound):
            store.events.add("zz", [], NOW)
        store.runs.delete("r1", NOW)
        with pytest.raises(Gone):
            store.events.read("r1", 0, 10)
        with pytest.raises(Gone):
            store.events.add("r1", [NewEvent(origin="o", kind="alert", text="t")], NOW)

    def test_many_at_once_are_all_told_in_one_order(self, store):
        StoreContract.fill(store)

        def tell(number):
            for i in range(10):
                store.events.add("r1", [NewEvent(origin=f"{number}/{i}", kind="alert", text="t")], NOW)

        at_once(*[partial(tell, number) for number in range(4)])
        assert [event for event, _, _ in told(store)] == list(range(1, 42))
