"""An attempt hides older ones at and after its first step; two live processes on one rank are never merged.

And what a run's streams tell: gaps, lag and clock skew of each.
"""

import json

import pytest

from collage_monitor import wire
from tests.server.conftest import NOW
from tests.server.samples import report


@pytest.mark.slow
def test_a_resume_hides_what_came_after_it_from_its_first_step_on(server):
    server.filled(steps=range(10, 110, 10))
    server.attempt(launch_id="launch-2", first_step=55)
    server.stream(stream_id="s1", launch_id="launch-2")
    assert server.get("/runs/r1/latest", wire.Latest).step == 50
    assert server.series("edq_ratio").steps == [10, 20, 30, 40, 50]
    server.reports([report(i, step, rank=3) for i, step in enumerate((60, 70))], "s1")
    series = server.series("lost")
    assert series.steps == server.series("loss").steps == [10, 20, 30, 40, 50, 60, 70]
    assert series.values == [60.0] * 5 + [240.0] * 2
    run = server.get("/runs/r1", wire.Run)
    assert (run.last_step, run.scalars["loss"].step) == (70, 70)
    assert [attempt.first_step for attempt in run.attempts] == [1, 55]


def logs_only(server, points, attempt=2, first_step=None, first_seq=0):
    """A launch that measures nothing: (step, {name: value}) in the order logged."""
    if first_seq == 0:
        step = min(step for step, _ in points) if first_step is None else first_step
        server.attempt(launch_id=f"launch-{attempt}", first_step=step)
        quiet: dict[str, object] = {"layers": [], "statistics": [], "watch": None}
        server.stream(stream_id=f"s{attempt - 1}", launch_id=f"launch-{attempt}", **quiet)
    numbered = enumerate(points, first_seq)
    sent = [report(seq, step, measured=False, scalars=scalars) for seq, (step, scalars) in numbered]
    server.reports(sent, f"s{attempt - 1}")


def logged(server, name, **query):
    series = server.series(name, points=5000, **query)
    return dict(zip(series.steps, series.values, strict=True))


def steps_logged(server, name):
    """By the curve, and by the export."""
    lines = [json.loads(line) for line in server.get("/runs/r1/export?format=jsonl").splitlines()]
    exported = {line["step"]: line["scalars"][name] for line in lines if name in line.get("scalars", {})}
    assert exported == logged(server, name)
    return exported


def told_of_the_second(server):
    return [event.text for event in server.get("/runs/r1/events", wire.EventPage).events if event.attempt == 2]


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [False, True])
def test_an_attempt_that_measures_nothing_hides_nothing(server, sealed):
    server.filled(steps=range(10, 110, 10))
    logs_only(server, [(step, {"evaluation": 5.0 + step}) for step in range(1, 6)])
    exposed = server.get("/metrics").splitlines()
    assert [line.split()[-1] for line in exposed if line.startswith("collage_step{")] == ["100.0"]
    assert not any(line.startswith("collage_steps_since_resume{") for line in exposed)
    if sealed:
        server.finish()
    assert list(steps_logged(server, "loss")) == list(logged(server, "lost")) == list(range(10, 110, 10))
    assert steps_logged(server, "evaluation") == {step: 5.0 + step for step in range(1, 6)}
    run = server.get("/runs/r1", wire.Run)
    assert (run.last_step, run.scalars["loss"].step, run.scalars["evaluation"].step) == (100, 100, 5)
    assert [(entry.first_step, entry.measured_from) for entry in run.attempts] == [(1, 1), (1, None)]
    assert server.get("/runs/r1/latest", wire.Latest).step == 100
    [compared] = server.compare("r1", metric="loss", points=100)
    assert compared.series.steps == list(range(10, 110, 10))
    assert told_of_the_second(server) == ["attempt 2 began at step 1"]


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [False, True])
def test_what_is_logged_again_hides_its_name_from_there_on(server, sealed):
    server.run()
    first = [(step, {"loss": 1.0, "accuracy": 0.1} if step % 50 == 0 else {"loss": 1.0}) for step in range(1, 201)]
    logs_only(server, first, attempt=1)
    logs_only(server, [(step, {"loss": 2.0}) for step in range(100, 150, 2)])
    if sealed:
        server.finish()
    expected = dict.fromkeys(range(1, 100), 1.0) | dict.fromkeys(range(100, 150, 2), 2.0)
    assert steps_logged(server, "loss") == expected
    assert steps_logged(server, "accuracy") == {50: 0.1, 100: 0.1, 150: 0.1, 200: 0.1}
    late = {step: value for step, value in expected.items() if step > 120}
    assert logged(server, "loss", **{"from": 121}) == late
    assert logged(server, "loss", **{"from": 149}) == {}
    run = server.get("/runs/r1", wire.Run)
    assert (run.scalars["loss"].step, run.scalars["loss"].value) == (148, 2.0)


