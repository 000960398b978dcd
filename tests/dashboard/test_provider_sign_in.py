"""Sign-in through the server's provider, from the button to the page and out: a browser, a dashboard, a server.

The provider is oidc-provider-mock as a real HTTP server, the server is the real application.
"""

import itertools
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from collage_dashboard import create_dashboard
from collage_dashboard.server_reader import Reader
from collage_dashboard.sign_in import MOST_FAILURES, UNDER_WAY_SECONDS, SignInsUnderWay

from collage_monitor import wire
from collage_monitor.client import Client
from tests import provider as providers
from tests.dashboard.asking import layout
from tests.server.guarded import guarded_server

pytestmark = [providers.MARK, pytest.mark.slow]
BEGUN = wire.SignInRequest(authorization_url="https://login.example", state="s", nonce="n", code_verifier="v")


@pytest.fixture(scope="module")
def running():
    with providers.running_provider() as provider:
        yield provider


@pytest.fixture
def provider(running):
    running.begin_anew()
    running.person("ada", ["team-a"])
    running.person("eve", ["strangers"])
    return running


@pytest.fixture(scope="module")
def opened(running, tmp_path_factory):
    """One server for all, with a run in each project."""
    with guarded_server(tmp_path_factory.mktemp("server"), **running.settings()) as opened:
        running.clock = opened.clock
        for project in ("mine", "theirs"):
            opened.fill(project, f"{project}-1")
        yield opened


@pytest.fixture
def api(opened, provider):
    """The server, where every session of an earlier test is over."""
    opened.ended = {session["token_id"] for session in every_session(opened)}
    return opened


@pytest.fixture(scope="module")
def dashboard(opened):
    # The server is in this process and goes with the test: nobody may still draw a page's charts ahead.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "begin", lambda *_: None)
        yield dashboard_on(opened)


def dashboard_on(api):
    """The dashboard of this server, with a token of its own that may read."""

    def client_of(token):
        def forward(request):
            headers = {name: value for name, value in request.headers.items() if name != "host"}
            answer = api.client.request(request.method, str(request.url), content=request.content, headers=headers)
            return httpx.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)

        return Client("http://testserver", token, transport=httpx.MockTransport(forward))

    own = api.token("read", name="dashboard")[0]
    return create_dashboard(lambda: client_of(own), sign_in=client_of).server


ADDRESSES = (f"10.0.0.{number}" for number in itertools.count(1))


@pytest.fixture
def new_browser(dashboard, api):
    """Makes browsers at an address that nobody has failed from."""
    address = next(ADDRESSES)

    def make():
        browser = dashboard.test_client()
        browser.environ_base["REMOTE_ADDR"] = address
        return browser

    return make


@pytest.fixture
def browser(new_browser):
    return new_browser()


def every_session(api):
    return [token for token in api.ask("GET", "/api/v1/tokens").json()["tokens"] if token["subject"]]


def sessions(api):
    """Those that this test began."""
    return [session for session in every_session(api) if session["token_id"] not in api.ended]


def begin(browser, path="/"):
    """The provider's address that the button leads to."""
    answer = browser.get("/sign-in/provider", query_string={"next": path})
    assert answer.status_code == 303, answer.text
    return answer.headers["Location"]


def way_back(provider, url, sub="ada"):
    """The path on which the provider sends the browser back."""
    location = urlsplit(provider.approve(url, sub))
    assert f"{location.scheme}://{location.netloc}" == providers.DASHBOARD
    return f"{location.path}?{location.query}"


def sign_in(browser, provider, sub="ada", path="/"):
    """The answer to who comes back from the provider."""
    return browser.get(way_back(provider, begin(browser, path), sub))


NOT_SHOWN = "Nothing is stored under this address"


def replaced(path, **values):
    query = {name: given[0] for name, given in parse_qs(urlsplit(path).query).items()} | values
    return f"{urlsplit(path).path}?{httpx.QueryParams(query)}"


def test_the_button_leads_to_the_provider_and_back_to_the_page(browser, provider, api):
    form = browser.get(browser.get("/run/mine-1?tab=about").headers["Location"])
    assert 'href="/sign-in/provider?next=/run/mine-1%3Ftab%3Dabout">Sign in with\nlocalhost</a>' in form.text
    url = begin(browser, "/run/mine-1?tab=about")
    assert url.startswith(f"{provider.url}/oauth2/authorize?response_type=code&")
    query = parse_qs(urlsplit(url).query)
    assert query["redirect_uri"] == [f"{providers.DASHBOARD}/sign-in/callback"]
    assert query["code_challenge_method"] == ["S256"]
    answer = browser.get(way_back(provider, url))
    assert answer.status_code == 200
    assert 'http-equiv="refresh" content="0; url=/run/mine-1?tab=about"' in answer.text
    assert "no-store" in answer.headers["Cache-Control"]
    assert browser.get("/run/mine-1?tab=about").status_code == 200
    assert NOT_SHOWN not in layout(browser, "/run/mine-1").text
    assert NOT_SHOWN in layout(browser, "/run/theirs-1").text
    [session] = sessions(api)
    assert (session["name"], session["projects"]) == ("Ada", ["mine"])


