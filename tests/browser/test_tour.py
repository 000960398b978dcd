"""The tour of docs/tour.md, walked as it says from the address that `make demo` prints to the three answers.

`python -m benchmarks.tour` walks it over the data that a demo has left, and prints how long each answer took.
"""

import re
from pathlib import Path

import pytest

from tests.browser.test_comparison import tick
from tests.browser.test_incidents import overflowed
from tests.dashboard.generated import demo_runs
from tests.waiting import until

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def runs():
    """The demo's, and one that makes an alert fire."""
    return [*demo_runs(), overflowed("resumed")]


def losing(page, url):
    """The first question: the run with the mark "!" that loses its updates, and what its page says."""
    page.goto(f"{url}/runs")
    said = page.locator(".ag-row .verdict-cell", has_text="of its updates").first
    assert said.locator(".mark").inner_text() == "!"
    # The grid keeps a row's pinned cells elsewhere, under the same number.
    number = said.evaluate("cell => cell.closest('.ag-row').getAttribute('row-index')")
    page.locator(f".ag-row[row-index='{number}'] .run-cell a").click()
    answer = page.locator(".answer .verdict")
    answer.wait_for()
    page.get_by_role("tab", name="Layers").click()
    worst = page.locator(".layers-grid .ag-row[row-index='0'] [col-id='layer']")
    return f"{answer.inner_text()} Worst: {worst.inner_text()}"


def recommended(page, url):
    """The second: the demo's runs ticked and compared, and the first sentence."""
    page.goto(f"{url}/runs")
    page.locator(".ag-row .run-cell a").first.wait_for()
    names = [name for name in page.locator(".ag-row .run-cell a").all_text_contents() if "resumed" not in name]
    for name in names:
        tick(page, name)
    page.get_by_role("link", name=f"Compare {len(names)} runs").click()
    page.locator("#compare-advice .verdict").first.wait_for()
    return page.locator("#compare-advice .verdict").first.inner_text()


def changed(page, url):
    """The third: from the header to the incident, what changed, and the first cause weighed."""
    page.goto(f"{url}/runs")
    page.locator("#opening").wait_for(state="detached")
    page.locator(".bar").get_by_role("link", name="Incidents").click()
    page.locator(".incident-table a").first.click()
    page.get_by_role("region", name="Before and after").wait_for()
    cause = page.locator(".cause").first
    return f"{page.locator('.answer').inner_text()} {cause.inner_text()}"


QUESTIONS = (losing, recommended, changed)


@pytest.mark.slow
@pytest.mark.nightly
def test_each_question_is_answered_by_what_the_tour_clicks(page, dashboard_url, evaluated):
    until(lambda: evaluated.incidents().events, "the server's evaluation")
    lost, train, change = (question(page, dashboard_url) for question in QUESTIONS)
    since = r"since the first measured step \(10\)"
    assert re.match(rf"!\s+Loses 57.* now .*, {since}; exp_avg_sq is stuck, {since}.* Worst: head\.weight", lost)
    assert "Use Collage plus · bfloat16: all 3 keep their updates (12 bytes a parameter)." in train
    assert re.search(r"since step 110.*Ruled out: 0 were not finite before", change, re.DOTALL)


def test_the_tour_names_what_it_clicks():
    tour = " ".join((Path(__file__).parents[2] / "docs" / "tour.md").read_text(encoding="utf-8").split())
    for named in ('the mark "!"', "*Compare*", "*Incidents*", "*Layers*", "Before and after"):
        assert named in tour
