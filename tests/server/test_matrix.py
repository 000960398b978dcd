"""Every route with every role: no token, the wrong project, the right one. The expectation is written out here."""

from __future__ import annotations

from pathlib import Path

import pytest
from collage_server.auth.roles import RULES, matrix
from collage_server.store import NewIncident
from collage_server.store.runs.incidents import incident_id_of

from collage_monitor import wire
from tests.server.conftest import NOW
from tests.server.guarded import PROJECTS, guarded_server
from tests.server.samples import report, stream_create

ROOT = Path(__file__).parents[2]
EVERYONE = {"ingest", "read", "operate", "admin"}
SENDERS = {"ingest", "operate", "admin"}
READERS = {"read", "operate", "admin"}
ALLOWED: dict[str, set[str] | None] = {
    "GET /healthz": None,
    "GET /readyz": None,
    "GET /docs": None,
    "GET /openapi.json": None,
    "GET /": None,
    "GET /runs/{run_id}": None,
    "GET /metrics": READERS,
    "GET /api/v1/metrics-catalogue": EVERYONE,
    "GET /api/v1/alerts-catalogue": EVERYONE,
    "POST /api/v1/projects/{project}/runs": SENDERS,
    "POST /api/v1/runs/{run_id}/attempts": SENDERS,
    "POST /api/v1/runs/{run_id}/streams": SENDERS,
    "POST /api/v1/streams/{stream_id}/reports": SENDERS,
    "POST /api/v1/alerts/alertmanager": SENDERS,
    "GET /api/v1/runs/{run_id}/alerts": EVERYONE,
    "PATCH /api/v1/runs/{run_id}": SENDERS,
    "DELETE /api/v1/runs/{run_id}": {"operate", "admin"},
    "GET /api/v1/runs": READERS,
    "GET /api/v1/runs/{run_id}": READERS,
    "GET /api/v1/runs/{run_id}/overview": READERS,
    "GET /api/v1/run-table": READERS,
    "GET /api/v1/run-groups": READERS,
    "GET /api/v1/run-filters": READERS,
    "GET /api/v1/runs/{run_id}/streams": READERS,
    "GET /api/v1/runs/{run_id}/layers": READERS,
    "GET /api/v1/runs/{run_id}/latest": READERS,
    "GET /api/v1/runs/{run_id}/worst": READERS,
    "GET /api/v1/runs/{run_id}/series": READERS,
    "GET /api/v1/runs/{run_id}/heatmap": READERS,
    "GET /api/v1/runs/{run_id}/histogram": READERS,
    "GET /api/v1/runs/{run_id}/events": READERS,
    "GET /api/v1/runs/{run_id}/export": READERS,
    "GET /api/v1/compare": READERS,
    "GET /api/v1/events": READERS,
    "GET /api/v1/events/{incident_id}": READERS,
    "POST /api/v1/runs/{run_id}/notes": {"operate", "admin"},
    "POST /api/v1/events/{incident_id}/acknowledge": {"operate", "admin"},
    "GET /api/v1/silences": READERS,
    "POST /api/v1/silences": {"operate", "admin"},
    "GET /api/v1/tokens": {"admin"},
    "POST /api/v1/tokens": {"admin"},
    "DELETE /api/v1/tokens/{token_id}": {"admin"},
    "GET /api/v1/audit": {"admin"},
}
"""Route → roles that may use it; None is everyone, without a token too. A new route breaks this test on purpose:
give it a rule in `collage_server.auth.roles`, a row here, and print the table into docs/access.md."""
QUERIES = {
    "series": "metric=loss",
    "heatmap": "metric=edq_ratio",
    "compare": "run=mine-1&metric=loss",
    "run-groups": "by=strategy",
}
BODIES = {
    "runs": wire.RunCreate(run_id="fresh"),
    "attempts": wire.AttemptCreate(launch_id="again", first_step=5),
    "streams": stream_create("mine-1-other", "mine-1-launch", rank=1),
    "reports": wire.ReportBatch(reports=[report(1, 20)]),
    "alertmanager": wire.AlertmanagerMessage(
        alerts=[wire.AlertmanagerAlert(status="firing", labels={"run_id": "mine-1"})]
    ),
    "acknowledge": None,
    "notes": wire.NoteCreate(text="the cooling of node 3 failed"),
    "silences": wire.SilenceCreate(seconds=60.0, project="mine"),
    "tokens": wire.TokenCreate(name="another", role="read", projects=["mine"]),
}
FIRING = NewIncident(
    alert="CollageEdqLow",
    severity="warning",
    source="server",
    labels={"run_id": "mine-1"},
    text="EDQ is low",
    started_at=NOW,
    run_id="mine-1",
    project="mine",
)
INCIDENT = incident_id_of(FIRING)


