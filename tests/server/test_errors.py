"""Every route is described; bad input is answered in one shape, names the field, and nothing of it is stored."""

import re
from typing import Any

import msgspec
import numpy as np
import pytest
from fastapi.routing import APIRoute

from collage_monitor import wire
from tests.server.fuzz import fuzz, raw, target
from tests.server.guarded import guarded_server
from tests.server.samples import STATISTICS, block, report

JSON = {"Content-Type": wire.JSON}
OPEN = {"/healthz", "/readyz", "/docs"}
ALWAYS_ANSWERED = (
    *("catalogue", "/metrics", "/v1/runs", "/v1/run-table", "/v1/run-filters", "/v1/tokens"),
    *("/v1/audit", "/v1/events", "/v1/silences", "/v1/sign-in", "/v1/views"),
)


def routes(app):
    """(method, path) of every route, placeholders filled with ids that nothing has."""
    found = app.openapi()["paths"]
    for path, operations in found.items():
        for method in operations:
            filled = path
            for name in ("project", "run_id", "stream_id", "token_id", "incident_id"):
                filled = filled.replace("{" + name + "}", "unknown")
            yield method.upper(), filled


def shape(response):
    """The body, checked to be the one shape and nothing beside it."""
    body = response.json()
    assert list(body) == ["error"], response.text
    assert list(body["error"]) == ["code", "message", "field", "limit", "request_id"]
    assert body["error"]["request_id"] == response.headers["x-request-id"]
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.slow
def test_every_route_answers_errors_in_one_shape(server):
    seen = 0
    for method, path in routes(server.app):
        if path in {*OPEN, "/api/v1/alerts/test"} or (method == "GET" and path.endswith(ALWAYS_ANSWERED)):
            continue
        response = server.client.request(method, path, content=b"", headers=JSON)
        assert 400 <= response.status_code < 500, (method, path, response.status_code)
        shape(response)
        seen += 1
    assert seen >= 15


