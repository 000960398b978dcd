"""The writer: groups what waits, acknowledges after the commit, sheds load, and never doubles a report."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from anyio.to_thread import current_default_thread_limiter
from collage_server.api import bodies
from collage_server.errors import Busy
from collage_server.ingest.writer import IngestCounters, Writer
from collage_server.memory_budget import BodyBudget
from collage_server.settings import FixedLimits
from collage_server.store import READERS, GroupOutcome, ReportGroup, StreamRecord

from collage_monitor import wire
from tests.server.conftest import holding, running
from tests.server.samples import LAYERS, STATISTICS, block, layer, model_of, report, report_of_totals, stream_create
from tests.waiting import PATIENCE_SECONDS


class GatedStore:
    """Commits only when told; remembers how many groups each commit held."""

    def __init__(self):
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.commits = []
        self.fails = lambda groups: False

    def append(self, groups, _now):
        self.entered.set()
        assert self.gate.wait(PATIENCE_SECONDS)
        if self.fails(groups):
            raise OSError("disk full")
        self.commits.append(len(groups))
        return [GroupOutcome(len(group.reports), 0) for group in groups]


STREAM = StreamRecord("r1", "s0", 1, 1, 0, 1, 0, (), np.zeros(0, np.int64), np.zeros(0, np.int64))


def group(*reports, size=10):
    return ReportGroup(STREAM, reports, size)


def committed(store, *rest, stop=False):
    """(outcomes, counters) of a first group, and of the rest that arrives while it is committed."""
    counters = IngestCounters()

    async def submitted():
        writer = Writer(store, counters, clock=lambda: 0.0)
        writer.start(asyncio.get_running_loop())
        try:
            first = writer.submit(group("a"))
            await asyncio.to_thread(store.entered.wait, 5)
            waiting = [writer.submit(entry) for entry in rest]
            assert not first.done()
            store.gate.set()
            if stop:
                await writer.stop(5.0)
                with pytest.raises(Busy):
                    writer.submit(group("late"))
            return await asyncio.gather(first, *waiting, return_exceptions=True)
        finally:
            store.gate.set()
            await writer.stop(5.0)

    return asyncio.run(submitted()), counters


def counted(counters, name, **labels):
    return counters.registry.get_sample_value(f"collage_server_{name}", labels)


@pytest.mark.parametrize("stop", [False, True])
def test_what_arrives_during_a_commit_becomes_the_next_one_though_it_stops_meanwhile(stop):
    store = GatedStore()
    outcomes, counters = committed(store, *(group("b") for _ in range(7)), stop=stop)
    assert store.commits == [1, 7]
    assert [outcome.accepted for outcome in outcomes] == [1] * 8
    assert counted(counters, "reports_total", outcome="accepted") == 8
    assert counted(counters, "commit_seconds_count") == 2


def test_a_commit_has_a_largest_size(monkeypatch):
    monkeypatch.setattr("collage_server.ingest.writer.COMMIT_BYTES", 1000)
    store = GatedStore()
    committed(store, *(group("b", size=400) for _ in range(6)))
    assert store.commits == [1, 3, 3]


def test_a_failing_group_does_not_fail_its_neighbours():
    store = GatedStore()
    store.fails = lambda groups: any("bad" in entry.reports for entry in groups)
    (_, good, bad, also_good), counters = committed(store, *map(group, ("b", "bad", "c")))
    assert isinstance(good, GroupOutcome)
    assert isinstance(also_good, GroupOutcome)
    assert isinstance(bad, Busy)
    assert bad.retry_after_seconds == 5
    assert counted(counters, "reports_total", outcome="accepted") == 3


def test_the_budget_in_flight():
    budget = BodyBudget(100)
    with holding(budget, 500):
        assert budget.bytes == 500
        with pytest.raises(Busy) as caught, holding(budget, 1):
            pytest.fail("one byte too many")
    assert (budget.bytes, caught.value.limit) == (0, 100)
    with holding(budget, 60), holding(budget, 40), pytest.raises(Busy), holding(budget, 1):
        pytest.fail("one byte too many")
    assert budget.bytes == 0


def test_the_budget_falls_while_reports_wait_and_grows_back_when_they_do_not():
    now = [0.0]
    budget = BodyBudget(100 * 2**20, wait_seconds=0.25, clock=lambda: now[0])
    with holding(budget, 40 * 2**20):
        budget.waited(0.5, 2**20)
        assert budget.allowed == pytest.approx(0.7 * 40 * 2**20, abs=1)
        budget.waited(9.0, 2**20)
        assert budget.allowed == pytest.approx(0.7 * 40 * 2**20, abs=1), "one cut for those in flight together"
        with pytest.raises(Busy) as caught, holding(budget, 2**20):
            pytest.fail("more than is allowed now")
        assert caught.value.limit == budget.allowed
        now[0] = 0.6
        budget.waited(0.5, 2**20)
        assert budget.allowed == pytest.approx(0.49 * 40 * 2**20, abs=2)
    for _ in range(100):
        now[0] += 10.0
        budget.waited(10.0, 1)
    assert budget.allowed == 2**20, "never less than this"
    for _ in range(1000):
        budget.waited(0.1, 2**20)
    assert budget.allowed == budget.limit


def test_beyond_the_budget_the_answer_is_503_with_retry_after(settings):
    with running(settings, limits=FixedLimits(in_flight_bytes=10)) as server:
        server.filled(steps=())
        with holding(server.state.memory.bodies, 10):
            refused = server.sent(report(0, 10))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["limit"] == 10
        assert server.sent(report(0, 10)).status_code == 200


async def stalled(app, answered, waits):
    """A request whose body stops arriving; `waits` is set once the rest is waited for."""
    parts = iter([{"type": "http.request", "body": b"x", "more_body": True}])

    async def receive():
        part = next(parts, None)
        if part is None:
            waits.set()
            await asyncio.Event().wait()
        return part

    async def send(message):
        answered.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"1000")]
    path = "/api/v1/streams/s0/reports"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app({**scope, "state": {}}, receive, send)


def check_told_to_come_again(answered, told):
    assert answered[0]["status"] == 503
    assert (b"retry-after", b"1") in answered[0]["headers"]
    assert told in answered[1]["body"]


def test_a_request_that_is_cut_off_by_the_shutdown_is_told_to_come_again(server):
    answered: list[dict[str, Any]] = []

    async def cut_off():
        waits = asyncio.Event()
        request = asyncio.create_task(stalled(server.app, answered, waits))
        await waits.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    server.filled(steps=())
    server.client.portal.call(cut_off)
    check_told_to_come_again(answered, b'"code":"busy"')


def test_a_body_that_stops_arriving_gives_its_room_back(settings, monkeypatch):
    """A sender that died in the middle of its body would keep all others out for ever."""
    monkeypatch.setattr(bodies, "_PATIENCE_SECONDS", 0.05)
    answered: list[dict[str, Any]] = []
    with running(settings, limits=FixedLimits(in_flight_bytes=1000)) as server:
        server.filled(steps=())
        server.client.portal.call(stalled, server.app, answered, asyncio.Event())
        check_told_to_come_again(answered, b"did not arrive within")
        assert server.state.memory.bodies.bytes == 0
        assert server.sent(report(0, 10)).status_code == 200


@pytest.mark.slow
def test_concurrent_duplicates_are_stored_once_and_counted(server):
    """Eight clients send overlapping batches of the same forty reports; every report is stored exactly once."""
    server.filled(steps=())
    batches = [range(start, start + 10) for start in range(0, 35, 5)] * 4
    with ThreadPoolExecutor(8) as pool:
        sent = pool.map(lambda batch: server.reports([report(i, i + 1) for i in batch]), batches)
        answers = list(sent)
    assert sum(answer.accepted for answer in answers) == 40
    assert sum(answer.duplicates for answer in answers) == 10 * len(batches) - 40
    [stream] = server.get("/runs/r1/streams", wire.StreamList).streams
    assert (stream.reports, stream.last_seq) == (40, 39)
    assert server.series("edq_ratio").steps == list(range(1, 41))


def test_a_stream_that_is_extended_is_read_again_and_the_others_stay_known(server):
    """Another process may have extended it; and of a thousand ranks that register the first ones report already."""
    assert server.client.portal.call(lambda: current_default_thread_limiter().total_tokens) == READERS
    server.filled()
    registry, more = server.state.registry, {"layers": [*map(layer, LAYERS), layer("head.weight")]}
    server.stream(stream_id="s1", rank=1)
    assert registry.cached("s0") is not None
    server.store.streams.create_stream("r1", stream_create(**more), 0.0)
    answer = server.reports([report(5, 60, values=block(60, layers=4))])
    assert (answer.accepted, answer.rejected) == (1, [])
    server.stream(**more)
    assert registry.cached("s0") is None


def test_totals_past_the_raw_horizon_are_named_counted_and_not_stored(server):
    """Whatever this process knew: the horizon stands in the database, another process may have moved it."""
    server.filled()
    with server.store.writing() as connection:
        connection.exec_driver_sql("UPDATE run_latest SET frozen_step = 30, checks = NULL")
    bad = report(6, 60, time=float("nan"))
    scalars = report(9, 10, measured=False)
    answer = server.reports([report(5, 30), bad, report(7, 70), report(8, 20), scalars])
    assert (answer.accepted, answer.duplicates) == (2, 0)
    refused = [(entry.index, entry.seq, entry.code) for entry in answer.rejected]
    assert refused == [(0, 5, "past_horizon"), (1, 6, "bad_value"), (3, 8, "past_horizon")]
    first = answer.rejected[0]
    assert (first.field, first.limit, "drop it, or keep them for longer" in first.message) == ("step", 30, True)
    counted = server.get("/metrics")
    assert 'collage_server_reports_total{outcome="late"} 2.0' in counted
    assert 'collage_server_reports_total{outcome="rejected"} 1.0' in counted
    [stream] = server.get("/runs/r1/streams", wire.StreamList).streams
    assert (stream.reports, stream.missing) == (7, 3)


def test_names_without_end_are_refused_and_what_is_known_goes_on(server, monkeypatch):
    """Every commit of a stream carries all names that it has logged: a name a step would slow everybody down."""
    monkeypatch.setattr("collage_server.store.journal.report_journal._MOST_NAMES", 5)
    server.filled(steps=())
    answer = server.reports([report(i, i + 1, scalars={f"loss/{i}": 1.0}) for i in range(7)])
    assert (answer.accepted, answer.duplicates) == (5, 0)
    refused = [(entry.index, entry.code, entry.field) for entry in answer.rejected]
    assert refused == [(5, "too_many_names", "scalars"), (6, "too_many_names", "scalars")]
    sent = [(5, {"loss/5": 1.0}), (7, {"loss/3": 2.0}), (0, {"loss/0": 1.0}), (8, {})]
    again = server.reports([report(seq, seq + 1, scalars=scalars) for seq, scalars in sent])
    assert (again.accepted, again.duplicates) == (2, 1)
    assert [(entry.index, entry.seq) for entry in again.rejected] == [(0, 5)]
    assert sorted(server.get("/runs/r1", wire.Run).scalars) == [f"loss/{i}" for i in range(5)]
    assert 'collage_server_reports_total{outcome="rejected"} 3.0' in server.get("/metrics")


@pytest.mark.parametrize("sealed", [False, True])
def test_an_unknown_statistic_is_left_out_and_holds_up_nothing(server, sealed):
    server.run()
    server.attempt()
    names = [*STATISTICS[:5], "sign_agreement", *STATISTICS[5:]]
    stream = server.stream(statistics=names)
    assert (stream.statistics, stream.unknown_statistics) == (STATISTICS, ["sign_agreement"])
    tables = [np.insert(block(step), 5, 77.0, axis=0) for step in (10, 20)]
    models = [wire.array_to_bytes(np.insert(model_of(block(step)), 5, 77.0)) for step in (10, 20)]
    sent = [report_of_totals(i, 10 * i + 10, tables[i], model=models[i], scalars={"loss": 1.0}) for i in range(2)]
    assert server.reports(sent).accepted == 2
    again = server.stream(statistics=[*names, "update_ulp_histogram/1", "another"])
    assert again.unknown_statistics == ["sign_agreement", "another"]
    if sealed:
        server.finish()
        assert server.store.journal.runs() == []
    assert server.series("lost").values == [60.0, 60.0]
    assert server.get("/runs/r1/latest", wire.Latest).step == 20
    head, *lines = server.get("/runs/r1/export?format=jsonl").splitlines()
    assert json.loads(head)["statistics"] == [*STATISTICS, "update_ulp_histogram/1"]
    assert not any("sign_agreement" in line for line in lines if '"event"' not in line)
    events = server.get("/runs/r1/events", wire.EventPage).events
    told = [event.text for event in events if event.kind == "unknown_statistics"]
    assert [text.rpartition(": ")[2] for text in told] == ["sign_agreement", "sign_agreement, another"]
