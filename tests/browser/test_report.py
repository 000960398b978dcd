"""The report as people open it: downloaded from a page, then a file of its own in a browser, without a network."""

import pytest

from tests.browser.test_layout import HOSTILE, LOOKS, pale_inks, serious_violations
from tests.dashboard.generated import GeneratedRun, demo_runs

pytestmark = [pytest.mark.slow, pytest.mark.browser]

DRAWN = "[...document.querySelectorAll('.plotly-graph-div')].every(chart => chart.querySelector('.main-svg'))"


@pytest.fixture(scope="module")
def runs():
    """The demo's, and one with a hostile name."""
    return [*demo_runs(), GeneratedRun(HOSTILE[1], "plain", run_id="run-hostile-1")]


SEVERAL = "/compare?run=run-hostile-1&run=run-plus&run=run-fp32-reference"


@pytest.mark.drawn(by=lambda path, scheme, **_: [path, scheme])
@LOOKS
@pytest.mark.parametrize(("path", "charts"), [("/run/run-hostile-1", 9), (SEVERAL, 6)])
def test_a_downloaded_report_opens_by_itself_for_everyone(
    open_page, dashboard_url, path, charts, scheme, width, tmp_path
):
    page = open_page(dashboard_url, scheme=scheme).page
    page.goto(dashboard_url + path)
    with page.expect_download() as found:
        page.get_by_role("link", name="Download report").click()
    assert found.value.suggested_filename.startswith("collage-")
    file = tmp_path / "report.html"
    found.value.save_as(file)
    page.goto("about:blank")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.set_content(file.read_text(encoding="utf-8"))
    page.wait_for_function(DRAWN)
    assert page.locator(".plotly-graph-div").count() == charts
    assert page.locator("main img").count() == 0
    assert pale_inks(page) == set()
    assert serious_violations(page, width) == []
    assert not [url for url in asked if not url.startswith(("data:", "blob:", "about:"))]
