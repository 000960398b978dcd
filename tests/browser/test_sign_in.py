"""Sign-in in a real browser, by a token or through a provider at another site: from a link to its page and out.

The provider is at localhost and the dashboard at 127.0.0.1: for a browser these are two sites, and which cookies it
brings along decides.
"""

import json
import secrets
import time
from typing import Any

import httpx
import pytest

from collage_monitor import wire
from tests import provider as providers
from tests.browser.test_layout import LOOKS, serious_violations
from tests.dashboard.asking import routing
from tests.dashboard.generated import GeneratedRun
from tests.dashboard.posting import post_run
from tests.ports import command, free_port, running
from tests.system import chromium

pytestmark = [pytest.mark.slow, pytest.mark.browser, providers.MARK]
PLAIN = GeneratedRun("plain", "plain", run_id="run-plain")
STYLES = "https://cdn.jsdelivr.net/"
"""Where the mock's pages want their looks from."""


@pytest.fixture(scope="module")
def runs():
    return [PLAIN]


@pytest.fixture(scope="module")
def dashboard_url(server_url, dashboard, dashboard_port, tmp_path_factory):
    with dashboard(*server_url, tmp_path_factory.mktemp("asks"), "--sign-in", port=dashboard_port) as url:
        yield url


@pytest.fixture(scope="module")
def reader(client):
    """Makes tokens that may read."""
    return lambda name: client.create_token(wire.TokenCreate(name=name, role="read", projects=["demo"]))


def test_a_link_leads_through_the_sign_in_to_its_page_and_out_again(goto, dashboard_url, reader):
    secret = reader("reader").secret
    page = goto("/run/run-plain?tab=about")
    page.get_by_label("Token").wait_for()
    assert serious_violations(page, 1440) == []
    page.get_by_label("Token").fill(secret)
    page.keyboard.press("Enter")
    page.locator(".facts").wait_for()
    assert page.url == f"{dashboard_url}/run/run-plain?tab=about"
    (cookie,) = (found for found in page.context.cookies() if found["name"] == "collage_session")
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["secure"]) == (True, "Strict", False)
    assert cookie["value"] not in page.evaluate("document.cookie"), "no script sees it"
    assert secret not in page.content() + str(cookie)
    page.get_by_role("button", name="Save").click()
    page.get_by_text("This token may not change anything").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Token").wait_for()
    goto("/run/run-plain")
    page.get_by_label("Token").wait_for()


def without_refusals(complaints):
    """What else was complained of: a browser says in its console what was refused to a page that was open."""
    return [said for said in complaints if "401" not in said]


def test_a_page_whose_token_was_revoked_asks_again(open_page, dashboard_url, client, reader):
    made = reader("short")
    watched = open_page(dashboard_url)
    page = watched.page
    page.goto(f"{dashboard_url}/runs")
    page.get_by_label("Token").fill(made.secret)
    page.get_by_role("button", name="Sign in").click()
    page.locator(".run-cell").first.wait_for()
    has_opened(page)
    client.revoke_token(made.token.token_id)
    page.get_by_role("link", name="Incidents").click()
    page.get_by_label("Token").wait_for()
    page.goto(dashboard_url)
    page.get_by_label("Token").wait_for()
    watched.complaints[:] = without_refusals(watched.complaints)


@pytest.fixture(scope="module")
def site(served, tmp_path_factory):
    """(provider, server's address, dashboard's address), each a process or a server of its own."""
    chromium()
    folder, port = tmp_path_factory.mktemp("provider"), free_port()
    address = f"http://127.0.0.1:{port}"
    with providers.running_provider(address) as provider, pytest.MonkeyPatch.context() as patch:
        provider.clock = time.time  # The server is another process, and has the machine's clock.
        provider.person("ada", ["team-a"])
        for name, value in provider.settings(oidc_roles="team-a=operate:demo").items():
            patch.setenv(f"COLLAGE_SERVER_{name.upper()}", value)
        with served(folder) as (server_url, token_file):
            post_run(server_url, PLAIN, token_file.read_text().strip())
            own = ("--server-url", server_url, "--token-file", token_file)
            arguments = command("serve", "dashboard", "--port", port, *own, "--sign-in")
            with running(arguments, f"{address}/healthz", folder / "dashboard.log"):
                yield provider, server_url, address


