"""The comparison page of a real demo's data: five trainings, few steps, everything measured in them."""

import subprocess

import pytest

from tests.browser.test_comparison import compare, legend
from tests.ports import command, free_port
from tests.system import require
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.browser

STEPS = 20
NAMES = ("plain float32", "plain bfloat16", "light bfloat16", "plus bfloat16", "master-weights bfloat16")


@pytest.fixture(scope="module")
def server_url(tmp_path_factory, served):
    """The address of a server over the folder that a demo of a few steps has left."""
    require("chromium")
    output = tmp_path_factory.mktemp("demo")
    ports = ["--port", free_port(), "--dashboard-port", free_port()]
    demo = command("demo", "--exit", "--output", output, "--steps", STEPS, *ports)
    subprocess.run(demo, check=True, capture_output=True, cwd=output, timeout=4 * PATIENCE_SECONDS)
    with served(output / "data") as found:
        yield found


def test_a_demos_runs_are_picked_and_drawn_under_their_names(watched):
    page = watched.page
    compare(page, watched.url, NAMES)
    for chart in range(4):
        assert sorted(legend(page, chart)) == sorted(NAMES)
    last = page.evaluate(
        """() => Object.fromEntries(document.querySelector('#compare-chart-0 .js-plotly-plot').data
            .filter(trace => trace.showlegend !== false)
            .map(trace => [trace.name, trace.y[trace.y.length - 1]]))"""
    )
    assert last["plain bfloat16"] < 0.95 < last["plus bfloat16"]
    assert page.locator("#compare-table tr", has_text="Collage plus").count() == 1
