"""An attempt hides older ones at and after its first step; two live processes on one rank are never merged."""

from __future__ import annotations

import json

import pytest

from collage_monitor import wire
from tests.server.samples import report


def resumed(server, first_step, steps):
    server.filled(steps=())
    server.reports([report(i, step) for i, step in enumerate(range(10, 110, 10))])
    server.attempt(launch_id="launch-2", first_step=first_step)
    server.stream(stream_id="s1", launch_id="launch-2")
    server.reports([report(i, step, rank=3) for i, step in enumerate(steps)], "s1")


@pytest.mark.slow
def test_a_resume_hides_what_came_after_it(server):
    resumed(server, 55, [60, 70])
    series = server.series("lost")
    assert series.steps == [10, 20, 30, 40, 50, 60, 70]
    assert series.values == [60.0] * 5 + [240.0] * 2
    assert server.series("loss").steps == series.steps
    run = server.get("/runs/r1", wire.Run)
    assert run.last_step == 70
    assert run.scalars["loss"].step == 70
    assert [attempt.first_step for attempt in run.attempts] == [1, 55]


def test_before_its_first_report_the_newest_visible_step_is_the_latest(server):
    resumed(server, 55, [])
    assert server.get("/runs/r1/latest", wire.Latest).step == 50
    assert server.series("edq_ratio").steps == [10, 20, 30, 40, 50]


def logs_only(server, points, attempt=2, first_step=None, first_seq=0):
    """A launch that measures nothing: (step, {name: value}) in the order logged."""
    if first_seq == 0:
        step = min(step for step, _ in points) if first_step is None else first_step
        server.attempt(launch_id=f"launch-{attempt}", first_step=step)
        quiet: dict[str, object] = {"layers": [], "statistics": [], "watch": None}
        server.stream(stream_id=f"s{attempt - 1}", launch_id=f"launch-{attempt}", **quiet)
    sent = [
        report(seq, step, measured=False, scalars=scalars) for seq, (step, scalars) in enumerate(points, first_seq)
    ]
    server.reports(sent, f"s{attempt - 1}")


def logged(server, name, **query):
    series = server.series(name, points=5000, **query)
    return dict(zip(series.steps, series.values, strict=True))


def seal_all(server):
    server.send("PATCH", "/runs/r1", wire.RunUpdate(state="finished"), wire.Run)
    server.seal()


@pytest.mark.parametrize("sealed", [False, True])
def test_an_attempt_that_measures_nothing_hides_nothing(server, sealed):
    server.filled(steps=range(10, 110, 10))
    logs_only(server, [(step, {"evaluation": 5.0 + step}) for step in range(1, 6)])
    exposed = server.get("/metrics").splitlines()
    assert [line.split()[-1] for line in exposed if line.startswith("collage_step{")] == ["100.0"]
    assert not any(line.startswith("collage_steps_since_resume{") for line in exposed)
    if sealed:
        seal_all(server)
    assert list(logged(server, "loss")) == list(logged(server, "lost")) == list(range(10, 110, 10))
    assert logged(server, "evaluation") == {step: 5.0 + step for step in range(1, 6)}
    run = server.get("/runs/r1", wire.Run)
    assert (run.last_step, run.scalars["loss"].step, run.scalars["evaluation"].step) == (100, 100, 5)
    assert [(entry.first_step, entry.measured_from) for entry in run.attempts] == [(1, 1), (1, None)]
    assert server.get("/runs/r1/latest", wire.Latest).step == 100
    lines = [json.loads(line) for line in server.get("/runs/r1/export?format=jsonl").splitlines()]
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 4, 5, *range(10, 110, 10)]
    compared = server.get("/compare?run=r1&metric=loss&points=100", wire.Comparison).runs[0]
    assert compared.series.steps == list(range(10, 110, 10))
    text = [event.text for event in server.get("/runs/r1/events", wire.EventPage).events if event.attempt == 2]
    assert text == ["attempt 2 began at step 1"]


@pytest.mark.parametrize("sealed", [False, True])
def test_what_is_logged_again_hides_its_name_from_there_on(server, sealed):
    server.run()
    first = [(step, {"loss": 1.0, "accuracy": 0.1} if step % 50 == 0 else {"loss": 1.0}) for step in range(1, 201)]
    logs_only(server, first, attempt=1)
    logs_only(server, [(step, {"loss": 2.0}) for step in range(100, 150, 2)])
    if sealed:
        seal_all(server)
    expected = dict.fromkeys(range(1, 100), 1.0) | dict.fromkeys(range(100, 150, 2), 2.0)
    assert logged(server, "loss") == expected
    assert logged(server, "accuracy") == {50: 0.1, 100: 0.1, 150: 0.1, 200: 0.1}
    late = {step: value for step, value in expected.items() if step > 120}
    assert logged(server, "loss", **{"from": 121}) == late
    assert logged(server, "loss", **{"from": 149}) == {}
    run = server.get("/runs/r1", wire.Run)
    assert (run.scalars["loss"].step, run.scalars["loss"].value) == (148, 2.0)
    lines = [json.loads(line) for line in server.get("/runs/r1/export?format=jsonl").splitlines()]
    told = {line["step"]: line["scalars"]["loss"] for line in lines if "loss" in line.get("scalars", {})}
    assert told == expected


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
    text = [event.text for event in server.get("/runs/r1/events", wire.EventPage).events if event.attempt == 2]
    assert text == [
        "attempt 2 began at step 0 and measures from step 55 on: older attempts' points from there on are hidden"
    ]


def test_the_lowest_step_of_all_ranks_hides(server):
    server.filled(steps=range(10, 110, 10))
    server.attempt(launch_id="launch-2", first_step=40)
    server.stream(stream_id="s1", launch_id="launch-2", measured_from=60)
    server.stream(stream_id="s2", launch_id="launch-2", rank=1, measured_from=50)
    assert list(logged(server, "lost")) == [10, 20, 30, 40]


def test_two_processes_that_log_other_names_into_one_run_hide_nothing_of_each_other(server):
    server.run()
    logs_only(server, [(step, {"loss": 1.0}) for step in range(1, 11)], attempt=1)
    logs_only(server, [(step, {"accuracy": 0.5}) for step in (2, 4)])
    logs_only(server, [(step, {"loss": 1.0}) for step in range(11, 21)], attempt=1, first_seq=10)
    assert list(logged(server, "loss")) == list(range(1, 21))
    assert list(logged(server, "accuracy")) == [2, 4]
    assert server.get("/runs/r1", wire.Run).last_step == 20


def evaluated(server, steps, role="evaluator"):
    """An evaluator's launch that logs these steps."""
    launch = wire.AttemptCreate(launch_id="launch-e", first_step=min(steps), role=role)
    attempt = server.post("/runs/r1/attempts", launch, wire.Attempt)
    stream = wire.StreamCreate(stream_id="e0", launch_id="launch-e")
    server.post("/runs/r1/streams", stream, wire.Stream)
    server.reports(
        [
            wire.Report(seq=i, step=step, time=1.0, scalars={f"{role}/accuracy": 0.5})
            for i, step in enumerate(steps)
        ],
        "e0",
    )
    return attempt


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


@pytest.mark.parametrize("role", ["trainer", "Evaluator", "a/b", "a" * 25])
def test_a_role_is_a_short_word_and_not_the_trainings(server, role):
    server.filled()
    launch = wire.AttemptCreate(launch_id="launch-e", first_step=1, role=role)
    assert server.post("/runs/r1/attempts", launch, status=422).field == "role"
