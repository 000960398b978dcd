"""The first screen of a run, and all pages on a phone: rows are cards, and nothing scrolls sideways."""

import re
from itertools import pairwise

import pytest

from collage_monitor.diagnosis import percent
from tests.browser.boxes import boxes, downloaded_picture, drag
from tests.browser.test_incidents import overflowed
from tests.browser.test_layout import violations_now
from tests.dashboard.generated import demo_runs
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.usefixtures("evaluated")]

PLOTS = "[...document.querySelectorAll('#run-stack .js-plotly-plot')]"
DRAWN = f"({PLOTS}.length === 3 && {PLOTS}.every(plot => plot.data?.length))"
TITLES = ["Training loss", "EDQ", "Updates lost"]
RESUMED_AT, CURVES = 61, 7


def all_have(page, condition):
    """Wait until the first screen's curves, each `plot`, meet the condition."""
    page.wait_for_function(f"{DRAWN} && {PLOTS}.every(plot => {condition})")


OVERFLOWED = overflowed()


@pytest.fixture(scope="module")
def runs():
    """The demo's, and one whose alert will fire."""
    return [*demo_runs(), OVERFLOWED]


@pytest.fixture
def opened(goto):
    """A page that shows a run, once its curves are drawn."""

    def make(path):
        page = goto(path)
        page.wait_for_function(DRAWN)
        return page

    return make


def test_what_is_lost_where_and_since_when_stand_on_a_laptops_first_screen(opened):
    page = opened("/run/run-plain")
    page.set_viewport_size({"width": 1280, "height": 800})
    page.wait_for_selector("#run-panel .hm image")
    parts = ("h1", ".answer .verdict", ".numbers-line", "#run-tab", "#run-stack", "#run-panel .hm image")
    *_, curves, cells = stack = boxes(*(page.locator(part).first for part in parts))
    assert all(one["y"] < next_one["y"] for one, next_one in pairwise(stack))
    head, tabs = stack[0], stack[3]
    assert tabs["y"] - head["y"] <= 150, "the head"
    assert cells["bottom"] <= 800
    assert cells["height"] >= 160
    updated = page.locator(".run-head time")
    assert re.fullmatch(r"just now|[1-9]\d* min ago", updated.inner_text())
    assert updated.get_attribute("title").endswith(" UTC")
    assert curves["bottom"] <= cells["y"]
    assert page.locator("#run-stack .card-title").all_text_contents() == TITLES
    assert min(page.evaluate(f"{PLOTS}.map(plot => plot._fullLayout._size.h)")) >= 155
    scales = page.evaluate(f"{PLOTS}.map(plot => plot._fullLayout.yaxis.range)")
    assert scales[1:] == [[0, 1.1], [0, 100]]
    labels = page.locator("#run-panel .ytick text").all_text_contents()
    assert len(labels) == len(set(labels)) == 12, "each layer is named"
    for part in (".answer .verdict", ".numbers-line"):
        assert page.locator(part).evaluate("(part) => part.scrollWidth <= part.clientWidth"), part
    curve = "#run-stack .chart-card:has([id*='edq']) .main-svg >> nth=0"
    for _ in ("light", "dark"):
        assert downloaded_picture(page, ".answer .verdict", curve, "#run-panel .hm") == "collage-plain.png"
        page.get_by_role("button", name="Light or dark").press("Enter")
        assert violations_now(page) == [], "switched on the open page"


def test_a_cell_of_the_heatmap_tells_its_layers_story(goto):
    run = next(run for run in demo_runs() if run.run_id == "run-plain")
    page = goto("/run/run-plain", "#run-panel .hm image")
    sent = {step: run.totals(step) for step in run.measured}
    lost = {step: totals["lost"] / (totals["elements"] - totals["idle"]) for step, totals in sent.items()}
    map_ = "document.querySelector('#run-panel .js-plotly-plot').data[0]"
    for place, layer in enumerate(run.layers):
        row = page.evaluate(f"{map_}.y").index(layer.name)
        within = max(step for step in run.measured if lost[step][place] <= 0.25)
        now, before = (percent(lost[step][place]) for step in (run.steps, within))
        said = page.evaluate(f"{map_}.text[{row}][{len(run.measured) - 1}]").replace("\u00a0", " ")
        assert said == f"{now}; more than 25.0 % since step {within + run.every}, {before} before"


