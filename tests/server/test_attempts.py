"""An attempt hides older ones at and after its first step; two live processes on one rank are never merged."""

from __future__ import annotations

from collage_monitor import wire
from tests.server.samples import report


def resumed(server, first_step, steps):
    server.run()
    server.attempt()
    server.stream()
    server.reports([report(i, step) for i, step in enumerate(range(10, 110, 10))])
    server.attempt(launch_id="launch-2", first_step=first_step)
    server.stream(stream_id="s1", launch_id="launch-2")
    server.reports([report(i, step, rank=3) for i, step in enumerate(steps)], "s1")


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


def test_a_resume_with_other_steps_never_mixes(server):
    resumed(server, 55, [57, 64])
    assert server.series("lost").steps == [10, 20, 30, 40, 50, 57, 64]
    assert server.get("/runs/r1/latest", wire.Latest).step == 64


def test_before_its_first_report_the_newest_visible_step_is_the_latest(server):
    resumed(server, 55, [])
    assert server.get("/runs/r1/latest", wire.Latest).step == 50
    assert server.series("edq_ratio").steps == [10, 20, 30, 40, 50]


def test_a_third_attempt_hides_both(server):
    resumed(server, 55, [60, 70])
    server.attempt(launch_id="launch-3", first_step=30)
    server.stream(stream_id="s2", launch_id="launch-3")
    server.reports([report(0, 30, rank=7)], "s2")
    assert server.series("lost").steps == [10, 20, 30]
    assert server.series("lost").values == [60.0, 60.0, 480.0]


def test_the_same_launch_is_the_same_attempt_and_keeps_the_lowest_first_step(server):
    server.run()
    assert server.attempt(first_step=12).attempt == 1
    again = server.attempt(first_step=10)
    assert (again.attempt, again.first_step) == (1, 10)
    assert server.attempt(launch_id="launch-2", first_step=20).attempt == 2


def test_two_processes_on_one_rank_are_not_merged(server):
    server.run()
    server.attempt()
    server.stream(stream_id="s0", process_id=1)
    server.stream(stream_id="s1", process_id=2)
    server.reports([report(0, 10)], "s0")
    server.reports([report(0, 10), report(1, 20)], "s1")
    assert server.series("elements").values == [384.0, 384.0]
    assert len(server.get("/runs/r1/streams", wire.StreamList).streams) == 2
