"""Logged values take more memory as objects than on the wire: what is held of them at a time is bounded."""

from __future__ import annotations

import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from collage_server.errors import TooLarge
from collage_server.ingest.report_checks import decoded_batch
from collage_server.settings import FixedLimits, Settings
from collage_server.store import ReportGroup, Selection, SqliteStore
from collage_server.store.reading.report_merging import decode_layers
from collage_server.store.sealing.seal_plan import SealLimits

from collage_monitor import wire
from tests.server.conftest import NOW, running
from tests.server.holding import holding
from tests.server.samples import LAYERS, STATISTICS, report, stream_create

pytestmark = pytest.mark.slow

NAMES = wire.LIMITS["scalars_per_report"]
MSGPACK = {"Content-Type": wire.MSGPACK}


def logged(count, first=0):
    """Reports of nothing but scalars, as many each as one may hold, under names as short as they come."""
    scalars = {f"{name:03}": 1.0 for name in range(NAMES)}
    return [wire.Report(seq=seq, step=seq, time=1.0, scalars=scalars) for seq in range(first, first + count)]


@contextmanager
def traced():
    """A list that gets the most bytes that were held at a time beyond those held before."""
    tracemalloc.start()
    peak: list[int] = []
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


@pytest.fixture
def store(tmp_path):
    """One run of one stream; 1 MiB of its journal is sealed at a time."""
    limits = replace(SealLimits(), bytes=2**20)
    store = SqliteStore(tmp_path / "collage.sqlite", stale_after_seconds=600.0, limits=limits)
    store.open()
    store.runs.create("p", wire.RunCreate(run_id="r1"), NOW)
    store.streams.create_attempt("r1", wire.AttemptCreate(launch_id="launch-1", first_step=0), NOW)
    store.streams.create_stream("r1", stream_create(), NOW)
    yield store
    store.close()


def test_a_journal_of_many_scalars_is_sealed_in_bounded_pieces(store):
    store.journal.append([ReportGroup(store.streams.stream_record("s0"), logged(500))], NOW)
    with traced() as peak:
        while store.sealing.seal("r1", NOW, journal_full=True):
            pass
    assert peak[0] < 3 * 2**20
    with store.points.snapshot() as snapshot:
        found = snapshot.scalars(["r1"], ["000"], Selection())["r1"]["000"]
    assert (found.steps.tolist(), set(found.values.tolist())) == (list(range(500)), {1.0})
    assert store.journal.bytes_of("r1") == 0


def test_the_journal_counts_what_reading_its_scalars_takes(store):
    group = ReportGroup(store.streams.stream_record("s0"), logged(500))
    store.journal.append([group], NOW)
    with traced() as peak, store.points.snapshot() as snapshot:
        snapshot.scalars(["r1"], None, Selection())
    counted = store.journal.bytes_of("r1")
    assert peak[0] < 1.5 * counted
    assert counted <= sum(group.journal_bytes) < 1.5 * counted


def test_of_a_long_journal_what_is_not_asked_for_stands_in_memory_once(store):
    """All its totals by layer, 16 MiB here, were put side by side for one of them: 22 MiB."""
    statistics, layers = len(STATISTICS), len(LAYERS)
    held: Any = SimpleNamespace(
        stream_id="s0", statistic_count=statistics, layer_count=layers, statistics=bytes(8 * statistics * layers)
    )
    count = 2**24 // len(held.statistics)
    positions = np.arange(layers)
    with traced() as peak:
        table = decode_layers({"s0": store.streams.stream_record("s0")}, [held] * count, STATISTICS[:1], positions)
    assert table.array.shape == (1, count, layers)
    assert not table.array.any()
    assert peak[0] < count * len(held.statistics)


def test_a_run_whose_scalars_fill_the_journal_is_told_to_wait(tmp_path):
    """Two megabytes on the wire are more than the bound once they are read."""
    with running(
        Settings(folder=tmp_path, no_auth=True),
        limits=FixedLimits(journal_run_bytes=2**22, seal_interval_seconds=1e6),
    ) as server:
        server.filled(steps=())
        server.app.state.collage.sealer.stop(10.0)
        bodies = [wire.encode_batch(wire.ReportBatch(reports=logged(250, first))) for first in (0, 250, 500)]
        post = partial(server.client.post, "/api/v1/streams/s0/reports", headers=MSGPACK)
        answers = [post(content=body) for body in bodies]
    assert sum(map(len, bodies)) < 2**21
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert answers[1].headers["retry-after"] == "2"


