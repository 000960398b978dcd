"""OpenTelemetry's metrics become logged values of a run, each export once.

`otlp/*.bin` are two exports of opentelemetry-sdk 1.45.2 as its HTTP exporter sent them (gzip): gauges, a counter, a
histogram, a gauge of two devices. `*.json` are the same by protobuf's own conversion.
"""

import gzip
import json
import re
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from collage_server.api import otlp
from collage_server.errors import BadRequest
from collage_server.ingest import otlp_messages
from hypothesis import given
from hypothesis import strategies as st

from collage_monitor import wire
from tests.server.conftest import NOW, running
from tests.server.guarded import guarded_server

RECORDED = Path(__file__).with_name("otlp")
FIRST, SECOND = (gzip.decompress((RECORDED / f"step{step}.bin").read_bytes()) for step in (10, 20))
PROTOBUF = {"Content-Type": "application/x-protobuf"}
JSON = {"Content-Type": "application/json"}
GZIP = {"Content-Encoding": "gzip"}
MANY = b"\x0a\x00" * 60_001
"""Resources without metrics."""
TIME = 1_700_000_000 * 10**9
LOGGED: dict[str, list[float]] = {
    "loss": [2.5, 2.25],
    "learning_rate": [1e-3, 5e-4],
    "grad_norm_unclipped": [0.75, 0.5],
    "reward": [0.125, 0.25],
    "axolotl_tokens_total": [4096, 8192],
    "step_seconds/count": [2, 4],
    "step_seconds/sum": [0.75, 1.5],
    "gpu_memory_bytes/device=0": [2**30, 2**30],
    "gpu_memory_bytes/device=1": [2**31, 2**31],
}