@pytest.mark.nightly
def test_the_curves_of_the_first_screen_follow_the_address_and_their_controls(opened):
    page = opened("/run/run-plain?from=50&to=150&axis=step&layer=head.weight&smoothing=0.5")
    all_have(page, "'' + plot._fullLayout.xaxis.range === '50,150'")
    assert page.locator("#run-stack .gtitle", has_text="head.weight").count() == 2, "loss has no layer"
    all_have(page, "Math.max(...plot.data.at(-1).x) < 170")
    page.get_by_text("Axes", exact=True).click()
    page.locator("#run-scale").get_by_text("Log", exact=True).click()
    all_have(page, "plot._fullLayout.yaxis.type === 'log'")
    assert "scale=log" in page.url
    page.go_back()
    all_have(page, "plot._fullLayout.yaxis.type === 'linear'")
    page.locator("#run-axis").get_by_text("Tokens").click()
    all_have(page, "plot._fullLayout.xaxis.range[1] > 195 * 2048")
    assert "from=" not in page.url, "another axis shows the whole run"


@pytest.mark.nightly
def test_the_first_screens_curves_are_pointed_at_together_and_saved_and_a_zoom_is_that_of_the_heatmap(opened):
    page = opened("/run/run-plain")
    page.locator("#run-stack .nsewdrag").first.hover()
    all_have(page, "plot.querySelector('.hoverlayer .hovertext')")
    with page.expect_download() as found:
        page.get_by_role("button", name="Updates lost as CSV").press("Enter")
    assert found.value.suggested_filename == "collage-plain-updates-lost.csv"
    page.locator("#run-stack").get_by_role("heading", name="EDQ", exact=True).hover()
    page.get_by_text("Unit: ratio").wait_for()
    drag(page.locator("#run-stack .nsewdrag").last, (0.3, 0.2), (0.6, 0.2))
    page.wait_for_function("location.search.includes('from=') && location.search.includes('to=')")
    ends = re.findall(r"(?:from|to)=(\d+)", page.url)
    below = "document.querySelector('#run-panel .js-plotly-plot')"
    all_have(page, f"'' + plot._fullLayout.xaxis.range === '{','.join(ends)}'")
    page.wait_for_function(f"'' + {below}._fullLayout.xaxis.range === '{','.join(ends)}'")
    page.go_back()
    all_have(page, "plot._fullLayout.xaxis.range[1] > 195")


@pytest.fixture(scope="module")
def happened(send, client):
    """The step at which an alert fired on a run that was resumed."""
    send(OVERFLOWED, first=RESUMED_AT)

    def alerts():
        return [event for event in client.events(OVERFLOWED.run_id).events if event.kind == "alert"]

    alert, *_ = until(alerts, "the server's evaluation")
    assert "CollageNotFinite" in alert.text
    return alert.step


def test_attempts_and_alerts_are_marked_in_all_curves(opened, happened):
    marked = sorted((RESUMED_AT, happened))
    page = opened("/run/run-inf")
    for said in (f"attempt 2 at step {RESUMED_AT}", f"CollageNotFinite at step {happened}"):
        page.locator("#run-marks", has_text=said).wait_for()
    lines = "(plot.layout.shapes || []).filter(s => s.yref === 'y domain' && s.x0 === s.x1).map(s => s.x0)"
    found = f"[...new Set({lines})].sort((one, other) => one - other)"
    every = f"`${{{found}}}` === '{marked[0]},{marked[1]}'"
    all_have(page, every)
    handles = page.locator("#run-stack .annotation-text", has_text="▾")
    first = f"{PLOTS}[0].layout.annotations.filter(note => note.text === '▾').map(note => note.x)"
    places = page.evaluate(first)
    for step, said in ((RESUMED_AT, "attempt 2"), (happened, "CollageNotFinite")):
        handles.nth(places.index(step)).hover()
        page.locator("#run-stack .hoverlayer", has_text=f"{said}, step {step}").first.wait_for()
    page.get_by_role("tab", name="Curves").click()
    charts = "[...document.querySelectorAll('#run-panel .js-plotly-plot')].filter(p => p.data.length)"
    page.wait_for_function(f"{charts}.length === {CURVES} && {charts}.every(plot => {every})")


