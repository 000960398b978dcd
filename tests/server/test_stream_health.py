"""GET /runs/RUN/streams: gaps, lag and clock skew of every stream."""

from __future__ import annotations

import pytest

from collage_monitor import wire
from tests.server.conftest import NOW
from tests.server.samples import report


def streams(server):
    return {s.stream_id: s for s in server.get("/runs/r1/streams", wire.StreamList).streams}


def send(server, reports=(), gaps=(), stream_id="s0", status=200):
    batch = wire.ReportBatch(
        reports=list(reports), gaps=[wire.ReportGap(first_seq=a, last_seq=b, reason="spool full") for a, b in gaps]
    )
    return server.post(
        f"/streams/{stream_id}/reports", batch, wire.BatchAnswer, status=status, encode=wire.encode_batch
    )


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


def test_who_lags(two):
    send(two, [report(0, 100)])
    two.clock.now += 30
    send(two, [report(0, 40, rank=1)], stream_id="s1")
    found = streams(two)
    assert [(found[s].lag_steps, found[s].last_report_at) for s in ("s0", "s1")] == [(0, NOW), (60, NOW + 30)]


def test_the_clock_is_judged_by_the_report_that_arrived_fastest(two):
    send(two, [report(0, 10, time=NOW - 60.0)])
    assert streams(two)["s0"].clock_skew_seconds == -60.0
    send(two, [report(1, 20, time=NOW + 3.0), report(2, 30, time=NOW - 5.0)])
    assert streams(two)["s0"].clock_skew_seconds == 3.0
    two.clock.now += 100.0
    send(two, [report(3, 40, time=NOW + 50.0)])
    assert streams(two)["s0"].clock_skew_seconds == 3.0


def test_a_clock_an_hour_ahead_shows_as_skew_and_moves_nothing_else(two):
    two.clock.now = NOW + 100
    send(two, [report(0, 10, time=NOW + 99.0), report(1, 20, time=NOW + 99.5)])
    send(two, [report(0, 10, rank=1, time=NOW + 3699.0)], stream_id="s1")
    found = streams(two)
    assert [found[s].clock_skew_seconds for s in ("s0", "s1")] == [-0.5, 3599.0]
    assert [found[s].lag_steps for s in ("s0", "s1")] == [0, 10]
    assert {found[s].last_report_at for s in ("s0", "s1")} == {NOW + 100}
    two.clock.now = NOW + 800
    assert two.get("/runs/r1", wire.Run).state == "stale", "by the server's clock"


def test_bad_gaps(two):
    assert send(two, [report(0, 10)], [(5, 4)], status=422).field == "gaps"
    limit = wire.LIMITS["reports_per_batch"]
    assert send(two, gaps=[(i, i) for i in range(limit + 1)], status=413).limit == limit
    assert streams(two)["s0"].reports == 0


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