def request_of(route):
    """(method, path, message) of a question about the project `mine` that succeeds where it is allowed."""
    method, template = route.split(" ")
    ids = {
        "project": "mine",
        "run_id": "mine-1",
        "stream_id": "mine-1-s",
        "token_id": "victim",
        "incident_id": INCIDENT,
    }
    path = template.format(**ids)
    last = template.rpartition("/")[2]
    if method == "GET" and last in QUERIES:
        path += "?" + QUERIES[last]
    if method == "PATCH":
        return method, path, wire.RunUpdate(notes="seen")
    return method, path, BODIES[last] if method == "POST" else None


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with guarded_server(tmp_path_factory.mktemp("matrix")) as opened:
        for project in PROJECTS:
            opened.fill(project, f"{project}-1")
        opened.app.state.collage.store.incidents.fire(FIRING, FIRING.started_at)
        yield opened


@pytest.fixture(scope="module")
def secrets(guarded):
    """(role, project) → secret; an administrator's is for every project."""
    found = {(role, p): guarded.token(role, [p])[0] for role in ("ingest", "read", "operate") for p in PROJECTS}
    return found | {("admin", "mine"): guarded.token("admin")[0]}


def test_every_route_has_a_row(guarded):
    described = {
        f"{method.upper()} {path}"
        for path, operations in guarded.app.openapi()["paths"].items()
        for method in operations
    }
    assert described | {"GET /docs", "GET /openapi.json", "GET /", "GET /runs/{run_id}"} == set(ALLOWED)
    assert {f"{method} {path}" for method, path in RULES} == set(ALLOWED)


@pytest.mark.parametrize("route", ALLOWED)
def test_without_a_token(guarded, route):
    method, path, message = request_of(route)
    answer = guarded.ask(method, path, None, message)
    assert answer.status_code == (200 if ALLOWED[route] is None else 401)


@pytest.mark.parametrize("role", sorted(EVERYONE))
@pytest.mark.parametrize("route", ALLOWED)
def test_with_a_token_of_the_project(guarded, secrets, route, role, request):
    method, path, message = request_of(route)
    if route == "DELETE /api/v1/runs/{run_id}":
        doomed = f"mine-{role}"
        guarded.fill("mine", doomed)
        path = f"/api/v1/runs/{doomed}"
    if route == "DELETE /api/v1/tokens/{token_id}":
        path = f"/api/v1/tokens/{guarded.token('read', ['mine'])[1].token_id}"
    answer = guarded.ask(method, path, secrets[role, "mine"], message)
    allowed = ALLOWED[route]
    if allowed is None or role in allowed:
        assert answer.is_success, (route, role, answer.text)
    else:
        assert answer.status_code == 403, (route, role)
        assert answer.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize("role", ["ingest", "operate", "read"])
@pytest.mark.parametrize(
    "route",
    [route for route, roles in ALLOWED.items() if roles is not None and ("{" in route or "compare" in route)],
)
def test_with_a_token_of_another_project(guarded, secrets, route, role):
    method, path, message = request_of(route)
    answer = guarded.ask(method, path, secrets[role, "theirs"], message)
    if role not in (ALLOWED[route] or ()) or "{project}" in route:
        assert answer.status_code == 403, (route, role)
        return
    assert answer.status_code == 404, (route, role)
    unknown = guarded.ask(method, path.replace("mine-1", "never-seen"), secrets[role, "theirs"], message)
    for name in ("code", "field", "limit"):
        assert answer.json()["error"][name] == unknown.json()["error"][name]
    assert answer.json()["error"]["message"].replace("mine-1", "never-seen") == unknown.json()["error"]["message"]


def test_an_unknown_route_and_a_route_without_a_rule_are_closed(guarded, secrets):
    for role in ("ingest", "read", "operate"):
        for method, path in (("GET", "/api/v1/nope"), ("PUT", "/api/v1/runs"), ("DELETE", "/api/v1/audit")):
            answer = guarded.ask(method, path, secrets[role, "mine"])
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
    assert guarded.ask("PUT", "/api/v1/runs").status_code == 405


def test_the_printed_matrix_is_this_one():
    text = (ROOT / "docs" / "access.md").read_text(encoding="utf-8")
    assert matrix() in text, "print it again: python -m collage_server.auth.roles"
