"""One first screen: the runs on the left, what is picked on the right; four questions without a scroll."""

import re

import pytest

from tests.browser.boxes import boxes
from tests.browser.test_layout import violations_now
from tests.dashboard.generated import GeneratedRun, demo_runs
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.usefixtures("evaluated")]

LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def runs():
    """The demo's, one of them live, and more seeds of each strategy, as a person has them: forty."""
    seeds = [
        GeneratedRun(f"{name}-bfloat16-lr3e-4-seed{seed}", name, seed=seed, steps=20, run_id=f"run-{name}-{seed}")
        for seed in range(1, 9)
        for name in ("plain", "light", "plus", "master-weights")
    ]
    live = [
        GeneratedRun(f"live {name}", name, state="running", run_id=f"run-live-{name}") for name in ("plus", "plain")
    ]
    return [*seeds, *demo_runs(), *live]


@pytest.fixture
def laptop(page):
    page.set_viewport_size(LAPTOP)
    return page


def on_screen(page, locator):
    """Its text, once it is there; a person sees it without a scroll."""
    locator.first.wait_for()
    [box] = boxes(locator.first)
    size = page.viewport_size
    assert box["y"] >= 0
    assert box["bottom"] <= size["height"]
    assert box["right"] <= size["width"]
    return locator.first.inner_text()


def picked(page):
    """The runs that the list marks."""
    return page.locator(".rail [role=checkbox][aria-checked=true]").evaluate_all(
        "ticks => ticks.map((tick) => tick.closest('[data-run]').dataset.run)"
    )


def test_who_is_sick_where_and_since_when_stand_on_the_first_screen(laptop, goto, dashboard_url):
    page = goto("", "#run-panel .hm image")
    assert page.url == f"{dashboard_url}/run/run-live-plain", "the worst live run"
    assert page.evaluate("history.length") <= 3
    assert on_screen(page, page.locator(".rail h2")) == "39 runs, 19 sick"
    first = page.locator(".rail li[data-run]").first
    assert re.search(r"\d\d\.\d %", on_screen(page, first)), "what it loses now"
    assert re.search(r"Loses .* of its updates now .*since", on_screen(page, page.locator(".answer .verdict")))
    assert picked(page) == ["run-live-plain"]
    assert "live, step 200" in page.locator(".rail li[data-run='run-live-plain']").inner_text()
    [cells, curves] = boxes(page.locator("#run-panel .hm image").first, page.locator("#run-stack"))
    assert curves["bottom"] <= cells["y"]
    assert cells["bottom"] <= LAPTOP["height"], "where: every layer"
    assert violations_now(page) == []


def test_a_tick_compares_at_once_and_the_address_says_what_is_picked(laptop, goto):
    page = goto("/run/run-plain")
    for name in ("plus", "fp32 reference"):
        page.get_by_role("checkbox", name=f"Compare {name}", exact=True).click()
    page.wait_for_function("new URLSearchParams(location.search).getAll('run').length === 3")
    assert page.url.endswith("/compare?run=run-plain&run=run-plus&run=run-fp32-reference")
    table = page.locator("#compare-strategies tbody tr")
    page.wait_for_function("document.querySelectorAll('#compare-strategies tbody tr').length === 3")
    answer = page.locator("#compare-advice .verdict", has_text="Use Collage plus · bfloat16 or Plain · float32")
    assert len(on_screen(page, answer).replace("✓", "").split()) <= 15
    on_screen(page, table.nth(2))
    assert sorted(picked(page)) == ["run-fp32-reference", "run-plain", "run-plus"]
    assert violations_now(page) == []


@pytest.mark.nightly
def test_a_comparison_shrinks_by_ticks_to_a_run_and_comes_back(laptop, goto):
    page = goto("/compare?run=run-plain&run=run-plus&run=run-fp32-reference")
    page.locator("#compare-advice").wait_for()
    page.get_by_role("checkbox", name="Compare plain", exact=True).click()
    page.wait_for_function("document.querySelectorAll('#compare-strategies tbody tr').length === 2")
    page.get_by_role("checkbox", name="Compare fp32 reference", exact=True).click()
    page.wait_for_url("**/run/run-plus")
    page.locator("h1", has_text="plus").wait_for()
    page.go_back()
    page.wait_for_url("**/compare?*")
    page.locator("#compare-advice").wait_for()
    page.locator(".rail li[data-run='run-plain'] a").click()
    page.locator("h1", has_text=re.compile("^plain$")).wait_for()
    until(lambda: picked(page) == ["run-plain"], "the list to mark it")


def test_which_strategy_is_one_click_away(laptop, goto):
    page = goto("/run/run-plain")
    page.locator(".bar").get_by_role("link", name="Strategies").click()
    assert "Use Collage plus" in on_screen(page, page.locator("#compare-advice .verdict"))
    assert len(picked(page)) == 39


@pytest.mark.nightly
def test_the_layers_of_thirty_runs_stand_on_one_screen_and_each_leads_to_its_run(laptop, goto):
    page = goto("/run/run-plain")
    page.locator(".rail").get_by_role("link", name="Layers", exact=True).click()
    page.wait_for_url("**/fleet")
    page.wait_for_function("document.querySelectorAll('.fleet li').length === 30")
    last = page.locator(".fleet li").last
    on_screen(page, last.get_by_role("img"))
    assert page.locator(".fleet img:visible").count() == 30, "a picture for the page's ground"
    assert violations_now(page) == []
    page.locator(".fleet a", has_text="live plain").click()
    page.wait_for_url("**/run/run-live-plain")
    page.locator("h1", has_text="live plain").wait_for()


def test_a_phone_shows_the_list_and_then_what_is_picked(goto):
    page = goto("", **PHONE)
    entry = page.locator(".rail li[data-run='run-live-plain'] a")
    entry.wait_for()
    assert page.locator("#page").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert violations_now(page) == []
    entry.click()
    page.wait_for_url("**/run/run-live-plain")
    assert re.search("Loses .* since", on_screen(page, page.locator(".answer .verdict")))
    assert page.locator(".rail").is_hidden()
    page.go_back()
    entry.wait_for()
    page.locator(".bar").get_by_role("link", name="Strategies").click()
    assert "Use Collage plus" in on_screen(page, page.locator("#compare-advice .verdict")), "what to use: one tap"
