"""Every route with every role: no token, the wrong project, the right one. docs/access.md says what is expected.

All of it again with sessions of people who signed in through a provider.
"""

import secrets as random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from collage_server.auth.roles import RULES, matrix
from collage_server.store import NewIncident
from collage_server.store.runs.incidents import incident_id_of

from collage_monitor import wire
from tests import provider as providers
from tests.server.conftest import NOW
from tests.server.guarded import PROJECTS, guarded_server
from tests.server.samples import report, stream_create

pytestmark = providers.MARK
ROOT = Path(__file__).parents[2]
PRINTED = (ROOT / "docs" / "access.md").read_text(encoding="utf-8")
TABLE = PRINTED[PRINTED.index("| Route |") :].partition("\n\n")[0].splitlines()
ROWS = [row.strip("| ").split(" | ") for row in TABLE if "---" not in row]
ROLES = ROWS[0][2:]
ALLOWED = {
    route.strip("`"): None
    if anybody == "yes"
    else {role for role, may in zip(ROLES, cells, strict=True) if may == "yes"}
    for route, anybody, *cells in ROWS[1:]
}
"""Route → roles that may use it, as `docs/access.md` says; None is everyone, without a token too. A new route
breaks this test on purpose: give it a rule in `collage_server.auth.roles`, and print the table there."""
PAGES = {"GET /", "GET /runs/{run_id}"}
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
    "notes": wire.NoteCreate(text="the cooling of node 3 failed"),
    "silences": wire.SilenceCreate(seconds=60.0, project="mine"),
    "views": wire.SavedViewCreate(name="mine", search="state=failed"),
    "tokens": wire.TokenCreate(name="another", role="read", projects=["mine"]),
}
RESOURCE = {"attributes": [{"key": "collage.run_id", "value": {"stringValue": "mine-1"}}]}
LOSS = {"name": "loss", "gauge": {"dataPoints": [{"timeUnixNano": "1", "asInt": "2"}]}}
EXPORT = {"resourceMetrics": [{"resource": RESOURCE, "scopeMetrics": [{"metrics": [LOSS]}]}]}
"""A trainer's export to OTLP's route."""
OF_RUN: dict[str, Any] = {"labels": {"run_id": "mine-1"}, "run_id": "mine-1", "project": "mine", "started_at": NOW}
FIRING = NewIncident(alert="CollageEdqLow", severity="warning", source="server", text="EDQ is low", **OF_RUN)
INCIDENT = incident_id_of(FIRING)


def request_of(route):
    """(method, path, message) of a question about the project `mine` that succeeds where it is allowed."""
    method, template = route.split(" ")
    ids = {"project": "mine", "run_id": "mine-1", "stream_id": "mine-1-s", "token_id": "victim"}
    path = template.format(**ids, incident_id=INCIDENT)
    last = template.rpartition("/")[2]
    if method == "GET" and last in QUERIES:
        path += "?" + QUERIES[last]
    if method == "DELETE" and last == "views":
        path += "?name=mine"
    if method == "PATCH":
        return method, path, wire.RunUpdate(notes="seen")
    return method, path, BODIES.get(last) if method == "POST" else None


PEOPLE = {
    ("read", "mine"): ["mine-read"],
    ("read", "theirs"): ["theirs-read"],
    ("operate", "mine"): ["mine-operate"],
    ("operate", "theirs"): ["theirs-operate"],
    ("admin", "mine"): ["admins"],
    ("several", "both"): ["all-read", "mine-operate"],
}
"""Role and project → groups of a person who has it."""
OIDC_ROLES = (
    "mine-read=read:mine; theirs-read=read:theirs; mine-operate=operate:mine; theirs-operate=operate:theirs; "
    "admins=admin; all-read=read"
)


def is_answered(route, answer):
    """Addresses of pages lead to the dashboard that the settings name."""
    if route in PAGES:
        return answer.status_code == 307
    return answer.is_success


def ask(guarded, provider, route, secret, path=None, message=None):
    """Send a request; what counts once is made anew for each."""
    method, default, body = request_of(route)
    path, message = path or default, message or body
    if route == "POST /api/v1/sessions":
        message = signing_in(guarded, provider, "read-mine")
    if route == "POST /api/v1/back-channel-log-out":
        token = provider.signed(provider.log_out_claims(sub="nobody here", jti=random.token_hex(8)))
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        return guarded.client.post(path, data={"logout_token": token}, headers=headers)
    if route == "POST /v1/metrics":
        return guarded.ask(method, path, secret, wire.encode_json(EXPORT), **{"Content-Type": wire.JSON})
    return guarded.ask(method, path, secret, message)


def signing_in(guarded, provider, person):
    """What a dashboard sends when this person comes back from the provider."""
    begun = wire.decode_message(guarded.ask("POST", "/api/v1/sign-in").content, wire.SignInRequest, wire.JSON)
    code = provider.code(begun.authorization_url, person)
    return wire.SignInFinish(code=code, code_verifier=begun.code_verifier, nonce=begun.nonce)


@pytest.fixture(scope="module")
def provider():
    with providers.running_provider() as running:
        for (role, project), groups in PEOPLE.items():
            running.person(f"{role}-{project}", groups)
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, provider):
    settings = provider.settings(oidc_roles=OIDC_ROLES)
    with guarded_server(tmp_path_factory.mktemp("matrix"), **settings) as opened:
        provider.clock = opened.clock
        opened.client.follow_redirects = False
        for project in PROJECTS:
            opened.fill(project, f"{project}-1")
        opened.app.state.collage.store.incidents.fire(FIRING, FIRING.started_at)
        yield opened


