"""What a cell of the heatmap says when it is pointed at: the form of numbers that all pages have."""

import numpy as np
import pytest

from tests.browser.test_run_figures import plot
from tests.dashboard.generated import GeneratedRun

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SHARES = (0.0, 1e-5, 4e-4, 0.0123, 0.5, 0.9997, 0.99998, 1.0)
TOLD = (
    "0\u00a0%",
    "< 0.01\u00a0%",
    "0.04\u00a0%",
    "1.2\u00a0%",
    "50.0\u00a0%",
    "99.97\u00a0%",
    "> 99.99\u00a0%",
    "100\u00a0%",
)


class Lossy(GeneratedRun):
    """A run whose layers lose these shares of their updates."""

    def totals(self, step):
        found = super().totals(step)
        elements = 1e6 * np.ones(len(self.layers))
        lost = elements * np.array([*SHARES, *[0.0] * (len(elements) - len(SHARES))])
        for key in ("idle", "distorted", "reversed"):
            found[key] = np.zeros(len(elements))
        return found | {"elements": elements, "lost": lost, "faithful": elements - lost, "unchanged": lost}


@pytest.fixture(scope="module")
def runs():
    return [Lossy("lossy", "plain", steps=60, run_id="run-lossy")]


def said(page, metric, row, column):
    """What the label of a cell says, its layer and step left out."""
    drawn = plot("heatmap", metric)
    layer, step = page.evaluate(
        f"""([row, column]) => {{
            const plot = {drawn};
            const {{ x, y }} = plot.data[0];
            Plotly.Fx.hover(plot, {{ xval: x.at(column), yval: row }}, "xy");
            return [y[row], x.at(column)];
        }}""",
        [row, column],
    )
    label = page.locator("#run-panel .hoverlayer .hovertext tspan")
    label.filter(has_text=layer).wait_for()
    assert label.all_text_contents()[-2] == f"step {step}"
    return label.all_text_contents()[-1]


def test_a_small_share_is_told_as_on_all_pages(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-lossy?tab=layers&metric=lost_update_ratio")
    page.wait_for_selector("#run-panel .hm image")
    assert [said(page, "lost_update_ratio", row, 3) for row in range(len(SHARES))] == list(TOLD)


def test_a_column_that_came_later_is_told_too(watched, growing):
    page = watched.page
    page.goto(f"{watched.url}/run/run-growing?tab=layers")
    page.wait_for_selector("#run-panel .hm image")
    growing(200)
    page.wait_for_function(f"{plot('heatmap', 'edq_ratio')}.data[0].x.at(-1) === 200")
    value = page.evaluate(f"{plot('heatmap', 'edq_ratio')}.data[0].z[2].at(-1)")
    assert said(page, "edq_ratio", 2, -1) == f"{value:.3f}"


def test_a_mouse_over_a_cell_reads_it(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-lossy?tab=layers&metric=lost_update_ratio")
    page.wait_for_selector("#run-panel .hm image")
    area = page.locator("#run-panel .nsewdrag").first
    box = area.bounding_box()
    area.hover(position={"x": box["width"] * 0.99, "y": box["height"] * 1.5 / 12})
    page.locator("#run-panel .hoverlayer .hovertext", has_text="< 0.01").wait_for()
