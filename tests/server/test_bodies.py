"""Request bodies: gzip is as plain, too much is refused early, threads decode, slow ones hold up nobody."""

import gzip
import sys
import threading
import tracemalloc
import zlib
from collections import Counter
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from collage_server.api import bodies, reports
from collage_server.api.bodies import decompress
from collage_server.errors import Busy, TooLarge
from collage_server.ingest.report_checks import decoded_batch
from collage_server.memory_budget import BodyBudget
from collage_server.settings import FixedLimits

from collage_monitor import wire
from tests.server.conftest import Clock, holding, running
from tests.server.guarded import OWN, GuardedServer
from tests.server.samples import LAYERS, layer, report, stream_create
from tests.server.sockets import everything, listening, status_of
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow

MIB = 2**20
JSON = {"Content-Type": wire.JSON}
GZIP = {"Content-Encoding": "gzip"}
CHUNKED = {"Transfer-Encoding": "chunked"}
REPORTS = "/streams/s0/reports"


def batch(count, content_type=wire.MSGPACK):
    return wire.encode_batch(wire.ReportBatch(reports=[report(i, i + 1) for i in range(count)]), content_type)


def test_what_is_sent_in_gzip_arrives_as_if_plain(server):
    server.filled(steps=())
    for body, headers, counted in ((gzip.compress(batch(50)), GZIP, (50, 0)), (batch(50), {}, (0, 50))):
        answer = server.post(REPORTS, body, wire.BatchAnswer, headers=headers)
        assert (answer.accepted, answer.duplicates) == counted
    body = gzip.compress(wire.encode_message(wire.RunCreate(run_id="r2", notes="n" * 10_000)))
    assert server.post("/projects/p/runs", body, wire.Run, status=201, headers=GZIP).notes == "n" * 10_000


def test_damaged_bodies_are_400_and_other_encodings_415(server):
    whole = gzip.compress(bytes(range(256)) * 40)
    damaged = [(body, "gzip", 400, "body", "gzip") for body in (whole[:-1], whole + b"x", b"", b"x" * 40)]
    others = ("br", "zstd", "gzip, gzip", "deflate", "")
    unknown = [(b"x", encoding, 415, "Content-Encoding", "send gzip") for encoding in others]
    for body, encoding, status, field, told in [*damaged, *unknown]:
        error = server.post(REPORTS, body, status=status, headers={"Content-Encoding": encoding})
        assert error.field == field
        assert told in error.message


def test_a_quarter_of_a_gigabyte_behind_a_small_body_is_413_and_costs_little_memory():
    stream = zlib.compressobj(9, wbits=31)
    body = b"".join([stream.compress(bytes(MIB)) for _ in range(256)]) + stream.flush()
    assert len(body) < MIB // 2
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge) as caught:
            decompress(body, 64 * MIB)
        assert tracemalloc.get_traced_memory()[1] < 150 * MIB
    finally:
        tracemalloc.stop()
    assert caught.value.limit == 64 * MIB


def test_a_body_beyond_its_limit_is_413_whether_or_not_it_says_so(server, monkeypatch):
    """JSON may not grow beyond what it may be as it is sent."""
    monkeypatch.setattr(bodies, "_DECOMPRESSED_BYTES", 3000)
    monkeypatch.setattr(bodies, "_JSON_BYTES", 1000)
    for content, headers, limit in (
        (gzip.compress(b"x" * 3001), GZIP, 3000),
        (gzip.compress(b"x" * 1001), JSON | GZIP, 1000),
        (b"x" * 1001, JSON, 1000),
        (iter([b"x" * 600, b"x" * 600]), JSON, 1000),
    ):
        answer = server.sent(body=content, **headers)
        assert (answer.status_code, answer.json()["error"]["limit"]) == (413, limit)


def test_what_is_decompressed_counts_as_in_flight(settings):
    body = gzip.compress(b"x" * 20_000)
    with running(settings, limits=FixedLimits(in_flight_bytes=10_000)) as server:
        budget = server.state.memory.bodies
        assert server.sent(body=body, **GZIP).status_code == 400, "decompressed, and found to be no batch"
        with holding(budget, 5_000):
            assert server.sent(body=body, **GZIP).status_code == 503
        assert budget.bytes == 0


