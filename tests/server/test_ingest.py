"""The writer: groups what waits, acknowledges after the commit, sheds load, and never doubles a report."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from anyio.to_thread import current_default_thread_limiter
from collage_server.api import bodies
from collage_server.app import create_app
from collage_server.errors import Busy
from collage_server.ingest.writer import IngestCounters, Writer
from collage_server.memory_budget import BodyBudget
from collage_server.settings import FixedLimits, Settings
from collage_server.store import READERS, GroupOutcome, ReportGroup, StreamRecord
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.conftest import Clock, Server
from tests.server.holding import holding
from tests.server.samples import LAYERS, STATISTICS, block, layer, model_of, report, stream_create
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


async def with_writer(store, body, **more):
    counters = IngestCounters()
    writer = Writer(store, counters, clock=lambda: 0.0, **more)
    writer.start(asyncio.get_running_loop())
    try:
        return await body(writer), counters
    finally:
        store.gate.set()
        await writer.stop(5.0)


def counted(counters, name, **labels):
    return counters.registry.get_sample_value(f"collage_server_{name}", labels)


def test_what_arrives_during_a_commit_becomes_the_next_one():
    store = GatedStore()

    async def body(writer):
        first = writer.submit(group("a"))
        await asyncio.to_thread(store.entered.wait, 5)
        rest = [writer.submit(group("b")) for _ in range(7)]
        assert not first.done()
        store.gate.set()
        return await asyncio.gather(first, *rest)

    outcomes, counters = asyncio.run(with_writer(store, body))
    assert store.commits == [1, 7]
    assert len(outcomes) == 8
    assert counted(counters, "reports_total", outcome="accepted") == 8
    assert counted(counters, "commit_seconds_count") == 2


def test_a_commit_has_a_largest_size(monkeypatch):
    monkeypatch.setattr("collage_server.ingest.writer.COMMIT_BYTES", 1000)
    store = GatedStore()

    async def body(writer):
        first = writer.submit(group("a"))
        await asyncio.to_thread(store.entered.wait, 5)
        rest = [writer.submit(group("b", size=400)) for _ in range(6)]
        store.gate.set()
        return await asyncio.gather(first, *rest)

    asyncio.run(with_writer(store, body))
    assert store.commits == [1, 3, 3]


def test_a_failing_group_does_not_fail_its_neighbours():
    store = GatedStore()
    store.fails = lambda groups: any("bad" in entry.reports for entry in groups)

    async def body(writer):
        first = writer.submit(group("a"))
        await asyncio.to_thread(store.entered.wait, 5)
        rest = [writer.submit(group(name)) for name in ("b", "bad", "c")]
        store.gate.set()
        return await asyncio.gather(first, *rest, return_exceptions=True)

    (_, good, bad, also_good), counters = asyncio.run(with_writer(store, body))
    assert isinstance(good, GroupOutcome)
    assert isinstance(also_good, GroupOutcome)
    assert isinstance(bad, Busy)
    assert bad.retry_after_seconds == 5
    assert counted(counters, "reports_total", outcome="accepted") == 3


def test_stopping_commits_what_waits_and_refuses_what_comes_later():
    store = GatedStore()

    async def body(writer):
        waiting = [writer.submit(group("a")) for _ in range(3)]
        store.gate.set()
        await writer.stop(5.0)
        with pytest.raises(Busy):
            writer.submit(group("late"))
        return await asyncio.gather(*waiting)

    outcomes, _ = asyncio.run(with_writer(store, body))
    assert [outcome.accepted for outcome in outcomes] == [1, 1, 1]


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


@pytest.mark.slow
def test_beyond_the_budget_the_answer_is_503_with_retry_after(tmp_path, monkeypatch):
    app = create_app(Settings(folder=tmp_path, no_auth=True), limits=FixedLimits(in_flight_bytes=10))
    store = app.state.collage.store
    entered, gate = threading.Event(), threading.Event()
    append = store.journal.append

    def slow(groups, now):
        entered.set()
        assert gate.wait(PATIENCE_SECONDS)
        return append(groups, now)

    with TestClient(app, base_url="http://127.0.0.1") as client, ThreadPoolExecutor(1) as pool:
        filled(client)
        monkeypatch.setattr(store.journal, "append", slow)
        first = pool.submit(post, client, report(0, 10))
        assert entered.wait(PATIENCE_SECONDS)
        refused = post(client, report(1, 20))
        gate.set()
        assert first.result().status_code == 200
        assert post(client, report(1, 20)).status_code == 200
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["limit"] == 10


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


def test_a_request_that_is_cut_off_by_the_shutdown_is_told_to_come_again(tmp_path):
    app = create_app(Settings(folder=tmp_path, no_auth=True))
    answered: list[dict[str, Any]] = []

    async def cut_off():
        waits = asyncio.Event()
        request = asyncio.create_task(stalled(app, answered, waits))
        await waits.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    with TestClient(app, base_url="http://127.0.0.1") as client:
        filled(client)
        assert client.portal is not None
        client.portal.call(cut_off)
    assert answered[0]["status"] == 503
    assert (b"retry-after", b"1") in answered[0]["headers"]
    assert b'"code":"busy"' in answered[1]["body"]


def test_a_body_that_stops_arriving_gives_its_room_back(tmp_path, monkeypatch):
    """A sender that died in the middle of its body would keep all others out for ever."""
    monkeypatch.setattr(bodies, "_PATIENCE_SECONDS", 0.05)
    app = create_app(Settings(folder=tmp_path, no_auth=True), limits=FixedLimits(in_flight_bytes=1000))
    answered: list[dict[str, Any]] = []
    with TestClient(app, base_url="http://127.0.0.1") as client:
        filled(client)
        assert client.portal is not None
        client.portal.call(asyncio.wait_for, stalled(app, answered, asyncio.Event()), PATIENCE_SECONDS)
        assert answered[0]["status"] == 503
        assert (b"retry-after", b"1") in answered[0]["headers"]
        assert b"did not arrive within" in answered[1]["body"]
        assert app.state.collage.memory.bodies.bytes == 0
        assert post(client, report(0, 10)).status_code == 200


def filled(client):
    server = Server(client, Clock(), None)
    server.filled(steps=())


def post(client, *reports):
    body = wire.encode_batch(wire.ReportBatch(reports=list(reports)))
    return client.post("/api/v1/streams/s0/reports", content=body, headers={"Content-Type": wire.MSGPACK})


def test_questions_leave_connections_for_reports(server):
    assert server.client.portal.call(lambda: current_default_thread_limiter().total_tokens) == READERS


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


def test_a_stream_extended_elsewhere_is_read_again(server):
    """Another process may have extended the stream: a report beyond the known size asks the store once more."""
    server.filled()
    more = stream_create(layers=[*map(layer, LAYERS), layer("head.weight")])
    server.app.state.collage.store.streams.create_stream("r1", more, 0.0)
    answer = server.reports([report(5, 60, values=block(60, layers=4))])
    assert (answer.accepted, answer.rejected) == (1, [])


def test_a_rank_that_registers_leaves_the_others_known(server):
    """A thousand ranks register one after the other, while the first ones report already."""
    server.filled()
    registry = server.app.state.collage.registry
    server.stream(stream_id="s1", rank=1)
    assert registry.cached("s0") is not None
    server.stream(layers=[*map(layer, LAYERS), layer("head.weight")])
    assert registry.cached("s0") is None


def test_totals_past_the_raw_horizon_are_named_counted_and_not_stored(server):
    """Whatever this process knew: the horizon stands in the database, another process may have moved it."""
    server.filled()
    store = server.app.state.collage.store
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE run_latest SET frozen_step = 30, checks = NULL")
    bad = report(6, 60, time=float("nan"))
    scalars = report(9, 10, measured=False)
    answer = server.reports([report(5, 30), bad, report(7, 70), report(8, 20), scalars])
    assert (answer.accepted, answer.duplicates) == (2, 0)
    assert [(entry.index, entry.seq, entry.code) for entry in answer.rejected] == [
        (0, 5, "past_horizon"),
        (1, 6, "bad_value"),
        (3, 8, "past_horizon"),
    ]
    assert (answer.rejected[0].field, answer.rejected[0].limit) == ("step", 30)
    assert "step 30 came too late: retention has dropped" in answer.rejected[0].message
    assert (
        "the fine points up to step 30, so its totals have no place; drop it, or keep them for longer"
        in answer.rejected[0].message
    )
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
    assert [(entry.index, entry.code) for entry in answer.rejected] == [
        (5, "too_many_names"),
        (6, "too_many_names"),
    ]
    assert answer.rejected[0].field == "scalars"
    again = server.reports(
        [
            report(5, 6, scalars={"loss/5": 1.0}),
            report(7, 8, scalars={"loss/3": 2.0}),
            report(0, 1, scalars={"loss/0": 1.0}),
            report(8, 9, scalars={}),
        ]
    )
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
    blocks = [np.insert(block(step), 5, 77.0, axis=0) for step in (10, 20)]
    reports = [report(seq, step) for seq, step in enumerate((10, 20))]
    sent = [
        msgspec.structs.replace(
            entry,
            statistic_count=len(names),
            statistics=wire.array_to_bytes(values),
            model=wire.array_to_bytes(np.insert(model_of(np.delete(values, 5, axis=0)), 5, 77.0)),
        )
        for entry, values in zip(reports, blocks, strict=True)
    ]
    assert server.reports(sent).accepted == 2
    again = server.stream(statistics=[*names, "update_ulp_histogram/1", "another"])
    assert again.unknown_statistics == ["sign_agreement", "another"]
    if sealed:
        store = server.app.state.collage.store
        server.send("PATCH", "/runs/r1", wire.RunUpdate(state="finished"), wire.Run)
        server.seal()
        assert store.journal.runs() == []
    assert server.series("lost").values == [60.0, 60.0]
    assert server.get("/runs/r1/latest", wire.Latest).step == 20
    head, *lines = server.get("/runs/r1/export?format=jsonl").splitlines()
    assert json.loads(head)["statistics"] == [*STATISTICS, "update_ulp_histogram/1"]
    assert not any("sign_agreement" in line for line in lines if '"event"' not in line)
    events = server.get("/runs/r1/events", wire.EventPage).events
    told = [event.text for event in events if event.kind == "unknown_statistics"]
    assert told[0] == "1 statistic unknown to this server left out: sign_agreement"
    assert told[1] == "2 statistics unknown to this server left out: sign_agreement, another"
