"""The table of runs as people keep it: columns, conditions, pins, a baseline, saved views, work in bulk."""

import re
from typing import Any

import pytest

from collage_monitor.number_text import value_text
from tests.browser.test_comparison import tick
from tests.browser.test_layout import serious_violations
from tests.dashboard.generated import GeneratedRun
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.usefixtures("evaluated")]

RATES = {"slow rate": 3e-4, "fast rate": 1e-3, "faster rate": 3e-3}


@pytest.fixture(scope="module")
def runs():
    """Three rates of one strategy, the slowest of which loses most, and a run without a configuration."""
    rated = [
        GeneratedRun(name, strategy, steps=60, run_id=f"run-{name.split()[0]}", config={"optimizer": {"lr": rate}})
        for (name, rate), strategy in zip(RATES.items(), ("plain", "plus", "plus"), strict=True)
    ]
    return [*rated, GeneratedRun("bare", "light", steps=60)]


def shown(page):
    """The names of the rows below those that stay on top."""
    rows = page.locator(".ag-pinned-left-cols-container .ag-row")
    return rows.evaluate_all("rows => rows.map((row) => row.querySelector('a')?.textContent ?? '')")


def heads(page):
    """The columns from left to right."""
    cells = page.locator(".ag-header-cell")
    of = "(cell) => [Number(cell.getAttribute('aria-colindex')), cell.getAttribute('col-id')]"
    return [name for _, name in sorted(cells.evaluate_all(f"cells => cells.map({of})"))]


def becomes(page, names):
    until(lambda: sorted(shown(page)) == sorted(names), f"the rows {names}")


SIZES = (0.0, 1e-5, 4e-5, 0.0004, 0.0123, 0.33216, 0.9132, 0.9994, 0.99997, 1.0, 1.2345, 8.9, 9.0, 123.456, 12345.6)
FORMS = {
    "share": "lost_update_ratio",
    "ratio": "edq_ratio",
    "margin": "half_ulp_margin",
    "number": "loss",
    "bytes": "bytes_per_parameter",
}


def assert_written_as_on_pages(page):
    """Two languages, one form: the functions of the grid against those of the pages."""
    values: list[Any] = [sign * size for size in SIZES for sign in (1, -1)]
    values += [1.5e9, -23.0, None, "NaN", "Infinity"]
    for form, key in FORMS.items():
        told = page.evaluate(f"values => values.map((value) => window.collageNumbers.{form}(value))", values)
        pairs = zip(values, told, strict=True)
        wrong = {value: text for value, text in pairs if text.replace("\u00a0", " ") != value_text(key, value)}
        assert not wrong, form
    group = "{value: 1, colDef: {field: 'e'}, data: {over: {e: [3, spread]}}}"
    row = f"(spread) => dashAgGridFunctions.ofRatio({group})"
    told = [page.evaluate(row, spread) for spread in (0.0004, 0.002)]
    assert told == ["1.000", "1.000 ±\u00a00.0020"], "a spread that no shown digit has is left out"
    now = page.locator("svg[aria-label^='EDQ over the run'] text").all_text_contents()
    assert now
    assert all(re.fullmatch(r"\d\.\d{3}", text) for text in now)


@pytest.mark.nightly
def test_columns_are_chosen_ordered_and_kept_in_the_address(goto):
    page = goto("/runs", ".run-cell")
    page.locator("#page summary", has_text="Columns").click()
    page.get_by_role("textbox", name="Columns, in order").fill("optimizer.lr")
    page.keyboard.press("Enter")
    cell = page.locator(".ag-row .ag-cell[col-id='optimizer.lr']")
    cell.filter(has_text="0.0003").wait_for()
    order = heads(page)
    assert order.index("optimizer.lr") == order.index("strategy") + 1, "what is added is seen without scrolling"
    address = page.url
    assert "column=optimizer.lr" in address
    page.goto("about:blank")
    page.goto(address)
    cell.filter(has_text="0.001").wait_for()
    goto("/?column=optimizer.lr&column=health")
    cell.first.wait_for()
    assert heads(page) == ["name", "optimizer.lr", "health"]
    page.locator("#page summary", has_text="Columns").click()
    page.get_by_role("textbox", name="Columns, in order").click()
    page.keyboard.press("Backspace")
    page.wait_for_function("!location.search.includes('column=health')")
    page.go_back()
    page.wait_for_function("location.search.includes('column=health')")
    page.locator(".ag-header-cell[col-id='health']").wait_for()
    goto("/?column=health&column=loss&column=optimizer.lr")
    page.locator(".ag-row .ag-cell[col-id='optimizer.lr']", has_text="0.0003").wait_for()
    page.locator(".ag-header-cell[col-id='optimizer.lr']").drag_to(page.locator(".ag-header-cell[col-id='loss']"))
    page.wait_for_function("location.search.endsWith('column=health&column=optimizer.lr&column=loss')")