def references(node):
    """Every $ref below a node."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ()):
        if key == "$ref":
            yield value
        yield from references(value)


def test_every_route_is_described_and_its_page_loads_nothing(server):
    described = server.client.get("/openapi.json").json()
    routed = {r.path_format for r in server.app.routes if isinstance(r, APIRoute) and r.include_in_schema}
    assert routed == set(described["paths"])
    page = server.client.get("/docs").text
    assert [path for path in described["paths"] if path not in page] == []
    assert re.findall(r"""(?:src|href)=["']([^"']+)""", page) == ["/openapi.json"]
    assert "<script" not in page
    for reference in set(references(described)):
        node = described
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        assert node
    answers = described["paths"]["/api/v1/projects/{project}/runs"]["post"]["responses"]
    for status in ("200", "201"):
        assert answers[status]["content"][wire.JSON]["schema"] == {"$ref": "#/components/schemas/Run"}


def test_pages_for_people_load_nothing_and_a_slash_is_no_redirect(tmp_path):
    with guarded_server(tmp_path) as server:
        for path in ("/docs", "/", "/runs/a-run"):
            answer = server.client.get(path)
            assert (answer.status_code, answer.headers["content-type"][:9]) == (200, "text/html")
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert path == "/docs" or "collage-monitor serve dashboard --server-url" in answer.text
        answer = server.client.get("/docs/", follow_redirects=False)
        assert (answer.status_code, answer.headers["content-type"]) == (401, wire.JSON)
        answer = server.ask("GET", "/docs/")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_the_addresses_of_pages_lead_to_the_dashboard_that_the_settings_name(tmp_path):
    with guarded_server(tmp_path, dashboard_url="https://box.lan:7421/") as server:
        for path, page in (("/", ""), ("/runs/a%20run%3Fx", "run/a%20run%3Fx")):
            answer = server.client.get(path, follow_redirects=False)
            assert (answer.status_code, answer.headers["location"]) == (307, f"https://box.lan:7421/{page}")


def test_an_unknown_path_and_a_wrong_method_are_told_in_the_shape_never_html(server):
    for path in ("/api/v1/nope", "/api", "/api/v2/runs", "/nope", "/api/v1/runs/r1/series/x"):
        response = server.client.get(path)
        assert (response.status_code, response.headers["content-type"]) == (404, wire.JSON)
        assert path in shape(response)["message"]
    response = server.client.put("/api/v1/runs")
    assert (response.status_code, "GET" in response.headers["allow"]) == (405, True)
    assert shape(response)["code"] == "method_not_allowed"
    assert server.client.put("/api/v1/runs/r1").headers["allow"] == "DELETE, GET, PATCH"
    for given, comes_back in (("abc-123", True), ("a b\tc" * 30, False)):
        response = server.client.get("/api/v1/nope", headers={"X-Request-Id": given})
        assert (shape(response)["request_id"] == given) == comes_back, "when it is sane"


def test_a_bug_is_500_in_the_shape_without_its_text(tmp_path, monkeypatch):
    with target(tmp_path) as reached:
        monkeypatch.setattr(reached.store, "points", lambda *_: 1 / 0)
        response = reached.client.get("/api/v1/runs")
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["code"], "division" in error["message"]) == ("internal_error", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/runs/r1/series?metric=nonsense", 422, "metric"),
        ("/runs/r1/series?metric=state_decrement_ratio", 422, "metric"),
        ("/runs/r1/series?metric=edq_ratio/x", 422, "metric"),
        ("/runs/r1/series?metric=edq_ratio&pattern=a&layer=b", 422, "pattern"),
        ("/runs/r1/series?metric=loss&layer=embedding.weight", 422, "layer"),
        ("/runs/r1/series?metric=edq_ratio&points=0", 422, "points"),
        ("/runs/r1/series?metric=edq_ratio&axis=space", 422, "axis"),
        ("/runs/r1/series?metric=edq_ratio&from=-1", 422, "from"),
        ("/runs?limit=0", 422, "limit"),
        ("/runs?limit=abc", 422, "limit"),
        ("/runs?state=sleeping", 422, "state"),
        ("/runs?cursor=zz", 422, "cursor"),
        ("/runs/zz", 404, "run_id"),
        ("/runs/r1/series", 422, "metric"),
        ("/runs/r1/series?metric=edq_ratio&layer=zz", 404, "layer"),
        ("/runs/r1/series?metric=edq_ratio&pattern=zz*", 404, "pattern"),
        ("/runs/r1/series?metric=edq_ratio&rank=9", 404, "rank"),
        ("/runs/r1/heatmap?metric=loss", 422, "metric"),
        ("/runs/r1/heatmap?metric=edq_ratio&order=best", 422, "order"),
        ("/runs/r1/histogram?name=zz", 422, "name"),
        ("/runs/r1/histogram?step=1", 404, "step"),
        ("/runs/r1/worst?metric=zz", 422, "metric"),
        ("/runs/r1/worst?k=0", 422, "k"),
        ("/runs/r1/worst?pattern=zz*", 404, "pattern"),
        ("/runs/r1/worst?step=1", 404, "step"),
        ("/runs/r1/heatmap?metric=edq_ratio&pattern=zz*", 404, "pattern"),
        ("/runs/r1/histogram?step=20&from=10", 422, "step"),
        ("/runs/r1/histogram?pattern=a&layer=b", 422, "pattern"),
        ("/runs/r1/latest?rank=1", 422, "rank"),
        ("/runs?porject=p", 422, "porject"),
        ("/alerts-catalogue?metric=loss", 422, "metric"),
        ("/compare?metric=edq_ratio", 422, "run"),
        ("/compare?run=zz&metric=edq_ratio", 404, "run_id"),
        ("/compare?run=r1&metric=zz", 422, "metric"),
    ],
)
def test_bad_questions(filled, path, status, field):
    error = filled.get(path, status=status)
    assert (error.field, error.message != "") == (field, True)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, "body"),
        (b"{", 400, "body"),
        (b"[]", 400, "body"),
        (b"\xff\xfe", 400, "body"),
        (b"{}", 400, "body"),
        (b'{"run_id": 1}', 422, "run_id"),
        (b'{"run_id": ""}', 422, "run_id"),
        (b'{"run_id": "../x"}', 422, "run_id"),
        (b'{"run_id": "r", "tags": [""]}', 422, "tags[0]"),
        (b'{"run_id": "r", "resume": "perhaps"}', 422, "resume"),
        (b'{"run_id": "r", "seed": 9223372036854775808}', 422, "seed"),
        (b'{"run_id": "r", "config": {"lr": NaN}}', 400, "body"),
        (b'{"run_id": "r", "config": ' + b'{"a":' * 500 + b"1" + b"}" * 501, 422, "config"),
        (b"[" * 100_000, 400, "body"),
    ],
)
def test_bad_runs(filled, body, status, field):
    error = filled.post("/projects/p/runs", body, status=status, headers=JSON)
    assert error.field == field
    assert [run.run_id for run in filled.get("/runs", wire.RunPage).runs] == ["r1"]