@pytest.mark.parametrize(("base", "secure"), [("http://127.0.0.1", False), ("https://127.0.0.1", True)])
def test_cookies_hold_ids_alone_and_stay_on_this_site(browser, provider, base, secure):
    begun = browser.get("/sign-in/provider", base_url=base)
    cookie = begun.headers["Set-Cookie"]
    for part in ("collage_sign_in=", "HttpOnly", "SameSite=Lax", "Path=/sign-in", f"Max-Age={UNDER_WAY_SECONDS}"):
        assert part in cookie
    assert ("Secure" in cookie) is secure
    asked = parse_qs(urlsplit(begun.headers["Location"]).query)
    for secret in ("state", "nonce", "code_challenge"):
        assert asked[secret][0] not in cookie
    answer = browser.get(way_back(provider, begun.headers["Location"]), base_url=base)
    kept, gone = sorted(answer.headers.getlist("Set-Cookie"))
    for part in ("collage_session=", "HttpOnly", "SameSite=Strict"):
        assert part in kept
    assert ("Secure" in kept) is secure
    assert "collage_sign_in=;" in gone


def test_the_token_of_a_session_never_reaches_the_browser(browser, provider, api):
    given = []
    api.client.event_hooks["response"].append(lambda answer: given.append(answer.read()))
    answer = sign_in(browser, provider)
    [secret] = [found.split(b'"')[0] for body in given for found in body.split(b'"secret":"')[1:]]
    assert len(secret) > 40
    for shown in (answer, browser.get("/"), layout(browser)):
        assert secret not in shown.data
        assert secret.decode() not in str(shown.headers)


def test_a_session_of_somebody_else_does_not_become_that_of_who_signs_in(new_browser, provider, api):
    """As an attacker would: sign in, and leave the own session in the victim's browser."""
    attacker, victim = new_browser(), new_browser()
    attacker.post("/sign-in", data={"token": api.token("read", ["theirs"])[0]})
    cookie = attacker.get_cookie("collage_session").value
    victim.set_cookie("collage_session", cookie)
    victim.get(way_back(provider, begin(victim)))
    assert victim.get_cookie("collage_session").value != cookie
    assert NOT_SHOWN not in layout(victim, "/run/mine-1").text
    assert layout(attacker, "/run/mine-1").status_code == 401


# What must not sign anybody in.


def test_a_way_back_in_another_browser_signs_nobody_in(new_browser, provider, api):
    """As an attacker would: begin here, and lead a victim along the way back."""
    attacker, victim, busy = (new_browser() for _ in range(3))
    path = way_back(provider, begin(attacker))
    begin(busy)
    for browser in (victim, busy):
        answer = browser.get(path)
        assert answer.status_code == 403
        assert "This browser did not start this sign-in" in answer.text
        assert layout(browser).status_code == 401
    assert (provider.token_requests, sessions(api)) == ([], [])
    assert attacker.get(path).status_code == 200


def test_a_way_back_counts_once(browser, new_browser, provider, api):
    path = way_back(provider, begin(browser))
    cookie = browser.get_cookie("collage_sign_in", path="/sign-in")
    assert browser.get(path).status_code == 200
    for again in (browser, new_browser()):
        again.set_cookie("collage_sign_in", cookie.value, path="/sign-in")
        assert again.get(path).status_code == 403
    assert (len(provider.token_requests), len(sessions(api))) == (1, 1)


@pytest.mark.parametrize("state", ["", "another", "stäte"])
def test_another_state_signs_nobody_in_and_spends_the_sign_in(browser, provider, api, state):
    path = way_back(provider, begin(browser))
    assert browser.get(replaced(path, state=state)).status_code == 403
    assert browser.get(path).status_code == 403
    assert (provider.token_requests, sessions(api)) == ([], [])


def test_a_code_of_another_sign_in_signs_nobody_in(new_browser, provider, api):
    """A code that was begun elsewhere has another verifier, whatever state it is put beside."""
    mine, theirs = new_browser(), new_browser()
    path, stolen = way_back(provider, begin(mine)), way_back(provider, begin(theirs))
    code = parse_qs(urlsplit(stolen).query)["code"][0]
    answer = mine.get(replaced(path, code=code))
    assert answer.status_code == 403
    assert "The provider does not take this code (invalid_grant)" in answer.text
    assert (layout(mine).status_code, sessions(api)) == (401, [])


