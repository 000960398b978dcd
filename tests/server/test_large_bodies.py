"""Large bodies over real sockets: threads decode and check them, and JSON has a lower limit than msgpack."""

from __future__ import annotations

import gzip
import sys
import threading
from collections import Counter
from typing import Any

import httpx
import pytest
from collage_server.api import bodies, reports
from collage_server.ingest.report_checks import decoded_batch

from collage_monitor import wire
from tests.server.samples import LAYERS, STATISTICS, layer, report, stream_create
from tests.server.sockets import listening
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

JSON = {"Content-Type": wire.JSON}


@pytest.fixture
def server(tmp_path):
    with (
        listening(tmp_path) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_SECONDS) as client,
    ):
        server.client = client
        for path, message in (
            ("/projects/p/runs", wire.RunCreate(run_id="r1")),
            ("/runs/r1/attempts", wire.AttemptCreate(launch_id="launch-1", first_step=1)),
            ("/runs/r1/streams", stream_create()),
        ):
            sent(server, path, wire.encode_message(message, wire.JSON)).raise_for_status()
        yield server


def sent(server, path, body):
    return server.client.post("/api/v1" + path, content=body, headers=JSON)


def batch(count):
    return wire.encode_batch(wire.ReportBatch(reports=[report(i, i + 1) for i in range(count)]), wire.JSON)


def test_json_beyond_a_mebibyte_is_refused_and_told_what_to_send(server):
    """Its decoder holds the interpreter until it is done."""
    body = batch(1).ljust(2**20)
    assert sent(server, "/streams/s0/reports", body).json()["accepted"] == 1
    for path in ("/streams/s0/reports", "/runs/r1/streams"):
        answer = sent(server, path, body + b" ")
        error = answer.json()["error"]
        assert (answer.status_code, error["field"], error["limit"]) == (413, "body", 2**20)
        assert f"send {wire.MSGPACK}" in error["message"]
    packed = gzip.compress(body + b" ")
    answer = server.client.post(
        "/api/v1/streams/s0/reports", content=packed, headers={**JSON, "Content-Encoding": "gzip"}
    )
    assert (answer.status_code, f"send {wire.MSGPACK}" in answer.text) == (413, True)


def test_what_a_large_body_holds_too_much_of_is_refused_by_name(server):
    tiny = b'{"seq":1,"step":1,"time":1},'
    answer = sent(server, "/streams/s0/reports", b'{"reports":[' + 6000 * tiny + tiny[:-1] + b"]}")
    error = answer.json()["error"]
    assert (answer.status_code, error["field"], error["limit"]) == (413, "reports", 5000)
    answer = sent(server, "/streams/s0/reports", b'{"reports":' + b"[" * 100_000)
    assert answer.status_code == 400
    layers = wire.encode_message(stream_create(layers=[layer(f"l{i}") for i in range(2000)]), wire.JSON)
    assert sent(server, "/runs/r1/streams", layers.replace(b'"rank":0', b'"rank":"0"')).status_code == 422


def test_a_stream_of_many_layers_is_the_same_as_json_and_as_msgpack(server):
    layers = [layer(f"block.{i}.weight") for i in range(1000)]
    message = stream_create("s1", layers=layers, rank=1, world_size=2)
    answer = sent(server, "/runs/r1/streams", wire.encode_message(message, wire.JSON))
    assert answer.status_code == 200, answer.text
    stored = server.client.get("/api/v1/runs/r1/layers").json()["layers"]
    assert [entry["name"] for entry in stored] == [*LAYERS, *(entry.name for entry in layers)]
    assert len(STATISTICS) > 1


def many_scalars(count=wire.LIMITS["reports_per_batch"], **more):
    """13 MB of msgpack: as many scalars as one batch may hold, all under names that must be looked at."""
    scalars = {f"{name:03}": 1.0 for name in range(wire.LIMITS["scalars_per_report"])}
    given: dict[str, Any] = {"step": 1, "time": 1.0, "scalars": scalars} | more
    reports = [wire.Report(seq=seq, **given) for seq in range(count)]
    return wire.ReportBatch(reports=reports)


@pytest.mark.parametrize(("content_type", "count"), [(wire.MSGPACK, 5000), (wire.JSON, 300)])
def test_a_large_batch_is_neither_decoded_nor_checked_on_the_event_loop(server, monkeypatch, content_type, count):
    work = [(bodies, "decoded_batch"), (reports, "check_batch")]
    threads: dict[str, set[int]] = {name: set() for _, name in work}

    def noted(name, function):
        def call(*arguments):
            threads[name].add(threading.get_ident())
            return function(*arguments)

        return call

    for module, name in work:
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    sent_batch = many_scalars(count, statistic_count=1, layer_count=1, statistics=bytes(8))
    body = wire.encode_batch(sent_batch, content_type)
    answer = server.client.post("/api/v1/streams/s0/reports", content=body, headers={"Content-Type": content_type})
    assert {entry["code"] for entry in answer.json()["rejected"]} == {"missing"}
    event_loop = {server.thread.ident}
    assert all(seen and seen.isdisjoint(event_loop) for seen in threads.values()), threads


def test_a_large_batch_is_decoded_report_by_report():
    """Other threads get on only between two calls of Python's: decoded at once, 13 MB hold them up for 0.1 s."""
    sent_batch = many_scalars()
    body = wire.encode_batch(sent_batch)
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        batch, refused = decoded_batch(body, wire.MSGPACK)
    finally:
        sys.setprofile(None)
    assert (len(batch.reports), refused) == (len(sent_batch.reports), [])
    assert calls["call"] > len(batch.reports)