def test_bad_configs_and_types_of_content(filled):
    for config, status, limit in (
        ({(1, 2): 3}, 422, None),
        ("a" * wire.LIMITS["config_bytes"], 413, wire.LIMITS["config_bytes"]),
    ):
        body = msgspec.msgpack.encode({"run_id": "r", "config": {"x": config}})
        error = filled.post("/projects/p/runs", body, status=status)
        assert (error.field, error.limit) == ("config", limit)
    error = filled.post("/projects/p/runs", b"{}", status=415, headers={"Content-Type": "text/plain"})
    assert error.code == "unsupported_media_type"


def changed(**fields):
    return msgspec.structs.replace(report(1, 20), **fields)


BAD_REPORTS: list[tuple[dict[str, Any], str, str]] = [
    ({"statistics": b"1234567"}, "bad_size", "statistics"),
    ({"model": b""}, "bad_size", "model"),
    ({"model": None}, "missing", "model"),
    ({"statistic_count": 0, "model": b"", "statistics": None}, "missing", "statistic_count"),
    ({"statistic_count": len(STATISTICS) + 1}, "undeclared", "statistic_count"),
    ({"layer_count": 4}, "undeclared", "layer_count"),
    ({"statistics": None, "model": None, "statistic_count": 2**40}, "undeclared", "statistic_count"),
    ({"time": float("nan")}, "bad_value", "time"),
    ({"time": float("inf")}, "bad_value", "time"),
    ({"scalars": {f"s{i}": 1.0 for i in range(wire.LIMITS["scalars_per_report"] + 1)}}, "too_many", "scalars"),
    ({"scalars": {"": 1.0}}, "bad_name", "scalars"),
    ({"scalars": {"x" * 513: 1.0}}, "bad_name", "scalars"),
]


def test_a_bad_report_is_named_and_its_neighbours_are_kept(server):
    server.filled(steps=())
    sent = [report(0, 10)]
    for fields, _, _ in BAD_REPORTS:
        sent += [changed(seq=len(sent), **fields), report(len(sent) + 1, 10 * len(sent) + 20)]
    answer = server.reports(sent)
    assert (answer.accepted, answer.duplicates) == (len(BAD_REPORTS) + 1, 0)
    named = [(entry.index, entry.seq, entry.code, entry.field) for entry in answer.rejected]
    places = range(1, len(sent), 2)
    assert named == [(at, at, *bad[1:]) for at, bad in zip(places, BAD_REPORTS, strict=True)]
    assert server.series("edq_ratio").steps == [made.step for made in sent[::2]]


@pytest.mark.slow
@pytest.mark.parametrize("content_type", [wire.MSGPACK, wire.JSON])
def test_so_is_one_that_cannot_be_decoded(server, content_type):
    server.filled(steps=())
    sent = [report(0, 10), *(changed(seq=place) for place in range(1, 7)), report(7, 30)]
    if content_type == wire.MSGPACK:
        sent += [changed(seq=8, step=40, model=b"short123"), report(9, 50)]
    module: Any = msgspec.json if content_type == wire.JSON else msgspec.msgpack
    batch = module.decode(wire.encode_batch(wire.ReportBatch(reports=sent), content_type))
    wrong = [("step", -1), ("step", "x"), ("seq", -3), ("time", [1]), ("scalars", {"loss": {}}), ("model", 7)]
    for place, (field, value) in enumerate(wrong, 1):
        batch["reports"][place][field] = value
    headers = {"Content-Type": content_type}
    answer = server.post("/streams/s0/reports", module.encode(batch), wire.BatchAnswer, headers=headers)
    unreadable, others = answer.rejected[: len(wrong)], answer.rejected[len(wrong) :]
    for place, (entry, (field, _)) in enumerate(zip(unreadable, wrong, strict=True), 1):
        assert (entry.index, entry.seq, entry.code) == (place, None if field == "seq" else place, "unreadable")
        assert entry.field.startswith(field)
    assert [(entry.index, entry.code) for entry in others] == ([] if module is msgspec.json else [(8, "bad_size")])
    assert answer.accepted == len(sent) - len(answer.rejected)
    assert f'collage_server_reports_total{{outcome="rejected"}} {len(answer.rejected)}.0' in server.get("/metrics")


