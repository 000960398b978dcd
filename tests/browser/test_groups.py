"""The table of runs in groups: runs that differ by seed are one row, mean ± spread, that opens into its runs."""

import pytest

from tests.browser.conftest import wait_for_evaluation
from tests.browser.test_comparison import tick
from tests.browser.test_layout import serious_violations
from tests.dashboard.generated import GeneratedRun

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.usefixtures("evaluated")]

SEEDS = 3
LOSSES = {"plain": 2.0, "plus": 1.5}
FILLING = 46
"""More runs than one question of the table reads."""


def seeded(strategy, seed):
    """Its loss is its strategy's and its seed's."""
    loss, run_id = LOSSES[strategy] + 0.25 * seed, f"run-{strategy}-{seed}"
    return GeneratedRun(
        f"{strategy}-seed{seed}", strategy, run_id=run_id, steps=40, logs=lambda step: {"loss": loss}
    )


@pytest.fixture(scope="module")
def runs():
    return [seeded(strategy, seed) for strategy in LOSSES for seed in range(SEEDS)]


def names(page):
    """What the rows on the screen say, from the top."""
    rows = page.locator(".runs-grid .ag-pinned-left-cols-container .ag-row").all()
    rows.sort(key=lambda row: int(row.get_attribute("row-index")))
    return [row.locator(".group-name, a").text_content() for row in rows]


def first_row(page, name):
    """Wait until the table begins with this row."""
    row = '.ag-pinned-left-cols-container .ag-row[row-index="0"]'
    said = f"document.querySelector('{row} .group-name, {row} a')?.textContent"
    page.wait_for_function(f"name => {said} === name", arg=name)


def choose_grouping(page, title):
    if not page.locator("#runs-by").is_visible():
        page.get_by_text("Filters", exact=True).click()
    page.locator("#runs-by").click()
    page.get_by_role("option", name=title).click()


def test_runs_that_differ_by_seed_are_one_row_that_opens(goto):
    page = goto("/?q=seed&sort=loss")
    first_row(page, "plus-seed0")
    choose_grouping(page, "By strategy")
    page.wait_for_function("location.search.includes('by=strategy')")
    first_row(page, "Collage plus · bfloat16 · 3 runs")
    assert names(page) == ["Collage plus · bfloat16 · 3 runs", "Plain · bfloat16 · 3 runs"]
    cell = page.locator('.ag-row[row-index="0"] .ag-cell[col-id="loss"]')
    assert cell.text_content() == "–", "last losses of other seeds, at other steps, do not compare strategies"
    choose_grouping(page, "By configuration")
    first_row(page, "plus-seed2 and 2 more · 3 runs")
    page.go_back()
    first_row(page, "Collage plus · bfloat16 · 3 runs")
    page.wait_for_function("document.querySelector('#runs-by').value === 'By strategy'")

    page.get_by_role("button", name="3 runs of Plain · bfloat16").click()
    page.get_by_role("link", name="plain-seed2", exact=True).wait_for()
    page.wait_for_function("location.search.includes('open=')")
    assert names(page)[1:] == ["Plain · bfloat16 · 3 runs", "plain-seed0", "plain-seed1", "plain-seed2"]
    assert serious_violations(page, 1440) == []

    page.locator(".ag-header-cell-text", has_text="EDQ").first.click()
    first_row(page, "Plain · bfloat16 · 3 runs")
    assert "sort=edq_ratio" in page.url
    assert names(page)[4] == "Collage plus · bfloat16 · 3 runs"

    page.get_by_role("link", name="plain-seed1", exact=True).click()
    page.wait_for_selector("#run-panel .hm image")
    page.go_back()
    first_row(page, "Plain · bfloat16 · 3 runs")
    page.get_by_role("link", name="plain-seed1", exact=True).wait_for()
    page.wait_for_function("document.querySelector('#runs-by').value === 'By strategy'")

    page.get_by_label("Search names, projects, tags and ids").fill("seed1")
    first_row(page, "Plain · bfloat16 · 1 run")
    page.get_by_role("button", name="1 run of Plain · bfloat16", expanded=True).click()
    page.get_by_role("link", name="plain-seed1", exact=True).wait_for(state="detached")


@pytest.mark.nightly
def test_what_was_picked_survives_search_pages_and_grouping(goto, client, send):
    for place in range(FILLING):
        send(GeneratedRun(f"filler-{place:02}", "light", steps=10, blocks=1))
    wait_for_evaluation(client)
    page = goto("/?sort=-name&by=strategy")
    page.get_by_role("checkbox", name="Pick Plain · bfloat16 to compare").check()
    page.get_by_role("link", name="Compare 3 runs").wait_for()
    goto("/?sort=-name")
    first_row(page, "plus-seed2")
    page.get_by_role("checkbox", name="Pick plain-seed1 to compare", checked=True).wait_for()
    page.evaluate("row => dash_ag_grid.getApi('runs-grid').ensureIndexVisible(row)", FILLING + 5)
    tick(page, "filler-00")
    page.get_by_role("link", name="Compare 4 runs").wait_for()
    page.evaluate("dash_ag_grid.getApi('runs-grid').ensureIndexVisible(0)")
    page.get_by_role("checkbox", name="Pick plain-seed1 to compare").uncheck()
    page.get_by_label("Search names, projects, tags and ids").fill("filler-00")
    page.get_by_role("link", name="plain-seed1", exact=True).wait_for(state="detached")
    page.get_by_role("checkbox", name="Pick filler-00 to compare", checked=True).wait_for()
    page.get_by_label("Search names, projects, tags and ids").fill("")
    choose_grouping(page, "By strategy")
    page.get_by_role("checkbox", name="Pick Plain · bfloat16 to compare", checked=False).wait_for()
    link = page.get_by_role("link", name="Compare 3 runs").get_attribute("href")
    assert link.endswith("?run=run-plain-2&run=run-plain-0&run=run-filler-00")


def test_a_choice_made_while_another_is_being_put_into_the_address_stays(goto):
    page = goto("/runs?sort=-name&q=seed")
    first_row(page, "plus-seed2")
    page.evaluate(
        """() => {
            window.collageView.put("runs", { q: null });
            window.dash_clientside.set_props("runs-by", { value: "strategy" });
        }"""
    )
    page.wait_for_function("location.search === '?sort=-name&by=strategy'")
    page.wait_for_function("document.querySelector('#runs-by').value === 'By strategy'")
    page.wait_for_function("document.querySelector('#runs-query').value === ''")
    page.evaluate(
        """() => {
            window.collageView.put("runs", { by: null });
            window.dash_clientside.set_props("runs-query", { value: "seed1" });
        }"""
    )
    page.wait_for_function("location.search === '?sort=-name&q=seed1'")
    first_row(page, "plus-seed1")
    page.wait_for_function("document.querySelector('#runs-by').value === ''")
