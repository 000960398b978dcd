"""What every backend must tell of a run: launches, gaps, counts that grow, and nothing twice."""

from functools import partial
from unittest import mock

import pytest
from collage_server.store import NewEvent, ReportGroup
from collage_server.store.journal import report_journal
from collage_server.store.runs.events import add_events

from collage_monitor import wire
from tests.server.samples import report
from tests.server.store.sending import append, fill, launch, register
from tests.server.store.stores import NOW
from tests.waiting import at_once

CONVERSION = wire.Conversion(source="plain", target="light", step=11)
BREACH = wire.Breach(expectation="weights", text="expected weights in float32, kept are bfloat16", step=11)


def told(store, run_id="r1", after=0):
    return [(event.event, event.kind, event.step) for event in store.events.read(run_id, after, 1000).events]


def counts(seq, step, **scalars):
    return report(seq, step, measured=False, scalars=scalars)


class EventsContract:
    """Subclasses give the fixture `store` (open, empty)."""

    def test_launches_are_told_once_and_keep_their_lowest_step(self, store):
        fill(store)
        for number, step in ((2, 60), (1, 1), (2, 50), (2, 70)):
            launch(store, number, step, now=NOW + 5)
        assert told(store) == [(1, "attempt", 1), (2, "attempt", 50)]
        first, second = store.events.read("r1", 0, 10).events
        assert (first.time, second.time, second.attempt) == (NOW, NOW + 5, 2)
        assert second.text == "attempt 2 began at step 50"
        for stream, begin in (("s1", 55), ("s2", None)):
            register(store, stream, launch_id="launch-2", measured_from=begin)
            text = store.events.read("r1", 0, 10).events[1].text
            measures = "" if begin is None else f" and measures from step {begin} on"
            assert text == f"attempt 2 began at step 50{measures}: older attempts' points from there on are hidden"

    def test_a_second_process_on_a_rank_is_told(self, store):
        fill(store)
        register(store, "s0")
        register(store, "other", rank=1)
        assert len(told(store)) == 1
        register(store, "s9", process_id=77)
        assert told(store)[1:] == [(2, "rank_twice", None)]
        assert "process 77 " in store.events.read("r1", 1, 10).events[0].text

    @pytest.mark.parametrize(
        ("kind", "text", "more"),
        [
            ("conversion", "from plain to light after step 11", {"conversion": CONVERSION}),
            ("expectation", BREACH.text, {"expected": "weights=float32", "broken": [BREACH]}),
        ],
    )
    def test_what_several_ranks_say_is_told_once(self, store, kind, text, more):
        fill(store)
        for stream, rank in (("s7", 2), ("s8", 3), ("s7", 2)):
            register(store, stream, rank=rank, watch=wire.WatchInfo(optimizer="A", **more))
        assert told(store)[1:] == [(2, kind, 11)]
        assert text in store.events.read("r1", 1, 10).events[0].text

    def test_a_launch_that_keeps_otherwise_than_the_one_before_is_told(self, store):
        fill(store)
        for attempt, dtype in ((2, "bfloat16"), (3, "float32"), (4, "float32")):
            states = {"exp_avg": dtype, "exp_avg_sq": dtype}
            seen = wire.Fingerprint(parameters={"float32": 9}, states=states)
            told = wire.WatchInfo(optimizer="A", observed_strategy="plain", fingerprint=seen)
            launch(store, attempt, attempt, f"k{attempt}", rank=4, watch=told)
        [event] = (event for event in store.events.read("r1", 1, 20).events if event.kind == "kept_otherwise")
        assert event.attempt == 3
        assert event.text.endswith(": exp_avg bfloat16 → float32; exp_avg_sq bfloat16 → float32")

    def test_gaps_are_told_when_they_are_new(self, store, stream):
        for first, last in ((1, 2), (1, 2), (2, 5)):
            gap = wire.ReportGap(first_seq=first, last_seq=last, reason="spool full")
            store.journal.record_gaps(stream, [gap], NOW)
        texts = [event.text for event in store.events.read("r1", 1, 10).events]
        assert texts == [f"{count} reports of rank 0 will never come (spool full)" for count in (2, 3)]

    def test_counts_are_told_at_powers_of_two(self, store, stream):
        values = [0.0, 1.0, 1.0, 2.0, 3.0, 9.0, float("nan"), 10.0, 20.0]
        for i, value in enumerate(values):
            append(store, stream, counts(i, 10 * i, skipped_steps=value, loss=3.0))
        append(store, stream, counts(99, 5, skipped_steps=1e6))
        found = [(event.step, event.text.split(" has ")[1]) for event in store.events.read("r1", 1, 10).events]
        counted = ((10, "1 step"), (30, "2 steps"), (50, "9 steps"), (80, "20 steps"))
        assert found == [(step, f"skipped {steps} since attach") for step, steps in counted]
        append(store, stream, counts(100, 1000, reports_dropped=3.0))
        assert told(store)[-1] == (6, "reports_dropped", 1000)

    def test_a_batch_writes_events_in_the_order_of_runs(self, store):
        """Two servers that write events of the same runs would else wait for each other for ever."""
        streams = [fill(store, run, f"{run}-s") for run in ("b", "a")]
        with mock.patch.object(report_journal, "add_events", wraps=add_events) as written:
            for i, ordered in enumerate((streams, streams[::-1])):
                groups = [ReportGroup(stream, [counts(i, i + 1, skipped_steps=2.0**i)]) for stream in ordered]
                store.journal.append(groups, NOW)
        assert [call.args[1] for call in written.call_args_list] == ["a", "b"] * 2

    def test_the_same_origin_is_told_once_and_the_cursor_goes_on(self, store):
        fill(store)
        events = [NewEvent(origin=f"alert/{i}", kind="alert", text="t", layers=["a"] * 20) for i in (1, 2, 1)]
        assert store.events.add("r1", events, NOW) == 2
        assert store.events.add("r1", events, NOW) == 0
        assert [event.event for event in store.events.read("r1", 1, 1).events] == [2]
        assert [event.event for event in store.events.read("r1", 2, 10).events] == [3]
        assert len(store.events.read("r1", 2, 10).events[0].layers) == 8

    def test_many_at_once_are_all_told_in_one_order(self, store):
        fill(store)

        def tell(number):
            for i in range(10):
                store.events.add("r1", [NewEvent(origin=f"{number}/{i}", kind="alert", text="t")], NOW)

        at_once(*[partial(tell, number) for number in range(4)])
        assert [event for event, _, _ in told(store)] == list(range(1, 42))
