"""A phone's screen, 390 pixels wide: rows are cards with labels beside values, and nothing scrolls sideways."""

import pytest

from collage_monitor.client import Client
from tests.browser.test_incidents import Overflowed
from tests.browser.test_layout import violations_now
from tests.dashboard.generated import demo_runs
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def runs():
    return [*demo_runs(), Overflowed("overflowed", "plus", state="running", run_id="run-inf")]


@pytest.fixture
def phone(open_page, dashboard_url):
    page = open_page(dashboard_url, width=390).page
    page.set_viewport_size({"width": 390, "height": 844})
    return page


SIDEWAYS = """place => [place, ...place.querySelectorAll("*")].flatMap((part) => {
    const scrolls = ["auto", "scroll"].includes(getComputedStyle(part).overflowX);
    const isWider = part.scrollWidth > part.clientWidth + 1 && part.clientWidth > 0;
    return (scrolls && isWider) || part.getBoundingClientRect().right > innerWidth ? [part.className] : [];
})"""
"""What could be scrolled sideways within a place, or stands beyond the screen."""


def arranged(page, cards=True):
    """Wait until the rows of the table of runs are as high as cards, or as lines."""
    rows = "[...document.querySelectorAll('#runs-grid .ag-center-cols-container .ag-row')]"
    high = "row.offsetHeight > 36 && row.querySelector('.row-values')" if cards else "row.offsetHeight === 36"
    page.wait_for_function(f"{rows}.length > 1 && {rows}.every((row) => {high})")


def pairs(card):
    """The labels of a card, each with the value beside it."""
    found = card.locator(".row-values > div").evaluate_all(
        "pairs => pairs.map((pair) => [...pair.children].map((part) => part.textContent))"
    )
    return dict(found)


def test_a_run_is_a_card_that_is_ticked_and_opened_by_keys(phone, dashboard_url):
    phone.goto(f"{dashboard_url}/runs")
    arranged(phone)
    card = phone.locator("#runs-grid .ag-row", has=phone.get_by_role("link", name="plus", exact=True))
    card.locator(".row-values > div").nth(13).wait_for()
    card.locator(".verdict-cell", has_text="Healthy").wait_for()
    told = pairs(card)
    assert told["Strategy"] == "Collage plus · bfloat16"
    assert (told["EDQ"], told["Bytes per parameter"], told["Step"], told["State"]) == (
        "1.000",
        "12",
        "200",
        "finished",
    )
    assert told["Tags"] == "test"
    assert told["Notes"] == "–"
    assert phone.locator("#runs-grid").evaluate(SIDEWAYS) == []
    height = card.bounding_box()["height"]
    content = card.locator(".row-card").bounding_box()["height"]
    assert height - 40 < content <= height, "a card fills its row"
    assert violations_now(phone) == []
    cell = phone.locator("#runs-grid .ag-row[row-index='0'] .ag-cell[col-id='name']")
    cell.focus()
    phone.keyboard.press("Space")
    phone.get_by_role("link", name="Compare 1 run").wait_for()
    cell.focus()
    phone.keyboard.press("Enter")
    phone.wait_for_function("location.pathname.startsWith('/run/')")


@pytest.mark.nightly
def test_a_wider_screen_has_its_table_and_a_narrower_its_cards(open_page, dashboard_url):
    page = open_page(dashboard_url, width=1280).page
    page.goto(f"{dashboard_url}/runs")
    strategies = page.locator("#runs-grid .ag-cell[col-id='strategy']")
    strategies.nth(4).wait_for()
    for _ in range(2):
        page.set_viewport_size({"width": 390, "height": 844})
        arranged(page)
        assert strategies.count() == 0
        page.set_viewport_size({"width": 1280, "height": 900})
        strategies.nth(4).wait_for()
        arranged(page, cards=False)
        assert page.locator("#runs-grid .row-card").count() == 0


def test_groups_and_chosen_columns_are_cards_too(phone, dashboard_url):
    phone.goto(f"{dashboard_url}/runs?by=strategy&column=health&column=loss&column=optimizer.lr")
    arranged(phone)
    card = phone.locator("#runs-grid .ag-row .row-card").first
    assert set(pairs(card)) == {"Training loss", "optimizer.lr"}
    card.get_by_role("button").click()
    phone.locator("#runs-grid .run-cell.member").first.wait_for()
    assert phone.locator("#runs-grid").evaluate(SIDEWAYS) == []


@pytest.mark.nightly
def test_cards_are_sorted(phone, dashboard_url):
    phone.goto(f"{dashboard_url}/runs")
    arranged(phone)
    phone.get_by_text("Filters", exact=True).click()
    phone.get_by_role("textbox", name="Order of the runs").click()
    phone.get_by_role("option", name="Lowest EDQ first").click()
    first = "#runs-grid .ag-row[row-index='0'] .run-cell"
    phone.locator(first, has_text="plain").wait_for()
    phone.wait_for_function("location.search === '?sort=edq_ratio'")
    phone.get_by_role("textbox", name="Order of the runs").click()
    phone.get_by_role("option", name="By name").click()
    phone.locator(first, has_text="fp32 reference").wait_for()


def test_a_layer_is_a_card_that_shows_its_layer(phone, dashboard_url):
    phone.goto(f"{dashboard_url}/run/run-plain?tab=table")
    card = phone.locator(".layers-grid .ag-row", has_text="blocks.0.mlp.up.weight")
    card.locator(".row-values > div").nth(5).wait_for()
    assert set(pairs(card)) == {"Kind", "Share of the loss", "Lost", "Since", "Margin", "EDQ"}
    assert phone.locator(".layers-grid").evaluate(SIDEWAYS) == []
    card.click()
    phone.locator("#run-layer-card", has_text="blocks.0.mlp.up.weight").wait_for()


def test_an_incident_is_a_card(phone, dashboard_url, server_url):
    address, token_file = server_url
    with Client(address, token_file.read_text().strip()) as client:
        until(lambda: client.incidents(alert="CollageNotFinite").events, "an incident")
    phone.goto(f"{dashboard_url}/incidents?alert=CollageNotFinite")
    row = phone.locator(".incident-table tbody tr").last
    row.wait_for()
    cells = row.locator("td")
    assert cells.evaluate_all("cells => cells.map((cell) => getComputedStyle(cell, '::before').content)") == [
        f'"{label}"' for label in ("Alert", "Run", "Fired", "Lasted", "State", "Why")
    ]
    lefts = cells.evaluate_all("cells => cells.map((cell) => Math.round(cell.getBoundingClientRect().left))")
    assert len(set(lefts)) == 1, "they stand below each other"
    assert phone.locator(".incident-table").evaluate(SIDEWAYS) == []
    assert violations_now(phone) == []
