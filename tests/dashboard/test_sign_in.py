"""Sign-in: nothing is shown before it, the session stays here, and a token sees what it may and no more."""

import re
from urllib.parse import quote

import httpx
import pytest
from collage_dashboard import create_dashboard
from collage_dashboard.sign_in import MOST_FAILURES

from collage_monitor.client import Client
from tests.dashboard.asking import layout
from tests.dashboard.fake_server import FakeServer, _error
from tests.dashboard.generated import GeneratedRun

OWNERS = {"ada-token": GeneratedRun("of-ada", "plus"), "bob-token": GeneratedRun("of-bob", "plain")}


class Tokens:
    """A server that knows two tokens, each of which sees a run of its own; `known` may lose one."""

    def __init__(self):
        self.known = dict(OWNERS)

    def client(self, token):
        def answer(request):
            run = self.known.get(request.headers["Authorization"].removeprefix("Bearer "))
            if token == "ingest-token" or run is None:
                return _error(403 if token == "ingest-token" else 401, "no")
            return FakeServer([run])._answer(request)

        return Client("http://127.0.0.1:7420", token, transport=httpx.MockTransport(answer))


@pytest.fixture
def tokens():
    return Tokens()


def own_client():
    """The dashboard's own: it asks whether people may sign in through a provider, and for nothing else."""

    def answer(request):
        assert (request.method, request.url.path) == ("GET", "/api/v1/sign-in")
        return httpx.Response(200, json={"provider": None})

    return Client("http://127.0.0.1:7420", transport=httpx.MockTransport(answer))


@pytest.fixture
def server(tokens):
    return create_dashboard(own_client, sign_in=tokens.client).server


def sign_in(server, token, **more):
    browser = server.test_client()
    return browser, browser.post("/sign-in", data={"token": token, **more})


@pytest.mark.parametrize("path", ["/", "/run/run-of-ada?tab=about", "/incidents"])
def test_a_page_leads_to_the_sign_in_and_back(server, path):
    browser = server.test_client()
    answer = browser.get(path)
    assert answer.status_code == 303
    assert answer.headers["Location"].startswith("/sign-in?next=%2F")
    form = browser.get(answer.headers["Location"])
    assert "no-store" in form.headers["Cache-Control"]
    assert f'value="{path}"' in form.text
    _, signed_in = sign_in(server, "ada-token", next=path)
    assert (signed_in.status_code, signed_in.headers["Location"]) == (303, path)


@pytest.mark.parametrize(
    "path", ["/_dash-layout", "/_dash-dependencies", "/_dash-component-suites/x", "/assets/flow.js"]
)
def test_nothing_else_answers_before(server, path):
    assert server.test_client().get(path).status_code == 401
    assert layout(server.test_client()).status_code == 401
    assert server.test_client().get("/healthz").status_code == 200


def test_the_cookie_is_an_id_alone_and_stays_on_this_site(server):
    _, answer = sign_in(server, "ada-token")
    cookie = answer.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))
    assert not re.search("Secure|ada", cookie)
    by_https = server.test_client().post("/sign-in", data={"token": "ada-token"}, base_url="https://127.0.0.1")
    assert "Secure" in by_https.headers["Set-Cookie"]


@pytest.mark.slow
def test_everybody_sees_what_their_own_token_sees(server):
    ada, bob = sign_in(server, "ada-token")[0], sign_in(server, "bob-token")[0]
    for _ in range(2):
        assert "of-ada" in layout(ada, "/run/run-of-ada").text
        assert "Nothing is stored under this address" in layout(bob, "/run/run-of-ada").text
        assert "of-bob" in layout(bob, "/run/run-of-bob").text