def sent(server, body, headers=PROTOBUF, status=200):
    answer = server.client.post("/v1/metrics", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    if status >= 400:
        return wire.decode_message(answer.content, wire.ErrorAnswer, wire.JSON).error
    assert answer.headers["Content-Type"] == headers["Content-Type"]
    return answer.content


def logged(server, name, run_id="run-7"):
    series = server.series(name, run_id)
    return dict(zip(series.steps, series.values, strict=True))


def resource_of(*points, name="loss", **attributes):
    """A gauge's (time in seconds after `TIME`, value, attributes of the point)."""

    def told(given):
        return [{"key": key, "value": {"stringValue": value}} for key, value in given.items()]

    shown = [
        {"timeUnixNano": str(TIME + int(1e9 * time)), "asDouble": value, "attributes": told(dict(*more))}
        for time, value, *more in points
    ]
    resource = {"attributes": told({"service.instance.id": "run-7"} | attributes)}
    return {"resource": resource, "scopeMetrics": [{"metrics": [{"name": name, "gauge": {"dataPoints": shown}}]}]}


def export(*points, **more):
    """A message of one resource, as JSON."""
    return json.dumps({"resourceMetrics": [resource_of(*points, **more)]})


def partial(answer):
    told = json.loads(answer).get("partialSuccess", {})
    return int(told.get("rejectedDataPoints", 0)), told.get("errorMessage", "")


@pytest.mark.parametrize("form", ["protobuf", "gzip", "json"])
def test_an_exporter_s_values_are_logged_under_their_step(server, form):
    for step, body in ((10, FIRST), (20, SECOND)):
        packed, as_json = ((RECORDED / f"step{step}.{ending}").read_bytes() for ending in ("bin", "json"))
        content, headers, answer = {
            "protobuf": (body, PROTOBUF, b""),
            "gzip": (packed, PROTOBUF | GZIP, b""),
            "json": (as_json, JSON, b"{}"),
        }[form]
        assert sent(server, content, headers) == answer
    for name, values in LOGGED.items():
        assert logged(server, name) == dict(zip((10, 20), values, strict=True)), name
    run = server.get("/runs/run-7", wire.Run)
    assert (run.project, run.name, run.last_step, run.state) == ("default", "axolotl", 20, "running")
    assert run.config["host.name"] == "node1"
    assert set(run.scalars) == set(LOGGED)


@pytest.mark.parametrize("reload", [False, True])
def test_a_repeated_export_is_stored_once_and_one_out_of_order_is_kept(server, reload):
    sent(server, SECOND)
    assert [sent(server, body) for body in (FIRST, SECOND, FIRST)] == [b"", b"", b""]
    if reload:
        server.seal("run-7")
        server.state.registry.forget_run("run-7")
        assert sent(server, FIRST) == b""
    [stream] = server.get("/runs/run-7/streams", wire.StreamList).streams
    assert (stream.reports, stream.last_seq, stream.missing) == (2, 1, 0)
    assert logged(server, "loss") == {10: 2.5, 20: 2.25}


def test_the_step_is_the_point_s_own_or_counted_and_other_attributes_name_it(server):
    """A batch that is split by a collector has one time, and so one step; what is called a step may be none."""
    for body in (
        export((1, 3.0)),
        export((1, 0.5), name="lr"),
        export((2, 2.0), (3, 1.0)),
        export((1, 3.0)),
        export((1, 2.5), name="step"),
        export((2, 4.0, {"step": "warmup"})),
        export((1, 3.0, {"step": "40", "split": "a"}), (1, 2.0, {"step": "50", "split": "a"})),
    ):
        assert sent(server, body, JSON) == b"{}"
    for name, values in (
        ("loss", {1: 3.0, 2: 2.0, 3: 1.0}),
        ("learning_rate", {1: 0.5}),
        ("step", {1: 2.5}),
        ("loss/step=warmup", {2: 4.0}),
        ("loss/split=a", {40: 3.0, 50: 2.0}),
    ):
        assert logged(server, name) == values, name


def test_the_run_may_be_named_by_an_attribute_beside_an_agent_s(server):
    """The agent's run keeps its name, its steps and its sign of life; the names begin with the second writer's."""
    server.filled("r1")
    before = server.get("/runs/r1", wire.Run)
    sent(server, export((1, 3.0, {"step": "7000"}), **{"collage.run_id": "r1", "service.name": "other"}), JSON)
    assert logged(server, "otlp/loss", "r1") == {7000: 3.0}
    after = server.get("/runs/r1", wire.Run)
    assert (after.name, after.config, after.last_step) == (before.name, before.config, before.last_step)


@pytest.mark.slow
def test_what_is_not_kept_is_told_as_the_protocol_says(server):
    bad = resource_of((1, 3.0), name="x" * 600)
    both = json.dumps({"resourceMetrics": [bad, resource_of((1, 3.0))]})
    count, why = partial(sent(server, both, JSON))
    assert (count, "have 1 to 512 characters" in why) == (1, True)
    assert sent(server, json.dumps({"resourceMetrics": [bad]}), JSON, 422).code == "unprocessable"
    count, why = partial(sent(server, export((2, 3.0), (2, 4.0)), JSON))
    assert (count, why.startswith("'loss' comes twice at one time: ")) == (1, True)
    assert otlp_messages.response(300, "why", PROTOBUF["Content-Type"]) == b"\x0a\x08\x08\xac\x02\x12\x03why"
    bomb = gzip.compress(bytes(64 * 2**20))
    assert "send_batch_max_size" in sent(server, bomb, PROTOBUF | GZIP, 413).message, "before it is unpacked"


def test_older_exports_than_are_known_are_told_and_numbers_that_are_none_come_in_both_forms(server):
    sent(server, export((1, "NaN"), (2, "-Infinity"), (3, 1), name="reward"), JSON)
    assert repr(logged(server, "reward")) == "{1: 'NaN', 2: '-Infinity', 3: 1.0}"
    with pytest.raises(ValueError, match="asDouble has wire type 0"):
        otlp_messages._read(memoryview(b"\x20\x01"), otlp_messages._NUMBER, iter(()))
    number = memoryview(b"\x21" + struct.pack("<d", -0.5))
    assert otlp_messages._read(number, otlp_messages._NUMBER, iter(())) == {"asDouble": -0.5}
    for first in range(4, 204, 50):
        sent(server, export(*((time, 1.0) for time in range(first, first + 50))), JSON)
    count, why = partial(sent(server, export((9, 2.0), (304, 4.0)), JSON))
    assert (count, why[:41]) == (1, "older than the 128 newest exports of this")
    assert partial(sent(server, export((154, 1.0)), JSON)) == (0, "")
    assert len(logged(server, "loss")) == 201


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "headers", "status", "told"),
    [
        (b"\x0a\x05ab", PROTOBUF, 400, "no ExportMetricsServiceRequest of OTLP in application/x-protobuf: field 1"),
        (b"\x08\x01", PROTOBUF, 400, "resourceMetrics has wire type 0"),
        (b"\xff" * 11, PROTOBUF, 400, "a number is cut off or too long"),
        (b"{", JSON, 400, "no ExportMetricsServiceRequest of OTLP in application/json"),
        (b"[" * 100_000, JSON, 400, "no ExportMetricsServiceRequest"),
        (MANY, PROTOBUF, 400, "more than 60000 data points"),
        (b'{"resourceMetrics": [' + b"{}," * 60_000 + b"{}]}", JSON, 400, "more than 60000 data points"),
        (b"\0" * (2**20 + 1), PROTOBUF, 413, "send_batch_max_size"),
        (b"x", PROTOBUF | GZIP, 400, "not gzip"),
        (b"x", {"Content-Type": "application/msgpack"}, 415, "application/x-protobuf or application/json"),
        (export((1, 1.0)).replace('"asDouble": 1.0', f'"asInt": 1{"0" * 400}'), JSON, 400, "asInt"),
        (export((1, 1.0)).replace('"asDouble": 1.0', '"asInt": null'), JSON, 422, "has no value"),
        (export((1, 1.0), **{"service.instance.id": ""}), JSON, 422, "collage.run_id=ID"),
        (export((1, 1.0), **{"service.instance.id": "a/b"}), JSON, 422, "attributes make no run: .*run_id"),
        (export((-1_700_000_000, 1.0)), JSON, 422, "no time_unix_nano"),
    ],
)
def test_a_bad_export_is_refused_in_words(server, body, headers, status, told):
    assert re.search(told, sent(server, body, headers, status).message)
    assert server.get("/runs", wire.RunPage).runs == []