def test_conditions_narrow_the_table_and_one_that_cannot_be_read_says_what_to_write(goto):
    page = goto("/runs")
    becomes(page, [*RATES, "bare"])
    page.get_by_text("Filters", exact=True).click()
    conditions = page.get_by_role("textbox", name="Conditions on columns and entries")
    conditions.fill("optimizer.lr >= 1e-3")
    page.keyboard.press("Enter")
    becomes(page, ["fast rate", "faster rate"])
    page.locator("#runs-count", has_text="2 runs").wait_for()
    conditions.fill("optimizer.lr < 2e-3")
    page.keyboard.press("Enter")
    becomes(page, ["fast rate"])
    conditions.fill("nonsense")
    page.keyboard.press("Enter")
    page.get_by_text("'nonsense' is no condition; write a column").first.wait_for()
    page.keyboard.press("Backspace")
    becomes(page, ["fast rate"])
    conditions.fill("edq < 0.5")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Clear filters").click()
    becomes(page, [*RATES, "bare"])


def test_a_row_is_one_line_with_numbers_as_on_pages_and_its_sentence_is_told_on_focus(goto):
    page = goto("/runs")
    row = page.locator(".ag-center-cols-container .ag-row", has_text="of its updates")
    row.wait_for()
    assert row.bounding_box()["height"] == 36
    words = row.locator(".verdict-cell").inner_text().replace("!", "").split()
    assert len(words) <= 6
    row.locator(".ag-cell").first.click()
    page.locator("#runs-sentence", has_text="Loses").wait_for()
    assert page.locator("#runs-sentence").inner_text() == row.locator(".verdict-cell").get_attribute("title")
    assert_written_as_on_pages(page)


def test_pinned_runs_stay_on_top_and_numbers_are_told_as_differences_from_the_baseline(goto):
    page = goto("/?sort=name")
    becomes(page, [*RATES, "bare"])
    tick(page, "slow rate")
    page.get_by_role("button", name="Baseline").click()
    page.get_by_text("Baseline: slow rate").wait_for()
    top = page.locator(".ag-floating-top .ag-row a", has_text="slow rate")
    top.wait_for()
    own = page.locator(".ag-center-cols-container .ag-row", has_text="Healthy").locator("[col-id='loss']").first
    own.get_by_text("−").wait_for()
    value, difference = own.inner_text().replace("−", "-").split("\n")
    baseline = page.locator(".ag-floating-top [col-id='loss']").inner_text()
    assert float(value) - float(baseline) == pytest.approx(float(difference), abs=2e-3)
    page.locator("#runs-query").fill("bare")
    becomes(page, ["bare"])
    assert top.count() == 1
    page.reload()
    top.wait_for()
    page.get_by_role("button", name="Let go of slow rate").click()
    page.wait_for_function("!document.querySelector('.ag-floating-top .ag-row')")
    assert "baseline" not in page.url


def test_picked_runs_are_tagged_archived_and_deleted_together(goto, client, send):
    for name in ("old one", "old two"):
        send(GeneratedRun(name, "plus", steps=20))
    page = goto("/?q=old&column=tags")
    becomes(page, ["old one", "old two"])
    for name in ("old one", "old two"):
        tick(page, name)
    # The actions are drawn anew with each run that is picked.
    page.get_by_role("link", name="Compare 2 runs").wait_for()
    page.get_by_label("Tags to add").fill("done, kept")
    page.get_by_role("button", name="Tag", exact=True).click()
    page.locator(".ag-row [col-id='tags']", has_text="test, done, kept").nth(1).wait_for()
    page.get_by_role("button", name="Archive", exact=True).click()
    page.locator("#runs-count", has_text="No run matches").wait_for()
    assert client.run("run-old-one").tags == ["test", "done", "kept", "archived"]
    page.locator("#runs-undo", has_text="Archived").get_by_role("button", name="Undo").click()
    until(lambda: "archived" not in client.run("run-old-one").tags, "the runs to come back")
    page.locator("#runs-undo:empty").wait_for(state="attached")
    page.get_by_role("button", name="Archive", exact=True).click()
    until(lambda: "archived" in client.run("run-old-one").tags, "them to be archived again")
    goto("/?q=old&archived=1")
    becomes(page, ["old one", "old two"])
    asked = []

    def confirm(dialog):
        asked.append(dialog.message)
        dialog.accept()

    page.on("dialog", confirm)
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("#runs-count", has_text="No run matches").wait_for()
    assert asked[0].startswith("Delete old one, old two, with all curves, notes and incidents? ")
    assert {row.name for row in client.run_table(q="old").rows} == set()
    said = page.locator("#runs-undo", has_text="Deleted 2 runs.")
    said.wait_for()
    assert serious_violations(page, 1440) == []
    said.get_by_role("button", name="Undo").press("Enter")
    becomes(page, ["old one", "old two"])
    assert client.run("run-old-one").tags == ["test", "done", "kept", "archived"]
    page.locator("#runs-undo:empty").wait_for(state="attached")
