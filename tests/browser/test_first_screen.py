"""The first screen of a run: the sentence, its numbers, and the curves on one axis with what happened marked."""

import re
from itertools import pairwise

import pytest

from collage_monitor.client import Client
from tests.browser.boxes import boxes, drag
from tests.browser.test_incidents import Overflowed
from tests.dashboard.generated import demo_runs
from tests.dashboard.posting import post_run
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser]

STACK = "document.querySelector('#run-stack .js-plotly-plot')"
TITLES = ["Training loss", "EDQ (ratio)", "Updates lost", "Learning rate"]
RESUMED_AT, CURVES = 61, 7


@pytest.fixture(scope="module")
def runs():
    """The demo's, and one whose alert will fire."""
    return [*demo_runs(), Overflowed("overflowed", "plus", state="running", run_id="run-inf")]


@pytest.fixture
def opened(watched):
    """A page that shows a run, once its curves are drawn."""

    def make(run, search=""):
        watched.page.goto(f"{watched.url}/run/{run}{search}")
        watched.page.wait_for_function(f"{STACK}?.data.length >= 4")
        return watched.page

    return make


def test_sentence_numbers_and_curves_stand_on_one_screen_above_the_tabs(opened):
    page = opened("run-plain")
    parts = (".answer", ".number-card", "#run-stack", "#run-worst", "#run-tab", "#run-stack .xtitle")
    *stack, title = boxes(*(page.locator(part).first for part in parts))
    assert title["bottom"] < page.viewport_size["height"]
    answer, card, *others = stack
    assert answer["bottom"] < card["bottom"]
    assert all(one["bottom"] < next_one["y"] for one, next_one in pairwise([card, *others]))
    shown = page.locator("#run-stack .annotation-text").all_text_contents()
    assert shown == TITLES
    ticks = page.locator("#run-stack .xtick").all()
    assert len({round(tick["y"]) for tick in boxes(*ticks)}) == 1
    assert len(page.evaluate(f"{STACK}._fullLayout._subplots.xaxis")) == 1
    assert len(page.evaluate(f"{STACK}._fullLayout._subplots.yaxis")) == len(TITLES)


def test_the_curves_of_the_first_screen_follow_the_address_and_their_controls(opened):
    page = opened("run-plain", "?from=50&to=150&axis=step&layer=head.weight&smoothing=0.5")
    assert page.evaluate(f"{STACK}._fullLayout.xaxis.range") == [50, 150]
    assert page.locator("#run-stack .annotation-text", has_text="head.weight").count() == 2, "loss has no layer"
    assert max(page.evaluate(f"{STACK}.data.map(t => Math.max(...t.x))")) < 170, "and is read anew"
    types = f"['', 2, 3, 4].map(n => {STACK}._fullLayout['yaxis' + n].type)"
    page.locator("#run-scale").get_by_text("Log", exact=True).click()
    page.wait_for_function(f"{types}.every(type => type === 'log')")
    assert "scale=log" in page.url
    page.go_back()
    page.wait_for_function(f"{types}.every(type => type === 'linear')")
    page.locator("#run-stack .nsewdrag").first.dblclick()
    page.wait_for_function(f"{STACK}._fullLayout.xaxis.range[1] > 195")
    page.locator("#run-axis").get_by_text("Tokens").click()
    page.wait_for_function(f"{STACK}._fullLayout.xaxis.range[1] > 195 * 2048")
    assert page.locator("#run-stack .xtitle").text_content() == "tokens"


@pytest.mark.nightly
def test_the_first_screens_curves_are_pointed_at_together_and_saved_and_a_zoom_is_that_of_the_charts_below(opened):
    page = opened("run-plain", "?tab=norms")
    page.locator("#run-stack .nsewdrag").first.hover()
    page.wait_for_function(f"{STACK}.querySelectorAll('.hoverlayer .hovertext').length === 4")
    with page.expect_download() as found:
        page.get_by_role("button", name="Curves of the run as CSV").press("Enter")
    head, *lines = found.value.path().read_text().splitlines()
    assert found.value.suggested_filename == "collage-plain-curves.csv"
    assert head.startswith("run,run_id,metric,layer,first_step,step,value,minimum,maximum,low,high,")
    metrics = [metric for metric in ("loss", "edq_ratio", "lost_update_ratio", "learning_rate") for _ in range(20)]
    assert [line.split(",")[:3] for line in lines] == [["plain", "run-plain", metric] for metric in metrics]
    with page.expect_download() as picture:
        page.get_by_role("button", name="Curves of the run as PNG").press("Enter")
    assert picture.value.suggested_filename == "collage-plain-curves-of-the-run.png"
    page.locator("#run-stack .annotation-text", has_text="EDQ").hover()
    page.locator("#run-stack .hoverlayer", has_text="Share of the intended descent").wait_for()

    drag(page.locator("#run-stack .nsewdrag").last, (0.3, 0.2), (0.6, 0.6))
    page.wait_for_function("location.search.includes('from=') && location.search.includes('to=')")
    ends = [int(end) for end in re.findall(r"(?:from|to)=(\d+)", page.url)]
    below = "[...document.querySelectorAll('#run-panel .js-plotly-plot')].filter(p => p.data.length)"
    page.wait_for_function(
        f"ends => [{STACK}, ...{below}].every(p => '' + p._fullLayout.xaxis.range === '' + ends)", arg=ends
    )
    page.go_back()
    page.wait_for_function(f"[{STACK}, ...{below}].every(p => p._fullLayout.xaxis.range[1] > 195)")


@pytest.fixture(scope="module")
def happened(server_url):
    """The step at which an alert fired on a run that was resumed."""
    address, token_file = server_url
    token = token_file.read_text().strip()
    run = Overflowed("overflowed", "plus", state="running", run_id="run-inf")
    post_run(address, run, token, first=RESUMED_AT)
    with Client(address, token) as client:
        alert = until(
            lambda: next((event for event in client.events(run.run_id).events if event.kind == "alert"), None),
            "the server's evaluation",
        )
    assert "CollageNotFinite" in alert.text
    return alert.step


def test_attempts_and_alerts_are_marked_in_all_curves(opened, happened):
    marked = sorted((RESUMED_AT, happened))
    page = opened("run-inf", "?tab=curves")
    for said in (f"attempt 2 at step {RESUMED_AT}", f"CollageNotFinite at step {happened}"):
        page.locator("#run-marks", has_text=said).wait_for()
    lines = "(p, over) => (p.layout.shapes || []).filter(s => s.yref === over && s.x0 === s.x1).map(s => s.x0)"
    as_marked = f"(found => '' + found.sort((one, other) => one - other) === '{marked[0]},{marked[1]}')"
    page.wait_for_function(f"{as_marked}(({lines})({STACK}, 'paper'))")
    charts = "[...document.querySelectorAll('#run-panel .js-plotly-plot')].filter(p => p.data.length)"
    every = f"{charts}.every(p => {as_marked}(({lines})(p, 'y domain')))"
    page.wait_for_function(f"{charts}.length === {CURVES} && {every}")
    handles = page.locator("#run-stack .annotation-text", has_text="▾")
    places = page.evaluate(f"{STACK}.layout.annotations.filter(note => note.text === '▾').map(note => note.x)")
    for step, said in ((RESUMED_AT, "attempt 2"), (happened, "CollageNotFinite")):
        handles.nth(places.index(step)).hover()
        page.locator("#run-stack .hoverlayer", has_text=f"{said}, step {step}").wait_for()