@pytest.mark.slow
@given(st.one_of(st.binary(max_size=60), st.tuples(st.integers(0, len(FIRST) - 1), st.integers(0, 255))))
def test_whatever_comes_is_read_or_refused(given):
    body = given
    if isinstance(given, tuple):
        body = bytearray(FIRST)
        body[given[0]] = given[1]
    with suppress(BadRequest):
        otlp._sources(otlp_messages.export_in(bytes(body), PROTOBUF["Content-Type"]), otlp._Refused())


def test_a_token_counts_as_everywhere(tmp_path):
    with guarded_server(tmp_path) as server:

        def ask(secret, body=FIRST, headers=PROTOBUF):
            given = headers | ({} if secret is None else {"Authorization": f"Bearer {secret}"})
            return server.client.post("/v1/metrics", content=body, headers=given).status_code

        reader, (mine, theirs) = server.token("read")[0], (server.token("ingest", [name])[0] for name in ("a", "b"))
        assert [ask(None), ask(reader), ask(mine), ask(mine, SECOND), ask(theirs)] == [401, 403, 200, 200, 409]
        assert ask(theirs, export((1, 1.0), **{"collage.run_id": "x", "collage.project": "a"}), JSON) == 403
        assert server.ask("GET", "/api/v1/runs/run-7").json()["project"] == "a"
        assert server.ask("DELETE", "/api/v1/runs/run-7").status_code == 200
        assert ask(mine) == 410


def test_what_was_numbered_stays_so_over_a_start(settings, clock):
    for _ in range(2):
        with running(settings, clock) as server:
            sent(server, FIRST)
            [stream] = server.get("/runs/run-7/streams", wire.StreamList).streams
            assert stream.reports == 1
            assert server.state.clock() == NOW
