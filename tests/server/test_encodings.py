"""Request bodies in gzip: the same message as plain, refused early when they hold too much."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from collage_server.api import bodies
from collage_server.api.bodies import decompress
from collage_server.app import create_app
from collage_server.errors import TooLarge
from collage_server.settings import FixedLimits, Settings
from starlette.testclient import TestClient

from collage_monitor import wire
from tests.server.holding import holding
from tests.server.samples import report

MIB = 2**20
GZIP = {"Content-Encoding": "gzip"}


@pytest.mark.slow
def test_reports_arrive_as_if_plain(server):
    server.filled(steps=())
    body = wire.encode_batch(wire.ReportBatch(reports=[report(i, i + 1) for i in range(50)]))
    answer = server.post("/streams/s0/reports", gzip.compress(body), wire.BatchAnswer, headers=GZIP)
    assert (answer.accepted, answer.duplicates) == (50, 0)
    answer = server.post("/streams/s0/reports", body, wire.BatchAnswer)
    assert (answer.accepted, answer.duplicates) == (0, 50)


def test_other_messages_too(server):
    body = gzip.compress(wire.encode_message(wire.RunCreate(run_id="r1", notes="n" * 10_000)))
    run = server.post("/projects/p/runs", body, wire.Run, status=201, headers=GZIP)
    assert run.notes == "n" * 10_000


def test_damaged_bodies_are_400(server):
    whole = gzip.compress(bytes(range(256)) * 40)
    for body in (whole[:-1], whole + b"x", b"", b"x" * 40):
        error = server.post("/streams/s0/reports", body, status=400, headers=GZIP)
        assert error.field == "body"
        assert "gzip" in error.message


def test_other_encodings_are_415(server):
    for header in ("br", "zstd", "gzip, gzip", "deflate", ""):
        error = server.post("/streams/s0/reports", b"x", status=415, headers={"Content-Encoding": header})
        assert error.field == "Content-Encoding"
        assert "send gzip" in error.message


def bomb(megabytes):
    """So many MiB of zeros, packed piece by piece."""
    stream = zlib.compressobj(9, wbits=31)
    piece = bytes(MIB)
    return b"".join([stream.compress(piece) for _ in range(megabytes)]) + stream.flush()


@pytest.mark.slow
def test_a_quarter_of_a_gigabyte_behind_a_small_body_is_413_and_costs_little_memory():
    body = bomb(256)
    assert len(body) < MIB // 2
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge) as caught:
            decompress(body, 64 * MIB)
        assert tracemalloc.get_traced_memory()[1] < 150 * MIB
    finally:
        tracemalloc.stop()
    assert caught.value.limit == 64 * MIB


def test_json_may_not_grow_beyond_what_it_may_be_as_it_is_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(bodies, "_DECOMPRESSED_BYTES", 3000)
    monkeypatch.setattr(bodies, "_JSON_BYTES", 1000)
    app = create_app(Settings(folder=tmp_path, no_auth=True))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        for content_type, size, limit in ((wire.MSGPACK, 3001, 3000), (wire.JSON, 1001, 1000)):
            headers = {"Content-Type": content_type, **GZIP}
            answer = client.post("/api/v1/streams/s0/reports", content=gzip.compress(b"x" * size), headers=headers)
            assert (answer.status_code, answer.json()["error"]["limit"]) == (413, limit)


def test_what_is_decompressed_counts_as_in_flight(tmp_path):
    app = create_app(Settings(folder=tmp_path, no_auth=True), limits=FixedLimits(in_flight_bytes=10_000))
    budget = app.state.collage.memory.bodies
    body = gzip.compress(b"x" * 20_000)
    headers = {"Content-Type": wire.MSGPACK, **GZIP}
    with TestClient(app, base_url="http://127.0.0.1") as client:
        alone = client.post("/api/v1/streams/s0/reports", content=body, headers=headers)
        with holding(budget, 5_000):
            beside = client.post("/api/v1/streams/s0/reports", content=body, headers=headers)
    assert alone.status_code == 400, "decompressed, and found to be no batch"
    assert beside.status_code == 503
    assert budget.bytes == 0
