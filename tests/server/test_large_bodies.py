"""Large JSON over real sockets: a process of its own decodes it, and everybody else is answered meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from typing import Any

import httpx
import pytest
from collage_server.api import bodies, reports
from collage_server.ingest import json_process
from collage_server.ingest.decode import decoded_batch

from collage_monitor import wire
from tests.server.samples import LAYERS, STATISTICS, layer, report, stream_create
from tests.server.sockets import everything, listening, status_of
from tests.waiting import PATIENCE_SECONDS, until

JSON = {"Content-Type": wire.JSON}
MSGPACK = {"Content-Type": wire.MSGPACK}


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


def test_the_server_answers_while_a_large_body_is_decoded(server):
    body = batch(200)
    assert len(body) > 2**17
    assert sent(server, "/streams/s0/reports", body).json()["accepted"] == 200
    decoder = server.components.json_process.process_id
    os.kill(decoder, signal.SIGSTOP)
    head = f"POST /api/v1/streams/s0/reports HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    with server.connect() as client:
        client.sendall(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
        until(lambda: server.components.in_flight.bytes, "the whole body")
        assert server.client.get("/healthz").json()["status"] == "ok"
        assert sent(server, "/streams/s0/reports", batch(1)).json()["duplicates"] == 1
        os.kill(decoder, signal.SIGCONT)
        answer = everything(client)
    assert status_of(answer) == 200
    assert b'"duplicates":200' in answer


def test_what_a_large_body_holds_too_much_of_is_refused_by_name(server):
    tiny = b'{"seq":1,"step":1,"time":1},'
    answer = sent(server, "/streams/s0/reports", b'{"reports":[' + 6000 * tiny + tiny[:-1] + b"]}")
    error = answer.json()["error"]
    assert (answer.status_code, error["field"], error["limit"]) == (413, "reports", 5000)
    answer = sent(server, "/streams/s0/reports", b'{"reports":' + b"[" * 100_000)
    assert answer.status_code == 400
    layers = wire.encode_message(stream_create(layers=[layer(f"l{i}") for i in range(2000)]), wire.JSON)
    assert sent(server, "/runs/r1/streams", layers.replace(b'"rank":0', b'"rank":"0"')).status_code == 422


def test_one_bad_report_among_many_is_named_and_the_others_are_kept(server):
    body = batch(200)
    bad = body.replace(b'"seq":77,', b'"seq":"x",', 1)
    answer = sent(server, "/streams/s0/reports", bad).json()
    assert answer["accepted"] == 199
    assert [(entry["index"], entry["code"]) for entry in answer["rejected"]] == [(77, "unreadable")]


def test_the_server_goes_before_its_decoder(server):
    assert sent(server, "/streams/s0/reports", batch(200)).json()["accepted"] == 200
    urgent, patient = (os.getpriority(os.PRIO_PROCESS, of) for of in (0, server.components.json_process.process_id))
    assert patient > urgent


def test_a_decoder_that_dies_is_started_again_and_ends_with_the_server(tmp_path, server):
    assert sent(server, "/streams/s0/reports", batch(200)).json()["accepted"] == 200
    first = server.components.json_process.process_id
    os.kill(first, signal.SIGKILL)
    assert sent(server, "/streams/s0/reports", batch(200)).json()["duplicates"] == 200
    second = server.components.json_process.process_id
    assert second != first
    server.components.json_process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def decoder_after(server, body):
    """The process that is asked next, once it has answered."""
    answer = sent(server, "/streams/s0/reports", body)
    assert answer.status_code == 200, answer.text
    return server.components.json_process.process_id


def test_a_decoder_of_a_server_that_has_grown_goes_on(server):
    """Its own memory counts. A program inherits the peak of the one that started it, says `getrusage`."""
    grown = bytearray(b"x") * (2 * json_process._MOST_BYTES)
    assert len({decoder_after(server, batch(200)) for _ in range(3)}) == 1
    assert grown


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what a process has taken")
def test_a_decoder_that_has_grown_begins_anew(server):
    first = decoder_after(server, batch(200))
    tiny = b'{"seq":1,"step":1,"time":1},'
    assert (
        sent(server, "/streams/s0/reports", b'{"reports":[' + 590_000 * tiny + tiny[:-1] + b"]}").status_code == 413
    )
    assert decoder_after(server, batch(200)) != first


def test_a_stream_of_many_layers_is_the_same_as_json_and_as_msgpack(server):
    layers = [layer(f"block.{i}.weight") for i in range(1000)]
    message = stream_create("s1", layers=layers, rank=1, world_size=2)
    answer = sent(server, "/runs/r1/streams", wire.encode_message(message, wire.JSON))
    assert answer.status_code == 200, answer.text
    stored = server.client.get("/api/v1/runs/r1/layers").json()["layers"]
    assert [entry["name"] for entry in stored] == [*LAYERS, *(entry.name for entry in layers)]
    assert len(STATISTICS) > 1


def many_scalars(**more):
    """13 MB of msgpack: as many scalars as one batch may hold, all under names that must be looked at."""
    scalars = {f"{name:03}": 1.0 for name in range(wire.LIMITS["scalars_per_report"])}
    given: dict[str, Any] = {"step": 1, "time": 1.0, "scalars": scalars} | more
    reports = [wire.Report(seq=seq, **given) for seq in range(wire.LIMITS["reports_per_batch"])]
    return wire.ReportBatch(reports=reports)


def test_a_large_batch_is_neither_decoded_nor_checked_on_the_event_loop(server, monkeypatch):
    work = [(bodies, "decoded_batch"), (reports, "check_batch")]
    threads: dict[str, set[int]] = {name: set() for _, name in work}

    def noted(name, function):
        def call(*arguments):
            threads[name].add(threading.get_ident())
            return function(*arguments)

        return call

    for module, name in work:
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    body = wire.encode_batch(many_scalars(statistic_count=1, layer_count=1, statistics=bytes(8)))
    answer = server.client.post("/api/v1/streams/s0/reports", content=body, headers=MSGPACK)
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