@contextmanager
def at_a_socket(folder, **more):
    """A server behind a socket as it is asked with its own token; `listener` is that socket."""
    with (
        listening(folder, token=OWN, **more) as listener,
        httpx.Client(base_url=f"http://127.0.0.1:{listener.port}", timeout=PATIENCE_SECONDS) as client,
    ):
        client.headers["Authorization"] = f"Bearer {OWN}"
        server: Any = GuardedServer(client, Clock(), listener.app)
        server.listener = listener
        yield server


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    with at_a_socket(tmp_path_factory.mktemp("large")) as server:
        server.filled(steps=())
        yield server


def test_json_beyond_a_mebibyte_is_refused_and_told_what_to_send(large):
    """Its decoder holds the interpreter until it is done."""
    body = batch(1, wire.JSON).ljust(MIB)
    assert large.post(REPORTS, body, wire.BatchAnswer, headers=JSON).accepted == 1
    for path, longer, headers in (
        (REPORTS, body + b" ", JSON),
        ("/runs/r1/streams", body + b" ", JSON),
        (REPORTS, gzip.compress(body + b" "), JSON | GZIP),
    ):
        error = large.post(path, longer, status=413, headers=headers)
        assert (error.field, error.limit) == ("body", MIB)
        assert f"send {wire.MSGPACK}" in error.message


def test_what_a_large_body_holds_too_much_of_is_refused_by_name(large):
    tiny = b'{"seq":1,"step":1,"time":1},'
    error = large.post(REPORTS, b'{"reports":[' + 6000 * tiny + tiny[:-1] + b"]}", status=413, headers=JSON)
    assert (error.field, error.limit) == ("reports", 5000)
    large.post(REPORTS, b'{"reports":' + b"[" * 100_000, status=400, headers=JSON)
    layers = wire.encode_message(stream_create(layers=[layer(f"l{i}") for i in range(2000)]), wire.JSON)
    large.post("/runs/r1/streams", layers.replace(b'"rank":0', b'"rank":"0"'), status=422, headers=JSON)


def test_a_stream_of_many_layers_as_json(large):
    layers = [layer(f"block.{i}.weight") for i in range(1000)]
    message = wire.encode_message(stream_create("s1", layers=layers, rank=1, world_size=2), wire.JSON)
    large.post("/runs/r1/streams", message, wire.Stream, headers=JSON)
    stored = large.get("/runs/r1/layers", wire.LayerList).layers
    assert [entry.name for entry in stored] == [*LAYERS, *(entry.name for entry in layers)]


def many_scalars(count=wire.LIMITS["reports_per_batch"], **more):
    """13 MB of msgpack: as many scalars as one batch may hold, all under names that must be looked at."""
    scalars = {f"{name:03}": 1.0 for name in range(wire.LIMITS["scalars_per_report"])}
    given: dict[str, Any] = {"step": 1, "time": 1.0, "scalars": scalars} | more
    return wire.ReportBatch(reports=[wire.Report(seq=seq, **given) for seq in range(count)])


@pytest.mark.parametrize(("content_type", "count"), [(wire.MSGPACK, 5000), (wire.JSON, 300)])
def test_a_large_batch_is_neither_decoded_nor_checked_on_the_event_loop(large, monkeypatch, content_type, count):
    threads: dict[str, set[int]] = {"decoded_batch": set(), "check_batch": set()}

    def noted(name, function):
        def call(*arguments):
            threads[name].add(threading.get_ident())
            return function(*arguments)

        return call

    for module, name in zip((bodies, reports), threads, strict=True):
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    sent_batch = many_scalars(count, statistic_count=1, layer_count=1, statistics=bytes(8))
    answer = large.sent(body=wire.encode_batch(sent_batch, content_type), **{"Content-Type": content_type})
    assert {entry["code"] for entry in answer.json()["rejected"]} == {"missing"}
    event_loop = {large.listener.thread.ident}
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


@pytest.fixture
def slow(tmp_path):
    """Runs of the projects `slow` and `quick`; 16 MiB may be in flight."""
    with at_a_socket(tmp_path, limits={"in_flight_bytes": 2**24}) as server:
        for project in ("slow", "quick"):
            server.fill(project, project)
        yield server