def test_batches_that_are_too_large_for_no_stream_or_for_a_deleted_run(server):
    server.filled()
    limit = wire.LIMITS["reports_per_batch"]
    many = [report(i, i, measured=False, scalars={}) for i in range(limit + 1)]
    assert server.reports(many, status=413).limit == limit
    for length, status in ((64, 404), (65, 422)):
        error = server.reports([report(0, 10)], "s" * length, status=status)
        assert error.field == "stream_id"
    assert (error.code, error.limit, "at most 64 characters" in error.message) == ("unprocessable", 64, True)
    server.send("DELETE", "/runs/r1", kind=wire.Deleted)
    assert server.reports([report(9, 90)], status=410).code == "gone"
    assert server.get("/runs/r1", status=410).code == "gone"


def test_json_reports_with_strings_for_non_finite_numbers(server):
    server.filled(steps=())
    values = block(10)
    values[STATISTICS.index("lost"), 0] = np.nan
    batch = wire.ReportBatch(reports=[report(0, 10, values=values, scalars={"loss": float("inf")})])
    text = wire.encode_batch(batch, wire.JSON)
    assert b'"NaN"' in text
    answer = server.post("/streams/s0/reports", text, wire.BatchAnswer, headers=JSON)
    assert answer.accepted == 1
    assert server.series("lost", layer="embedding.weight").values == [None]
    assert server.series("loss").values == ["Infinity"]
    bare = b'{"reports": [{"seq": 1, "step": 2, "time": NaN}]}'
    assert server.post("/streams/s0/reports", bare, status=400, headers=JSON).field == "body"


def test_no_parameter_of_a_question_is_left_out(filled):
    for query, field in (
        ("metric=loss&axis=step&axis=time", "axis"),
        ("metric=edq_ratio&pattern=a*&pattern=b*", "pattern"),
        ("metric=loss&patern=a*", "patern"),
    ):
        assert filled.get(f"/runs/r1/series?{query}", status=422).field == field
        assert filled.get(f"/compare?run=r1&{query}", status=422).field == field
    filled.get("/compare?run=r1&run=r1&metric=loss", wire.Comparison)
    assert filled.series("validation_loss").values == [], "a reserved scalar that nobody logged"


def test_an_id_that_another_project_has_is_a_conflict_that_says_what_can_be_done(server):
    """It said to leave run_id out, which a request must have."""
    server.run("r1", project="p")
    error = server.post("/projects/q/runs", wire.RunCreate(run_id="r1"), status=409)
    assert error.field == "run_id"
    assert error.message.endswith("choose another run_id")


@pytest.mark.slow
@pytest.mark.parametrize("cases", [150, pytest.param(4500, marks=pytest.mark.nightly)])
def test_no_answer_to_a_short_fuzz_is_a_failure(tmp_path, cases):
    statuses, _ = fuzz(tmp_path, cases=cases, seed=7)
    assert sum(statuses.values()) == cases
    assert {200, 400, 404, 415, 422} <= set(statuses)


@pytest.mark.slow
def test_a_failure_is_found(tmp_path, monkeypatch):
    with target(tmp_path) as reached:
        monkeypatch.setattr(reached.state.memory.bodies, "receive", lambda _: 1 / 0)
        with pytest.raises(AssertionError, match="answered 500"):
            raw(reached, 20, 1)