def test_a_session_ends_with_its_token_and_with_the_sign_out(server, tokens):
    ada, bob = sign_in(server, "ada-token")[0], sign_in(server, "bob-token")[0]
    del tokens.known["ada-token"]
    for _ in range(2):
        assert layout(ada).status_code == 401
    assert bob.post("/sign-out").status_code == 303
    assert layout(bob).status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["/", "/run/run-of-ada?tab=about", "/report?run=run-of-ada", "/incidents", "/picture/run-of-ada.png"]
)
def test_what_is_asked_for_with_a_token_that_is_no_longer_known_leads_to_the_sign_in_and_back(server, tokens, path):
    browser, _ = sign_in(server, "ada-token")
    assert browser.get(path).status_code == 200
    del tokens.known["ada-token"]
    for _ in range(2):
        answer = browser.get(path)
        assert (answer.status_code, answer.headers["Location"]) == (303, f"/sign-in?next={quote(path, safe='')}")
        assert "Nothing" not in answer.text
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]


def test_an_id_that_somebody_chose_or_knew_is_worth_nothing(server):
    browser = server.test_client()
    browser.set_cookie("collage_session", "chosen-by-somebody-else")
    answer = browser.post("/sign-in", data={"token": "ada-token"})
    assert "chosen-by-somebody-else" not in answer.headers["Set-Cookie"]
    other = server.test_client()
    other.set_cookie("collage_session", "chosen-by-somebody-else")
    assert layout(other).status_code == 401


@pytest.mark.parametrize(
    ("token", "status", "said"),
    [
        ("", 422, "Type a token"),
        ("nobody's", 403, "does not know this token"),
        ("ingest-token", 403, "may not read"),
        ("zwei wörter", 503, "printable ASCII"),
    ],
)
def test_what_is_wrong_with_a_token_is_said(server, token, status, said):
    browser, answer = sign_in(server, token)
    assert answer.status_code == status
    assert said in answer.text.replace("&#39;", "'")
    assert layout(browser).status_code == 401


def test_failures_are_limited_by_address(server):
    for _ in range(MOST_FAILURES):
        assert sign_in(server, "guess")[1].status_code == 403
    assert sign_in(server, "ada-token")[1].status_code == 429
    elsewhere = server.test_client()
    elsewhere.environ_base["REMOTE_ADDR"] = "10.0.0.9"
    assert elsewhere.post("/sign-in", data={"token": "ada-token"}).status_code == 303


@pytest.mark.parametrize(
    "elsewhere", ["//evil.example", "https://evil.example/", "/\\evil.example", "javascript:alert(1)", "/a\r\nX: y"]
)
def test_nobody_is_led_away(server, elsewhere):
    assert sign_in(server, "ada-token", next=elsewhere)[1].headers["Location"] == "/"
    form = server.test_client().get("/sign-in", query_string={"next": elsewhere})
    assert 'name="next" value="/"' in form.text


def test_a_name_in_the_way_back_is_escaped(server):
    form = server.test_client().get("/sign-in", query_string={"next": '/run/"><script>alert(1)</script>'})
    assert "<script" not in form.text


@pytest.mark.parametrize(
    ("origin", "site", "status"),
    [
        ("https://evil.example", None, 403),
        ("https://evil.example", "same-origin", 403),
        ("null", None, 403),
        ("null", "cross-site", 403),
        ("null", "same-origin", 303),
    ],
)
def test_a_foreign_page_cannot_sign_anybody_in(server, origin, site, status):
    headers = {"Origin": origin} | ({"Sec-Fetch-Site": site} if site else {})
    answer = server.test_client().post("/sign-in", data={"token": "ada-token"}, headers=headers)
    assert answer.status_code == status
    assert ("Set-Cookie" in answer.headers) is (status == 303)


def test_a_link_from_elsewhere_is_asked_for_again_from_here(server):
    """The browser keeps a SameSite=Strict cookie back from what another site leads to."""
    form = server.test_client().get("/sign-in?next=/incidents", headers={"Sec-Fetch-Site": "cross-site"})
    assert 'http-equiv="refresh" content="0; url=/incidents"' in form.text