def test_a_launch_that_logs_before_it_trains_hides_from_its_first_trained_step_on(server):
    server.filled(steps=range(10, 110, 10))
    logs_only(server, [(0, {"parameters": 7.0}), (50, {"validation_loss": 2.0})])
    assert len(logged(server, "lost")) == 10
    server.stream(stream_id="s1", launch_id="launch-2", measured_from=55)
    server.reports([report(2, 60, rank=3)], "s1")
    assert list(logged(server, "lost")) == list(logged(server, "loss")) == [10, 20, 30, 40, 50, 60]
    assert logged(server, "parameters") == {0: 7.0}
    second = server.get("/runs/r1", wire.Run).attempts[1]
    assert (second.first_step, second.measured_from) == (0, 55)
    [text] = told_of_the_second(server)
    assert text.startswith("attempt 2 began at step 0 and measures from step 55 on: ")
    server.stream(stream_id="s2", launch_id="launch-2", rank=1, measured_from=50)
    assert list(logged(server, "lost")) == [10, 20, 30, 40, 60], "the lowest step of all ranks hides"


def test_two_processes_that_log_other_names_into_one_run_hide_nothing_of_each_other(server):
    server.run()
    logs_only(server, [(step, {"loss": 1.0}) for step in range(1, 11)], attempt=1)
    logs_only(server, [(step, {"accuracy": 0.5}) for step in (2, 4)])
    logs_only(server, [(step, {"loss": 1.0}) for step in range(11, 21)], attempt=1, first_seq=10)
    assert list(logged(server, "loss")) == list(range(1, 21))
    assert list(logged(server, "accuracy")) == [2, 4]
    assert server.get("/runs/r1", wire.Run).last_step == 20


def evaluated(server, steps):
    """An evaluator's launch that logs these steps."""
    launch = wire.AttemptCreate(launch_id="launch-e", first_step=min(steps), role="evaluator")
    attempt = server.post("/runs/r1/attempts", launch, wire.Attempt)
    server.post("/runs/r1/streams", wire.StreamCreate(stream_id="e0", launch_id="launch-e"), wire.Stream)
    told = {"evaluator/accuracy": 0.5}
    server.reports([report(i, step, measured=False, scalars=told) for i, step in enumerate(steps)], "e0")
    return attempt


@pytest.mark.slow
def test_a_second_writers_curve_stands_beside_the_trainings_and_nothing_else_of_the_run_moves(server):
    server.filled()
    before, gauges = server.get("/runs/r1", wire.Run), server.get("/metrics")
    (known,) = server.get("/run-table?run_id=r1", wire.RunTable).rows
    assert evaluated(server, [900, 20]).attempt == -1
    series = server.series("evaluator/accuracy")
    assert (series.steps, series.values) == ([20, 900], [0.5, 0.5])
    after = server.get("/runs/r1", wire.Run)
    assert after.beside == ["evaluator/accuracy"]
    assert after.scalars["evaluator/accuracy"].step == 900
    for name in ("state", "updated_at", "first_step", "last_step", "attempts"):
        assert getattr(after, name) == getattr(before, name), name
    told = [line for line in gauges.splitlines() if line.startswith("collage_") and 'run_id="r1"' in line]
    assert any(line.startswith("collage_step{") for line in told)
    assert [line for line in told if line not in server.get("/metrics")] == []
    (row,) = server.get("/run-table?run_id=r1", wire.RunTable).rows
    assert (row.beside, row.resumed_at) == (["evaluator/accuracy"], [])
    assert row.reports == known.reports + 2, "by which an open page knows that something has come"
    (stream,) = [one for one in server.get("/runs/r1/streams", wire.StreamList).streams if one.attempt < 0]
    assert (stream.reports, stream.last_step) == (2, 900)
    for role in ("trainer", "Evaluator", "a/b", "a" * 25):
        launch = wire.AttemptCreate(launch_id="launch-e", first_step=1, role=role)
        assert server.post("/runs/r1/attempts", launch, status=422).field == "role"


