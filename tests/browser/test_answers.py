"""What a page says first: numbers that agree, curves with room, titles that say of what."""

import re

import pytest
from collage_dashboard.figures.style import STRATEGY_COLOURS

from tests.dashboard.generated import GeneratedRun, demo_runs

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def runs():
    """The demo's, and five more to compare."""
    more = [GeneratedRun(f"seed {number}", "stochastic", run_id=f"run-seed-{number}") for number in range(5)]
    return [*demo_runs(), *more]


def test_the_sentence_quotes_the_numbers_that_stand_beside_it(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-plain")
    page.locator(".number-card").first.wait_for()
    said = page.locator(".answer .verdict").inner_text()
    edq, lost = (
        page.locator(f".number-card[data-metric='{key}'] .value").inner_text()
        for key in ("edq_ratio", "lost_update_ratio")
    )
    assert re.fullmatch(r"\d\.\d{3}", edq)
    assert re.fullmatch(r"\d+\.\d %", lost)
    assert f"{lost} of updates are lost" in said
    why = page.locator(".answer .reasons").all_text_contents()
    assert any(f"Loses {lost} of its updates (EDQ {edq})" in reason for reason in why)
    card = page.locator(".number-card[data-metric='edq_ratio']").inner_text()
    assert re.search(r"over steps 10 to 200, 95 % interval\s+newest step 0\.\d+", card)
    page.goto(f"{watched.url}/?q=run-plain")
    page.locator(f".ag-row .verdict-cell[title*='EDQ {edq}']", has_text=f"{lost} of").wait_for()


def test_ten_runs_share_one_legend_and_leave_room_for_their_curves(open_page, dashboard_url):
    page = open_page(dashboard_url, width=1280).page
    names = [
        "plain",
        "light",
        "plus",
        "master-weights",
        "fp32-reference",
        *(f"seed-{number}" for number in range(5)),
    ]
    page.goto(f"{dashboard_url}/compare?" + "&".join(f"run=run-{name}" for name in names))
    page.wait_for_selector("#compare-chart-3 .scatterlayer .trace", state="attached")
    page.locator("#compare-legend .run-label").nth(9).wait_for()
    assert page.locator("#compare-legend .run-label").count() == 10
    assert page.locator(".legend .traces").count() == 0
    heights = page.evaluate(
        """() => [...document.querySelectorAll("[id^='compare-chart-'] .js-plotly-plot")]
            .map(plot => plot._fullLayout._size.h)"""
    )
    assert len(heights) == 4
    assert min(heights) > 200
    page.set_viewport_size({"width": 1920, "height": 1080})
    assert page.locator("main, .page").first.evaluate("page => page.clientWidth") > 0.95 * 1920


def test_titles_say_layer_and_steps_and_a_curve_has_its_strategys_colour(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-plain?layer=blocks.0.mlp.up.weight&step=100")
    page.wait_for_selector("#run-panel .barlayer .point", state="attached")
    page.locator(".gtitle", has_text="blocks.0.mlp.up.weight, step 100").wait_for()
    page.locator(".gtitle", has_text="blocks.0.mlp.up.weight").nth(1).wait_for()
    assert page.locator(".gtitle", has_text="blocks.0.mlp.up.weight").count() == 2
    assert page.get_by_role("heading", name="EDQ by layer").count() == 1
    page.wait_for_function(
        """colour => [...document.querySelectorAll('#run-panel .js-plotly-plot')].flatMap(plot => plot.data ?? [])
            .some(trace => trace.type === 'scatter' && trace.line?.color === colour)""",
        arg=STRATEGY_COLOURS["plain"],
    )