def test_a_report_of_too_many_scalars_is_refused_before_they_are_decoded():
    many = {f"{name:x}": 1 for name in range(300_000)}
    own = {"step": 1, "time": 1.0}
    some = [{"seq": 0, **own}, {"seq": 1, **own, "scalars": many}, {"seq": 2, **own, "scalars": {"a": 1}}]
    body = msgspec.msgpack.encode({"reports": some})
    with traced() as peak:
        batch, refused = decoded_batch(body, wire.MSGPACK)
    assert peak[0] < len(body) / 10
    assert [report.seq for report in batch.reports] == [0, 2]
    assert [(entry.index, entry.seq, entry.code, entry.field, entry.limit) for entry in refused] == [
        (1, 1, "too_many", "scalars", NAMES)
    ]
    assert refused[0].message == f"300000 scalars, at most {NAMES}"
    alone, refused = decoded_batch(msgspec.msgpack.encode({"reports": some[1:2]}), wire.MSGPACK)
    assert (alone.reports, len(refused)) == ([], 1)


def test_gaps_are_counted_before_they_are_decoded():
    gap = {"first_seq": 1, "last_seq": 2, "reason": "full"}
    body = msgspec.msgpack.encode({"reports": [], "gaps": [gap] * 100_000})
    with traced() as peak, pytest.raises(TooLarge) as refused:
        decoded_batch(body, wire.MSGPACK)
    assert refused.value.field == "gaps"
    assert peak[0] < len(body) / 10


def test_what_is_refused_of_a_large_body_is_numbered_as_it_was_sent(server):
    server.filled(steps=range(1, 3))
    reports = [{"seq": seq, "step": seq, "time": 1.0, "scalars": {"a": 1.0}} for seq in range(10, 2000)]
    reports[3]["seq"] = "x"
    reports[5]["scalars"] = {str(name): 1.0 for name in range(NAMES + 1)}
    reports[7]["statistic_count"] = 99
    for content_type, encode in ((wire.JSON, msgspec.json.encode), (wire.MSGPACK, msgspec.msgpack.encode)):
        answer = server.client.post(
            "/api/v1/streams/s0/reports",
            content=encode({"reports": reports}),
            headers={"Content-Type": content_type},
        )
        found = [(entry["index"], entry["seq"], entry["code"]) for entry in answer.json()["rejected"]]
        assert found == [(3, None, "unreadable"), (5, 15, "too_many"), (7, 17, "undeclared")]


def test_a_body_in_flight_holds_what_its_scalars_take_as_objects(tmp_path):
    with running(Settings(folder=tmp_path, no_auth=True), limits=FixedLimits(in_flight_bytes=2**22)) as server:
        server.filled(steps=())
        small, large = (wire.encode_batch(wire.ReportBatch(reports=logged(count))) for count in (50, 350))
        assert len(large) < 2**20
        post = partial(server.client.post, "/api/v1/streams/s0/reports", headers=MSGPACK)
        with holding(server.app.state.collage.memory.bodies, 2**10):
            assert [post(content=body).status_code for body in (small, large)] == [200, 503]
        assert post(content=large).json()["accepted"] == 300


def test_a_body_that_waits_for_its_commit_stands_in_memory_once(server, monkeypatch):
    server.filled(steps=range(1, 3))
    body = wire.encode_batch(wire.ReportBatch(reports=[report(seq, seq) for seq in range(10, 4000)]))
    writer = server.app.state.collage.writer
    held: list[int] = []

    def submit(group, submit=writer.submit):
        held.append(tracemalloc.get_traced_memory()[0])
        return submit(group)

    monkeypatch.setattr(writer, "submit", submit)
    with traced():
        answer = server.client.post("/api/v1/streams/s0/reports", content=body, headers=MSGPACK)
    assert answer.json()["accepted"] == 3990
    assert held[0] < 2 * len(body)