def streams(server):
    return {s.stream_id: s for s in server.get("/runs/r1/streams", wire.StreamList).streams}


def send(server, reports=(), gaps=(), stream_id="s0", status=200):
    given_up = [wire.ReportGap(first_seq=first, last_seq=last, reason="spool full") for first, last in gaps]
    batch = wire.ReportBatch(reports=list(reports), gaps=given_up)
    return server.post(f"/streams/{stream_id}/reports", batch, wire.BatchAnswer, status, encode=wire.encode_batch)


@pytest.fixture
def two(server):
    server.ranks(2)
    return server


def test_missing_until_it_comes_or_is_given_up(two):
    send(two, [report(0, 10), report(5, 60)])
    assert streams(two)["s0"].missing == 4
    send(two, [report(2, 30)])
    assert streams(two)["s0"].missing == 3
    for _ in range(2):
        answer = send(two, gaps=[(1, 1), (3, 4)])
        assert (answer.accepted, answer.duplicates, answer.rejected) == (0, 0, [])
        stream = streams(two)["s0"]
        assert (stream.missing, stream.given_up) == (0, 3)
    send(two, gaps=[(6, 9), (8, 20)])
    assert streams(two)["s0"].given_up == 18
    assert streams(two)["s1"].given_up == 0


def test_reports_given_up_beyond_the_newest_do_not_hide_missing_ones(two):
    send(two, [report(0, 10), report(2, 30)], gaps=[(3, 7)])
    assert (streams(two)["s0"].missing, streams(two)["s0"].given_up) == (1, 5)
    send(two, gaps=[(10, 11)])
    assert streams(two)["s0"].missing == 3
    send(two, gaps=[(0, 3)], stream_id="s1")
    assert (streams(two)["s1"].missing, streams(two)["s1"].given_up) == (0, 4)
    assert send(two, [report(9, 90)], [(5, 4)], status=422).field == "gaps"
    limit = wire.LIMITS["reports_per_batch"]
    assert send(two, gaps=[(i, i) for i in range(limit + 1)], status=413).limit == limit
    assert streams(two)["s0"].reports == 2


def test_the_clock_is_judged_by_the_report_that_arrived_fastest(two):
    send(two, [report(0, 10, time=NOW - 60.0)])
    assert streams(two)["s0"].clock_skew_seconds == -60.0
    send(two, [report(1, 20, time=NOW + 3.0), report(2, 30, time=NOW - 5.0)])
    assert streams(two)["s0"].clock_skew_seconds == 3.0
    two.clock.now += 100.0
    send(two, [report(3, 40, time=NOW + 50.0)])
    assert streams(two)["s0"].clock_skew_seconds == 3.0


def test_who_lags_and_a_clock_an_hour_ahead_shows_as_skew_and_moves_nothing_else(two):
    two.clock.now = NOW + 100
    send(two, [report(0, 100, time=NOW + 99.0), report(1, 20, time=NOW + 99.5)])
    two.clock.now += 30
    send(two, [report(0, 40, rank=1, time=NOW + 3729.0)], stream_id="s1")
    found = [streams(two)[name] for name in ("s0", "s1")]
    assert [stream.clock_skew_seconds for stream in found] == [-0.5, 3599.0]
    assert [(stream.lag_steps, stream.last_report_at) for stream in found] == [(0, NOW + 100), (60, NOW + 130)]
    two.clock.now = NOW + 800
    assert two.get("/runs/r1", wire.Run).state == "stale", "by the server's clock"


@pytest.mark.slow
def test_more_separate_gaps_than_can_be_kept_are_missing_and_refuse_no_report(two):
    for start in range(0, 20_000, 10_000):
        send(two, gaps=[(i, i) for i in range(start, start + 10_000, 2)])
    assert streams(two)["s0"].given_up == 10_000
    assert send(two, [report(30_002, 10)], gaps=[(30_000, 30_001)]).accepted == 1
    found = streams(two)["s0"]
    assert (found.given_up, found.missing) == (10_000, 20_002)
    send(two, gaps=[(0, 20_000)])
    assert streams(two)["s0"].given_up == 20_001