@pytest.fixture
def opened(site, open_page):
    """A fresh page of the dashboard; at the end only it and the provider may have been asked."""
    provider, _, address = site
    watched = open_page(address)
    watched.page.route(f"{STYLES}**", lambda route: route.fulfill(body=""))
    yield watched
    watched.foreign[:] = [url for url in watched.foreign if not url.startswith((provider.url, STYLES))]


def has_opened(page):
    """Until then the page is a picture of itself, on which no button works."""
    page.locator("#opening").wait_for(state="detached")


def sign_in(page, person):
    page.get_by_role("link", name="Sign in with localhost").click()
    page.get_by_placeholder("sub").fill(person)
    page.get_by_role("button", name="Authorize").click()


def log_out(site):
    """The provider ends all that this person has."""
    provider, server_url, _ = site
    token = provider.signed(provider.log_out_claims(sub="ada", jti=secrets.token_hex(8)))
    answer = httpx.post(f"{server_url}/api/v1/back-channel-log-out", data={"logout_token": token}, trust_env=False)
    assert answer.status_code == 200, answer.text


@pytest.mark.nightly
@LOOKS
def test_everyone_can_sign_in(site, opened, scheme, width):
    page = opened.page
    page.emulate_media(color_scheme=scheme)
    page.goto(site[2])
    page.get_by_role("link", name="Sign in with localhost").wait_for()
    assert not page.get_by_label("Token").is_visible()
    assert serious_violations(page, width) == []
    page.get_by_text("Sign in with a token").click()
    page.get_by_label("Token").wait_for()
    assert serious_violations(page, width) == []


def test_a_link_leads_to_the_provider_and_back_to_its_page_and_out_at_both(site, opened):
    provider, _, address = site
    page = opened.page
    page.goto(f"{address}/run/run-plain?tab=about")
    page.get_by_role("link", name="Sign in with localhost").wait_for()
    assert not page.get_by_label("Token").is_visible()
    assert serious_violations(page, 1440) == []
    sign_in(page, "ada")
    page.locator(".facts").wait_for()
    assert page.url == f"{address}/run/run-plain?tab=about"
    [cookie] = [found for found in page.context.cookies() if found["name"] == "collage_session"]
    assert (cookie["domain"], cookie["httpOnly"], cookie["sameSite"]) == ("127.0.0.1", True, "Strict")
    has_opened(page)
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="End Session").wait_for()
    assert page.url.startswith(f"{provider.url}/oauth2/end_session?")
    page.get_by_role("button", name="End session").click()
    page.get_by_role("link", name="Sign in with localhost").wait_for()
    assert page.url.startswith(f"{address}/sign-in")
    page.goto(f"{address}/run/run-plain")
    page.get_by_role("link", name="Sign in with localhost").wait_for()


@pytest.mark.nightly
def test_a_question_that_is_refused_while_somebody_signs_out_does_not_hold_the_sign_out_up(site, opened):
    page = opened.page
    held: list[Any] = []
    refusals: list[Any] = []
    page.goto(f"{site[2]}/runs")
    sign_in(page, "ada")
    page.locator(".run-cell").first.wait_for()
    has_opened(page)
    log_out(site)
    page.route("**/sign-out", lambda route: route.continue_() if refusals else held.append(route))
    with page.expect_response("**/_dash-update-component") as refused:
        page.evaluate(
            """(body) => {
                document.querySelector("form[action='/sign-out']").requestSubmit();
                const headers = { "Content-Type": "application/json" };
                window.fetch("/_dash-update-component", { method: "POST", headers, body });
            }""",
            json.dumps(routing()),
        )
    assert refused.value.status == 401
    refusals.append(refused.value)
    for route in held:
        route.continue_()
    page.get_by_role("link", name="Sign in with localhost").wait_for()
    assert page.url == f"{site[2]}/sign-in"
    opened.complaints[:] = without_refusals(opened.complaints)