PHONE = {"width": 390, "height": 844}
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


def test_a_run_is_a_card_that_is_ticked_and_opened_by_keys(goto):
    phone = goto("/runs", **PHONE)
    arranged(phone)
    card = phone.locator("#runs-grid .ag-row", has=phone.get_by_role("link", name="plus", exact=True))
    card.locator(".row-values > div").nth(13).wait_for()
    card.locator(".verdict-cell", has_text="Healthy").wait_for()
    told = pairs(card)
    expected = {"Strategy": "Collage plus · bfloat16", "EDQ": "1.000", "Bytes per parameter": "12", "Step": "200"}
    expected |= {"State": "finished", "Tags": "test", "Notes": "–"}
    assert told.items() >= expected.items()
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
def test_a_wider_screen_has_its_table_and_a_narrower_its_cards(goto):
    page = goto("/runs", width=1280)
    strategies = page.locator("#runs-grid .ag-cell[col-id='strategy']")
    strategies.nth(4).wait_for()
    for _ in range(2):
        page.set_viewport_size(PHONE)
        arranged(page)
        assert strategies.count() == 0
        page.set_viewport_size({"width": 1280, "height": 900})
        strategies.nth(4).wait_for()
        arranged(page, cards=False)
        assert page.locator("#runs-grid .row-card").count() == 0


def test_groups_and_chosen_columns_are_cards_too(goto):
    phone = goto("/runs?by=strategy&column=health&column=loss&column=optimizer.lr", **PHONE)
    arranged(phone)
    card = phone.locator("#runs-grid .ag-row .row-card").first
    assert set(pairs(card)) == {"Training loss", "optimizer.lr"}
    card.get_by_role("button").click()
    phone.locator("#runs-grid .run-cell.member").first.wait_for()
    assert phone.locator("#runs-grid").evaluate(SIDEWAYS) == []


@pytest.mark.nightly
def test_cards_are_sorted(goto):
    phone = goto("/runs", **PHONE)
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


def test_a_layer_is_a_card_that_shows_its_layer(goto):
    phone = goto("/run/run-plain?tab=table", **PHONE)
    card = phone.locator(".layers-grid .ag-row", has_text="blocks.0.mlp.up.weight")
    card.locator(".row-values > div").nth(5).wait_for()
    assert set(pairs(card)) == {"Kind", "Share of the loss", "Lost", "Since", "Margin", "EDQ"}
    assert phone.locator(".layers-grid").evaluate(SIDEWAYS) == []
    card.click()
    phone.locator("#run-layer-card", has_text="blocks.0.mlp.up.weight").wait_for()


def test_an_incident_is_a_card(goto, client):
    until(lambda: client.incidents(alert="CollageNotFinite").events, "an incident")
    phone = goto("/incidents?alert=CollageNotFinite", **PHONE)
    row = phone.locator(".incident-table tbody tr").last
    row.wait_for()
    cells = row.locator("td")
    labels = cells.evaluate_all("cells => cells.map((cell) => getComputedStyle(cell, '::before').content)")
    assert labels == [f'"{label}"' for label in ("Alert", "Run", "Fired", "Lasted", "State", "Why")]
    lefts = cells.evaluate_all("cells => cells.map((cell) => Math.round(cell.getBoundingClientRect().left))")
    assert len(set(lefts)) == 1, "they stand below each other"
    assert phone.locator(".incident-table").evaluate(SIDEWAYS) == []
    assert violations_now(phone) == []