@pytest.fixture(scope="module")
def secrets(guarded):
    """(role, project) → secret; an administrator's is for every project."""
    found = {(role, p): guarded.token(role, [p])[0] for role in ("ingest", "read", "operate") for p in PROJECTS}
    return found | {("admin", "mine"): guarded.token("admin")[0]}


@pytest.fixture(scope="module")
def session(guarded, provider):
    """(role, project) → secret of a session; clear the cache where it has ended."""

    @cache
    def secret_of(role, project):
        finish = signing_in(guarded, provider, f"{role}-{project}")
        return guarded.ask("POST", "/api/v1/sessions", message=finish).json()["secret"]

    return secret_of


def test_every_route_has_a_row_and_the_printed_matrix_is_this_one(guarded):
    assert matrix() in PRINTED, "print it again: python -m collage_server.auth.roles"
    paths = guarded.app.openapi()["paths"]
    described = {f"{method.upper()} {path}" for path, operations in paths.items() for method in operations}
    assert described | {"GET /docs", "GET /openapi.json"} | PAGES == set(ALLOWED)
    assert {f"{method} {path}" for method, path in RULES} == set(ALLOWED)


@pytest.mark.parametrize("route", ALLOWED)
def test_without_a_token(guarded, provider, route):
    answer = ask(guarded, provider, route, None)
    if ALLOWED[route] is None:
        assert is_answered(route, answer)
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorised")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("route", ALLOWED)
def test_with_a_token_or_a_session_of_the_project(guarded, provider, secrets, session, route):
    for role in ROLES:
        check_within(guarded, provider, route, role, secrets[role, "mine"])
        if role != "ingest":
            check_within(guarded, provider, route, role, session(role, "mine"))
        if route == "POST /api/v1/sign-out":
            session.cache_clear()


def check_within(guarded, provider, route, role, secret):
    _, path, _ = request_of(route)
    if route == "DELETE /api/v1/runs/{run_id}":
        doomed = f"mine-{role}-{random.token_hex(4)}"
        guarded.fill("mine", doomed)
        path = f"/api/v1/runs/{doomed}"
    if route == "DELETE /api/v1/tokens/{token_id}":
        path = f"/api/v1/tokens/{guarded.token('read', ['mine'])[1].token_id}"
    check_allowed(route, role, ask(guarded, provider, route, secret, path))


def check_allowed(route, role, answer):
    """It is answered where the role may do that; the words of the refusal otherwise."""
    allowed = ALLOWED[route]
    if allowed is None or role in allowed:
        assert is_answered(route, answer), (route, role, answer.text)
        return None
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), (route, role)
    return answer.json()["error"]["message"]


OF_ONE_PROJECT = ("{run_id}", "{stream_id}", "{project}")
ABOUT_ONE_PROJECT = [
    route for route, roles in ALLOWED.items() if roles is not None and ("{" in route or "compare" in route)
]


@pytest.mark.parametrize("route", ABOUT_ONE_PROJECT)
def test_with_a_token_or_a_session_of_another_project(guarded, secrets, session, route):
    for role in ("ingest", "operate", "read"):
        check_elsewhere(guarded, route, role, secrets[role, "theirs"])
        if role != "ingest":
            check_elsewhere(guarded, route, role, session(role, "theirs"))


def check_elsewhere(guarded, route, role, secret):
    method, path, message = request_of(route)
    answer = guarded.ask(method, path, secret, message)
    if role not in (ALLOWED[route] or ()) or "{project}" in route:
        assert answer.status_code == 403, (route, role)
        return
    assert answer.status_code == 404, (route, role)
    unknown = guarded.ask(method, path.replace("mine-1", "never-seen"), secret, message)
    told, as_told = answer.json()["error"], unknown.json()["error"]
    for name in ("code", "field", "limit"):
        assert told[name] == as_told[name], (route, role)
    assert told["message"].replace("mine-1", "never-seen") == as_told["message"], (route, role)


@pytest.mark.parametrize("route", [route for route in ALLOWED if any(name in route for name in OF_ONE_PROJECT)])
@pytest.mark.parametrize("project", PROJECTS)
def test_with_a_session_that_reads_everywhere_and_operates_in_one_project(
    guarded, provider, session, route, project
):
    if route == "DELETE /api/v1/runs/{run_id}":
        guarded.fill(project, f"{project}-doomed")
        path = f"/api/v1/runs/{project}-doomed"
    else:
        path = request_of(route)[1].replace("mine-1", f"{project}-1").replace("/mine/", f"/{project}/")
    role = "operate" if project == "mine" else "read"
    refused = check_allowed(route, role, ask(guarded, provider, route, session("several", "both"), path))
    words = "it is for mine" if "{project}" in route else f"may not do that in project '{project}', only in mine"
    assert refused is None or words in refused


def test_neither_a_run_in_the_query_nor_one_of_a_streams_name_opens_another(guarded, secrets):
    read, ingest = secrets["read", "mine"], secrets["ingest", "mine"]
    assert guarded.ask("GET", "/api/v1/runs/theirs-1?run=mine-1", read).status_code == 404
    guarded.fill("theirs", "named")
    guarded.fill("mine", "named-s")
    assert guarded.ask("GET", "/api/v1/runs/named-s", read).is_success
    sent = guarded.ask("POST", "/api/v1/streams/named-s/reports", ingest, wire.ReportBatch(reports=[]))
    assert sent.status_code == 404


def test_an_unknown_route_and_a_route_without_a_rule_are_closed(guarded, secrets):
    for role in ("ingest", "read", "operate"):
        for method, path in (("GET", "/api/v1/nope"), ("PUT", "/api/v1/runs"), ("DELETE", "/api/v1/audit")):
            answer = guarded.ask(method, path, secrets[role, "mine"])
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
    assert guarded.ask("PUT", "/api/v1/runs").status_code == 405
