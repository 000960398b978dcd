"""Sign-in in a real browser: from an alert's link through the form to the page, and out again."""

import pytest

from collage_monitor import wire
from collage_monitor.client import Client
from tests.browser.test_layout import serious_violations
from tests.dashboard.generated import GeneratedRun

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def runs():
    return [GeneratedRun("plain", "plain", run_id="run-plain")]


@pytest.fixture(scope="module")
def client(server_url):
    address, token_file = server_url
    with Client(address, token_file.read_text().strip()) as own:
        yield own


@pytest.fixture(scope="module")
def dashboard_url(server_url, dashboard, dashboard_port, tmp_path_factory):
    address, token_file = server_url
    with dashboard(
        address, token_file, tmp_path_factory.mktemp("sign-in"), "--sign-in", port=dashboard_port
    ) as url:
        yield url


@pytest.fixture(scope="module")
def reader(client):
    """A token that may read."""
    return client.create_token(wire.TokenCreate(name="reader", role="read", projects=["demo"]))


def test_a_link_leads_through_the_sign_in_to_its_page_and_out_again(open_page, dashboard_url, reader, client):
    page = open_page(dashboard_url).page
    page.goto(f"{dashboard_url}/run/run-plain?tab=about")
    page.get_by_label("Token").wait_for()
    assert serious_violations(page, 1440) == []
    page.get_by_label("Token").fill(reader.secret)
    page.keyboard.press("Enter")
    page.locator(".facts").wait_for()
    assert page.url == f"{dashboard_url}/run/run-plain?tab=about"
    (cookie,) = (found for found in page.context.cookies() if found["name"] == "collage_session")
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["secure"]) == (True, "Strict", False)
    assert cookie["value"] not in page.evaluate("document.cookie"), "no script sees it"
    assert reader.secret not in page.content() + str(cookie)
    page.get_by_role("button", name="Save").click()
    page.get_by_text("This token may not change anything").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Token").wait_for()
    page.goto(f"{dashboard_url}/run/run-plain")
    page.get_by_label("Token").wait_for()


def test_a_page_whose_token_was_revoked_asks_again(open_page, dashboard_url, client):
    made = client.create_token(wire.TokenCreate(name="short", role="read", projects=["demo"]))
    watched = open_page(dashboard_url)
    page = watched.page
    page.goto(f"{dashboard_url}/runs")
    page.get_by_label("Token").fill(made.secret)
    page.get_by_role("button", name="Sign in").click()
    page.locator(".run-cell").first.wait_for()
    page.locator("#opening").wait_for(state="detached")
    client.revoke_token(made.token.token_id)
    page.get_by_role("link", name="Incidents").click()
    page.get_by_label("Token").wait_for()
    page.goto(dashboard_url)
    page.get_by_label("Token").wait_for()
    # What the page that was open asked for was refused: that is said in the console, too.
    watched.complaints[:] = [said for said in watched.complaints if "401" not in said]
