"""What changed at a step: asked with a click on a curve, by keyboard, of the steps that a zoom shows, by a link."""

import pytest

from tests.browser.boxes import drag
from tests.dashboard.test_before_after import RAISED_AT, Raised

pytestmark = [pytest.mark.slow, pytest.mark.browser]
CURVES = "#run-stack .nsewdrag"
READY = "document.querySelector('#run-stack .js-plotly-plot')?.data?.length > 3"


@pytest.fixture(scope="module")
def runs():
    return [Raised("raised", "plus", run_id="run-raised", steps=2 * RAISED_AT)]


def rows(page, title):
    """The rows that changed, of the card of this title."""
    card = page.get_by_role("region", name=title)
    card.wait_for()
    return [row.split("\t") for row in card.locator("table").first.locator("tbody tr").all_inner_texts()]


def field(page):
    """Where a step or a range is typed."""
    return page.get_by_label("What changed at this step, or in this range of steps")


def test_a_typed_step_or_range_says_what_changed_and_stands_in_the_address(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-raised")
    page.wait_for_function(READY)
    field(page).focus()
    page.keyboard.type("now")
    page.keyboard.press("Enter")
    page.get_by_text("Give a step, such as 800, or a range of steps, such as 800-900").wait_for()
    page.keyboard.press("Control+a")
    page.keyboard.type("800")
    page.keyboard.press("Enter")
    [row] = rows(page, "What changed at step 800")
    assert (row[0], row[3]) == ("Learning rate", "× 3.00")
    assert "at=800" in page.url
    page.keyboard.press("Control+a")
    page.keyboard.type("400-600")
    page.keyboard.press("Enter")
    page.get_by_role("region", name="What changed in steps 400 to 600").get_by_text("Nothing that was").wait_for()
    marks = "document.querySelector('#run-stack .js-plotly-plot').layout.shapes?.map((shape) => shape.x0)"
    page.wait_for_function(f"{marks}?.includes(400) && {marks}.includes(600)")
    page.go_back()
    page.get_by_role("region", name="What changed at step 800").wait_for()
    assert field(page).input_value() == "800"
    page.get_by_role("button", name="Close").click()
    page.wait_for_function("!document.querySelector('#run-change > *') && !location.search.includes('at=')")
    assert field(page).input_value() == ""


def test_a_click_on_a_curve_asks_there_and_a_double_click_shows_all_steps_and_asks_nothing(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-raised?from=400&to=1200")
    page.wait_for_function(READY)
    curve = page.locator(CURVES).nth(1)
    curve.dblclick()
    page.wait_for_function("!location.search.includes('from=')")
    box = curve.bounding_box()
    curve.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    page.wait_for_function("location.search.includes('at=')")
    at = int(page.url.rpartition("at=")[2])
    assert abs(at - RAISED_AT) <= 40
    page.get_by_role("region", name=f"What changed at step {at}").wait_for()
    page.go_back()
    page.wait_for_function("!location.search.includes('at=')")


def test_the_steps_that_a_zoom_shows_are_held_against_as_many_before(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-raised")
    page.wait_for_function(READY)
    button = page.get_by_role("button", name="What changed in the steps shown")
    assert not button.is_visible()
    drag(page.locator(CURVES).first, (0.55, 0.5), (0.9, 0.5))
    button.click()
    page.wait_for_function("location.search.includes('at=')")
    said = {row[0]: row[3] for row in rows(page, "What changed in steps")}
    assert said["Learning rate"].startswith("×")


def test_a_link_arrives_at_what_changed(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-raised?at=800")
    card = page.get_by_role("region", name="What changed at step 800")
    card.wait_for()
    page.wait_for_function(
        "document.querySelector('#run-change')?.getBoundingClientRect().bottom <= window.innerHeight + 1"
    )
