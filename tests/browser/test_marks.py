"""A click beside a mark of the curves asks what changed at the mark, and so do keys; elsewhere at the step."""

import numpy as np
import pytest

from collage_monitor.client import Client
from tests.dashboard.generated import GeneratedRun
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser]

FELL_AT, STEPS = 310, 600
STACK = "document.querySelector('#run-stack .js-plotly-plot')"


class Falling(GeneratedRun):
    """Half of its updates, and of its descent, are lost from a step on."""

    def totals(self, step):
        totals = super().totals(step)
        if step >= FELL_AT:
            lost = np.floor(totals["faithful"] / 2)
            totals |= {"lost": lost, "faithful": totals["faithful"] - lost}
            totals["intended_effective_sum"] = totals["intended_effective_sum"] / 2
        return totals


@pytest.fixture(scope="module")
def runs():
    return [Falling("falling", "plus", run_id="run-falling", steps=STEPS)]


@pytest.fixture
def page(watched, server_url):
    """The run's page, its onset marked."""
    address, token_file = server_url
    with Client(address, token_file.read_text().strip()) as client:
        until(lambda: [change.step for change in client.overview("run-falling").changes] == [FELL_AT], "the onset")
    watched.page.goto(f"{watched.url}/run/run-falling")
    watched.page.wait_for_function(f"{STACK}?.layout.shapes?.some(shape => shape.x0 === {FELL_AT})")
    return watched.page


def click_beside(page, pixels):
    """Click so many pixels to the right of the onset's line in the topmost curve."""
    area = page.locator("#run-stack .nsewdrag").first
    at = page.evaluate(f"{STACK}._fullLayout.xaxis.d2p({FELL_AT})")
    area.click(position={"x": at + pixels, "y": area.bounding_box()["height"] / 2})


def asked_about(page, step):
    """Wait until the page asks what changed at the step."""
    page.wait_for_function("step => new URLSearchParams(location.search).get('at') === String(step)", arg=step)


@pytest.mark.parametrize("pixels", [-5, 0, 5])
def test_a_click_beside_a_mark_asks_about_the_mark(page, pixels):
    """Two measured steps are so near together that one cannot aim between them."""
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function(f"{STACK}._fullLayout.width < 400")
    click_beside(page, pixels)
    asked_about(page, FELL_AT)


def test_a_click_further_away_asks_about_the_step_itself(page):
    click_beside(page, 40)
    page.wait_for_function("new URLSearchParams(location.search).has('at')")
    assert f"at={FELL_AT}" not in page.url


def test_keys_ask_about_the_marks(page):
    place = page.locator("#run-stack [data-curves], #run-stack[data-curves]").first
    assert "n and p ask what changed at the next and the previous mark" in place.get_attribute("aria-label")
    place.focus()
    page.keyboard.press("n")
    asked_about(page, FELL_AT)
    page.locator("#run-change", has_text="Before, steps").wait_for()
    page.keyboard.press("p")
    asked_about(page, FELL_AT)