def statuses(server, run_id, seqs, secret=OWN):
    """What small batches of one report are answered."""
    path = f"/api/v1/streams/{run_id}-s/reports"
    batches = [wire.encode_batch(wire.ReportBatch(reports=[report(seq, 10 * seq + 10)])) for seq in seqs]
    return [server.ask("POST", path, secret, batch).status_code for batch in batches]


def head(run_id="slow", secret=OWN, **headers):
    lines = [f"POST /api/v1/streams/{run_id}-s/reports HTTP/1.1", "Host: 127.0.0.1"]
    given = {"Authorization": f"Bearer {secret}", "Content-Type": wire.MSGPACK} | headers
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in given.items()), "", ""]).encode()


def begun(server, size, secret=OWN, **headers):
    """A connection that has sent its head and `size` bytes of its body, all of them received."""
    budget, client = server.state.memory.bodies, server.listener.connect()
    before = budget.arriving
    client.sendall(head(secret=secret, **headers))
    chunk = b"%x\r\n" % size + b"\x80" * size + b"\r\n" if "Transfer-Encoding" in headers else b"\x80" * size
    client.sendall(chunk if size else b"")
    until(lambda: budget.arriving >= before + size, "the body's beginning")
    return client


def test_idle_and_slow_senders_keep_nobody_out_though_a_commit_was_slow(slow):
    budget = slow.state.memory.bodies
    idle = [begun(slow, 0, **CHUNKED) for _ in range(8)]
    assert statuses(slow, "quick", range(4)) == [200] * 4
    budget.waited(1.0, 1)
    assert budget.allowed == MIB
    idle.append(begun(slow, 3 * MIB, **{"Content-Length": 8 * MIB}))
    assert statuses(slow, "quick", range(4, 8)) == [200] * 4
    for client in idle:
        client.close()
    until(lambda: budget.arriving == 0, "their room")


def test_a_token_and_a_project_leave_room_for_others(slow):
    mine, theirs = (slow.token("ingest", [project])[0] for project in ("slow", "quick"))
    limit = slow.state.memory.bodies.limit
    held = [begun(slow, limit // 5, secret=mine, **{"Content-Length": limit}) for _ in range(2)]
    with slow.listener.connect() as client:
        client.sendall(head(secret=mine, **{"Content-Length": limit // 5, "Connection": "close"}))
        client.sendall(b"\x80" * (limit // 5))
        assert status_of(everything(client)) == 503
    assert statuses(slow, "quick", [0], theirs) == [200]
    assert statuses(slow, "slow", [0], mine) == [200], "what is small fits into what is left of the share"
    for client in held:
        client.close()


def test_a_share_is_of_the_token_and_of_the_project():
    budget = BodyBudget(100)
    with budget.receive(["token a", "project p"]) as first, budget.receive(["token b", "project p"]) as second:
        first.arrive(40)
        with pytest.raises(Busy, match="project p holds 40 bytes"):
            second.arrive(30)
        with budget.receive(["token b", "project q"]) as third:
            third.arrive(30)
            with pytest.raises(Busy, match="token b holds 30"):
                third.arrive(10)
        first.resize(50)
        assert (budget.bytes, budget.arriving) == (50, 0)
    assert (budget.bytes, budget.arriving, dict(budget.held_by)) == (0, 0, {})


def test_a_body_is_waited_for_as_long_as_it_comes(slow, monkeypatch):
    """Whoever sends something is given time for more; who sends nothing is not, whatever the header promised."""
    monkeypatch.setattr(bodies, "_PATIENCE_SECONDS", 0.2)
    with begun(slow, 10, **CHUNKED) as client:
        assert b"did not arrive within" in everything(client)
    monkeypatch.setattr(bodies, "_SLOWEST_BYTES_A_SECOND", 1)
    body = batch(1)
    with slow.listener.connect() as client:
        client.sendall(head("quick", **{"Content-Length": len(body), "Connection": "close"}) + body[:60])
        until(lambda: slow.state.memory.bodies.arriving == 60, "the beginning")
        with begun(slow, 0, **CHUNKED) as idle:
            assert status_of(everything(idle)) == 503, "begun later, and given up before"
        client.sendall(body[60:])
        assert status_of(everything(client)) == 200