def test_a_sign_in_that_took_too_long_is_over():
    now = [0.0]
    under_way = SignInsUnderWay(lambda: now[0])
    first, second = under_way.keep(BEGUN, "/"), under_way.keep(BEGUN, "/")
    now[0] = UNDER_WAY_SECONDS - 1
    assert under_way.take(first) is not None
    assert under_way.take(first) is None
    now[0] += 2
    assert under_way.take(second) is None
    assert under_way.take(None) is None


def test_who_is_in_no_group_with_a_role_is_told_why(browser, provider):
    answer = sign_in(browser, provider, "eve", "/run/mine-1")
    assert answer.status_code == 403
    said = answer.text.replace("&#39;", "'")
    assert "Eve may not sign in here: none of the person's groups (strangers) has a role" in said
    assert 'value="/run/mine-1"' in said
    assert "Sign in with\nlocalhost" in said
    assert layout(browser).status_code == 401


def test_what_the_provider_says_instead_of_a_code_is_shown_escaped(browser):
    state = parse_qs(urlsplit(begin(browser)).query)["state"][0]
    query = {"state": state, "error": "<script>alert(1)</script>" + "x" * 1_000}
    answer = browser.get("/sign-in/callback", query_string=query)
    assert answer.status_code == 403
    assert "The provider did not sign you in (&lt;script&gt;" in answer.text
    assert "x" * 100 not in answer.text


def test_nobody_is_led_away_and_a_foreign_page_begins_no_sign_in(browser, provider):
    assert 'content="0; url=/"' in sign_in(browser, provider, path="//evil.example").text
    answer = browser.get("/sign-in/provider?next=/incidents", headers={"Sec-Fetch-Site": "cross-site"})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/sign-in?next=%2Fincidents")
    assert "Set-Cookie" not in answer.headers


def test_refusals_are_limited_by_address_and_strangers_add_none(new_browser, provider):
    for _ in range(MOST_FAILURES + 1):
        assert new_browser().get("/sign-in/callback?state=x&code=y").status_code == 403
    for _ in range(MOST_FAILURES):
        assert sign_in(new_browser(), provider, "eve").status_code == 403
    asked = len(provider.token_requests)
    assert sign_in(new_browser(), provider).status_code == 429
    assert len(provider.token_requests) == asked


# How it ends.


def test_who_signs_out_is_led_to_the_provider_and_the_session_is_over(browser, provider, api):
    sign_in(browser, provider)
    cookie = browser.get_cookie("collage_session").value
    answer = browser.post("/sign-out")
    assert answer.status_code == 200
    assert f'content="0; url={provider.url}/oauth2/end_session?client_id=' in answer.text
    assert layout(browser).status_code == 401
    assert [session["revoked_at"] is not None for session in sessions(api)] == [True]
    browser.set_cookie("collage_session", cookie)
    assert layout(browser).status_code == 401


def test_who_signs_out_of_a_session_that_is_over_is_out(browser, provider, api):
    sign_in(browser, provider)
    api.ask("DELETE", f"/api/v1/tokens/{sessions(api)[0]['token_id']}")
    for _ in range(2):
        answer = browser.post("/sign-out")
        assert (answer.status_code, answer.headers["Location"]) == (303, "/sign-in")


def test_a_token_signs_in_as_ever(browser, api):
    secret, token = api.token("read", ["theirs"])
    assert browser.post("/sign-in", data={"token": secret, "next": "/"}).status_code == 303
    assert NOT_SHOWN in layout(browser, "/run/mine-1").text
    assert browser.post("/sign-out").headers["Location"] == "/sign-in"
    known = {entry["token_id"]: entry["revoked_at"] for entry in api.ask("GET", "/api/v1/tokens").json()["tokens"]}
    assert known[token.token_id] is None
    refused = browser.post("/sign-in", data={"token": "guess"})
    assert "<details open>" in refused.text


def test_a_provider_that_is_away_leaves_the_token(provider, tmp_path):
    provider.answers["/.well-known/openid-configuration"] = ("500 Oops", {})
    with guarded_server(tmp_path, **provider.settings()) as opened:
        answer = dashboard_on(opened).test_client().get("/sign-in/provider?next=/incidents")
    assert answer.status_code == 503
    assert "the provider localhost does not answer" in answer.text
    assert 'name="token"' in answer.text
    assert "Set-Cookie" not in answer.headers


def test_without_a_provider_the_page_is_as_it_was(tmp_path):
    with guarded_server(tmp_path) as opened:
        browser = dashboard_on(opened).test_client()
        form = browser.get("/sign-in").text
        assert "required\nautofocus" in form
        for word in ("details", "Sign in with", 'class="button"'):
            assert word not in form
        assert browser.get("/sign-in/provider").status_code == 503
