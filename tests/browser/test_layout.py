"""Pages as people meet them: narrow, wide, dark, by keyboard or screen reader, with names that nobody foresaw."""

import re
from itertools import combinations, product

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.browser.boxes import boxes, drag
from tests.dashboard.generated import GeneratedRun, demo_runs
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.browser]

WIDTHS = (1280, 1920, 390)
LOOKS = pytest.mark.parametrize(("scheme", "width"), list(product(("light", "dark"), WIDTHS)))
"""A page's colour scheme, and the width at which axe looks at it. That it fits is seen at every width."""
IN_ONE_LOOK = pytest.mark.drawn(by=lambda path="", **_: [path])
"""Each page by day in one look, drawn for it; in the others at night."""
HOSTILE = ("a" * 300, '<img src=x onerror="alert(1)">' + "ß" * 40)
LONG_NAMED = "run-hostile-0"
NOT_FINITE = "not finite"
LONG = "gpt2-medium_collage-light_bs256_lr6e-4_cosine-decay_openwebtext_2026-11-03_seed2"


def diverged(step):
    """The loss is NaN from half of the run on."""
    return {"loss": float("nan")} if step > 100 else {}


class Misnamed(GeneratedRun):
    """Its layers have names of markup, and modules of types that are."""

    def __post_init__(self):
        super().__post_init__()
        names = ["hostile.0.weight", *(f"{HOSTILE[1]}.{place}" for place in range(1, len(self.layers)))]
        self.layers = [
            msgspec.structs.replace(layer, name=name, module_type=HOSTILE[1])
            for layer, name in zip(self.layers, names, strict=True)
        ]


@pytest.fixture(scope="module")
def runs():
    """The demo's, one with a long name, one whose loss is NaN, and two with hostile names."""
    hostile = [Misnamed(name, "plain", run_id=f"run-hostile-{place}") for place, name in enumerate(HOSTILE)]
    long = GeneratedRun(LONG, "plain", run_id="run-long")
    return [*demo_runs(), long, GeneratedRun(NOT_FINITE, "plus", run_id="run-nan", logs=diverged), *hostile]


BY_DAY = ("/", "/runs", LONG_NAMED, "run=run-plain", "never-existed")
"""Ends of the pages that are laid out by day; tabs and cards are so at night."""
PAGES = {
    "/": ".rail li",
    "/runs": ".ag-row .run-cell",
    f"/run/{LONG_NAMED}": "#run-panel .hm image",
    "/run/run-plain?tab=curves": "#run-panel .scatterlayer .trace",
    "/run/run-plain?layer=blocks.0.mlp.up.weight&rows=block": "#run-panel .hm image",
    "/run/run-plain?tab=histogram": "#run-panel .barlayer .point",
    "/run/run-plain?tab=table": ".layers-grid .ag-row .layer-cell",
    "/run/run-plain?tab=states": "#run-panel .scatterlayer .trace",
    "/run/run-plain?tab=classes": "#run-panel .scatterlayer .trace",
    "/run/run-plain?tab=norms&scale=log": "#run-panel .scatterlayer .trace",
    "/run/run-plain?tab=oracle": "#run-panel .scatterlayer .trace",
    "/run/run-hostile-1?layer=hostile.0.weight": "#run-layer-card .value",
    "/run/run-plain?tab=about": ".facts",
    "/compare?run=run-hostile-0&run=run-hostile-1&run=run-plain": "#compare-chart-0 .scatterlayer .trace",
    "/run/never-existed": ".problem",
}


@pytest.mark.drawn
@LOOKS
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.nightly] * (not path.endswith(BY_DAY))) for path in PAGES]
)
def test_a_page_fits_and_can_be_used_by_everyone(goto, path, scheme, width):
    page = goto(path, width=WIDTHS[0], scheme=scheme)
    page.wait_for_selector(PAGES[path], state="attached")
    page.wait_for_selector(".number, #compare-strategies td, .facts, .run-cell, .problem")
    assert page.locator("main img").count() == 0, "a name became an element"
    if PAGES[path].endswith((".trace", ".point", "image")):
        assert pale_inks(page) == set()
    assert serious_violations(page, width) == []
    if path == f"/run/{LONG_NAMED}":
        page.set_viewport_size({"width": 390, "height": 844})
        answer = page.locator(".answer .verdict").bounding_box()
        assert answer["y"] + answer["height"] < 844, "a long name leaves the answer on a phone's first screen"


@pytest.mark.nightly
@LOOKS
def test_a_page_without_a_server_or_without_runs_can_be_used_by_everyone(lonely, open_page, scheme, width):
    address, server = lonely
    page = open_page(address, width=WIDTHS[0], scheme=scheme).page
    page.goto(address)
    page.get_by_text("The server does not answer").wait_for()
    assert serious_violations(page, width) == []
    page.get_by_text("collage-monitor up", exact=True).wait_for()  # At this width, too.
    with server:
        page.get_by_text("No runs yet").wait_for()
        page.get_by_text("collage-monitor demo").wait_for()
        assert serious_violations(page, width) == []
        for path in ("/", "/compare", "/incidents"):
            said = "No alert has fired here" if path == "/incidents" else "No runs yet"
            page.goto(address + path)
            page.get_by_text(said).first.wait_for()
            assert serious_violations(page, width) == []
    page.goto(f"{address}/incidents")
    page.get_by_text("The server does not answer").wait_for()


FITS = "shown => innerWidth === shown && document.documentElement.scrollWidth <= shown"


def serious_violations(page, width):
    """What axe finds at this width, last of all. At each, and on a laptop at 200 %, the page is no wider, with one
    heading of its own."""
    for shown in (640, *(other for other in WIDTHS if other != width), width):
        page.set_viewport_size({"width": shown, "height": 900})
        until(lambda shown=shown: page.evaluate(FITS, shown), f"a page that fits {shown} pixels")
        assert page.locator("h1").count() == 1
    return violations_now(page)


def violations_now(page):
    """What axe finds as the page is now."""
    if page.evaluate("typeof axe === 'undefined'"):
        page.evaluate(Axe().axe_script)
    options = {"resultTypes": ["violations"]}
    return [
        (entry["id"], node["html"][:200], node["failureSummary"][:300])
        for entry in page.evaluate("options => axe.run(options)", options)["violations"]
        if entry["impact"] in {"serious", "critical"}
        for node in entry["nodes"][:3]
    ]


COLUMNS = ["strategy", "loss", "lost_update_ratio", "edq_ratio", "last_step", "updated_at"]
COLUMNS += ["bytes_per_parameter", "tokens_per_second"]


def test_names_verdicts_and_costs_are_read_whole_on_a_laptop(goto):
    page = goto("/?q=run-", width=1280)
    page.locator(".runs-grid .verdict-cell", has_text="oss is not finite").wait_for()
    page.locator(".runs-grid").get_by_role("link", name=f"{LONG[:23]}…{LONG[-24:]}", exact=True).wait_for()
    page.locator('.ag-row[row-id="run-long"] .ag-cell[col-id="lost_update_ratio"]', has_text="%").wait_for()
    cut = "(cells) => cells.filter((c) => c.scrollHeight > c.clientHeight + 1).map((c) => c.textContent)"
    assert page.locator(".runs-grid .verdict-cell").evaluate_all(cut) == []
    names = page.locator(".runs-grid .run-cell a")
    assert names.count() > 5
    assert set(names.evaluate_all(cut.replace("textContent", "title"))) <= set(HOSTILE), "cut at its end"
    titles = names.evaluate_all("(names) => names.map((name) => name.title)")
    assert {LONG, *HOSTILE} <= set(titles), "the whole name on hover"
    state, button = page.locator(".filters #runs-state"), page.get_by_text("Filters", exact=True)
    assert not state.is_visible(), "filters stand behind one button: eight empty boxes took 76 pixels"
    edge = page.locator(".runs-grid .ag-center-cols-viewport")
    for column in COLUMNS:
        cell = page.locator(f'.ag-row[row-id="run-long"] .ag-cell[col-id="{column}"]')
        box, shown = boxes(cell, edge)
        assert box["right"] <= shown["right"], column
        assert cell.evaluate("(cell) => cell.scrollWidth <= cell.clientWidth"), column
        assert cell.text_content().strip() not in {"", "–"}, column
    button.click()
    state.click()
    page.get_by_role("option", name="finished").click()
    page.wait_for_function("location.search.includes('state=finished')")
    page.reload()
    state.wait_for()


def pale_inks(page):
    """Colours of text in charts that axe would complain about if it looked there, from 4.5 on it does not."""
    ground, *inks = page.evaluate(
        """() => [getComputedStyle(document.body).backgroundColor,
            ...[...document.querySelectorAll(
                ".chart svg text, .xtick text, .ytick text, .xtitle, .ytitle, .gtitle, .cbtitle text")]
                .map(text => [text.textContent, getComputedStyle(text).fill])]"""
    )
    assert len(inks) > 10
    return {(text, ink) for text, ink in inks if contrast(ink, ground) < 4.5}


def contrast(one, other):
    """WCAG 2's contrast of two colours as a browser says them, 'rgb(92, 102, 112)'."""
    lights = []
    for colour in (one, other):
        shares = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize(
    "path",
    [
        "/run/run-plain",
        pytest.param("/runs", marks=pytest.mark.nightly),
        pytest.param("/compare?run=run-plain&run=run-plus", marks=pytest.mark.nightly),
    ],
)
def test_nothing_on_a_page_jumps_while_it_loads(open_page, dashboard_url, path):
    page = open_page(dashboard_url, width=1280, cached=False).page
    page.add_init_script(
        """window.shift = 0;
        const count = entry => { if (!entry.hadRecentInput) window.shift += entry.value };
        const watch = new PerformanceObserver(list => list.getEntries().forEach(count));
        watch.observe({ type: 'layout-shift', buffered: true });"""
    )
    page.goto(dashboard_url + path)
    page.wait_for_selector(PAGES.get(path, ".scatterlayer .trace"))
    page.wait_for_selector(".number, #compare-strategies td, .run-cell")
    assert page.evaluate("window.shift") <= 0.1


def test_a_page_says_its_answer_before_any_script_has_run(browser, dashboard_url):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_default_timeout(1e3 * PATIENCE_SECONDS)
    page.goto(f"{dashboard_url}/runs")
    page.locator(".runs-words .verdict-cell", has_text="oss is not finite").wait_for()
    page.get_by_role("link", name=NOT_FINITE, exact=True).click()
    page.locator(".answer", has_text="Loss is not finite, since step 110").wait_for()
    page.locator(".numbers-line", has_text="Validation loss").wait_for()
    page.goto(f"{dashboard_url}/compare?run=run-plain&run=run-plus")
    page.locator("#compare-strategies, .comparison-table", has_text="losing updates").first.wait_for()
    page.locator(".rail", has_text="sick").wait_for()
    context.close()


@pytest.mark.nightly
def test_a_phone_names_a_loss_that_is_nan_with_its_step_and_shows_notes_whole_and_labels_apart(goto):
    for chart, tab in (("#run-stack", "layers"), ("#run-panel", "curves")):
        page = goto(f"/run/run-nan?tab={tab}", width=390)
        page.locator(".answer", has_text="Loss is not finite, since step 110").wait_for()
        note = page.locator(chart).get_by_text("10 points are not finite, the first at step 110")
        note.wait_for()
        edge, card = boxes(note, note.locator("xpath=ancestor::*[contains(@class, 'chart-card')]"))
        assert card["x"] < edge["x"] < edge["right"] < card["right"]
    goto("/compare?" + "&".join(f"run={run.run_id}" for run in demo_runs()))
    labels = page.locator("#compare-cost .textpoint text")
    labels.last.wait_for(state="attached")
    found = boxes(*labels.all())
    assert len(found) >= 4
    assert [(one, other) for one, other in combinations(found, 2) if overlap(one, other)] == []
    page.set_viewport_size({"width": 1280, "height": 900})
    parts = "#compare-strategies :is(.scrollable, .run-label > :last-child)"
    cut = "parts => parts.filter((part) => part.scrollWidth > part.clientWidth + 1).map((part) => part.textContent)"
    until(lambda: page.locator(parts).evaluate_all(cut) == [], "five strategies, read whole beside the runs")
    loss = page.locator("#compare-strategies").get_by_role("cell", name="2.470", exact=True)
    assert loss.count() == 1, "a loss has four digits, as on every page"


def overlap(one, other, touching=3):
    """Whether two boxes share more than their edges: letters do not fill theirs."""
    return all(
        one[start] < other[start] + other[size] - touching and other[start] < one[start] + one[size] - touching
        for start, size in (("x", "width"), ("y", "height"))
    )


def test_a_zoom_reads_finer_data_and_stands_in_the_address(goto):
    page = goto("/run/run-plain", "#run-panel .hm image")
    drag(page.locator("#run-panel .nsewdrag").first, (0.3, 0.3), (0.7, 0.7))
    page.wait_for_function("location.search.includes('from=') && location.search.includes('to=')")
    steps = "document.querySelector('#run-panel .js-plotly-plot').data[0].x"
    page.wait_for_function(f"{steps}.length < 20")
    assert page.evaluate(f"Math.min(...{steps})") > 30
    rows = "document.querySelector('#run-panel .js-plotly-plot')._fullLayout.yaxis.range"
    assert page.evaluate(f"{rows}[0] - {rows}[1]") < 6
    page.go_back()
    page.wait_for_function(f"{steps}.length === 20")
    page.wait_for_function(f"{rows}[0] - {rows}[1] === 12")


@pytest.mark.nightly
def test_nine_runs_share_one_legend_and_leave_room_for_their_curves(goto, runs):
    address = "/compare?" + "&".join(f"run={run.run_id}" for run in runs)
    page = goto(address, "#compare-chart-3 .scatterlayer .trace", width=1280)
    labels = page.locator("#compare-legend .run-label")
    labels.nth(8).wait_for()
    assert labels.count() == len(runs) == 9
    assert page.locator(".legend .traces").count() == 0
    heights = page.evaluate(
        """() => [...document.querySelectorAll("[id^='compare-chart-'] .js-plotly-plot")]
            .map(plot => plot._fullLayout._size.h)"""
    )
    assert len(heights) == 4
    assert min(heights) > 200
    page.set_viewport_size({"width": 1920, "height": 1080})
    [shown] = boxes(page.locator("main, .page").first)
    assert shown["right"] > 0.95 * 1920, "beside the list of runs, to the end of a wide screen"


SEVERAL = "/compare?run=run-hostile-1&run=run-plus&run=run-fp32-reference"


@IN_ONE_LOOK
@LOOKS
@pytest.mark.parametrize(
    ("path", "charts"), [("/run/run-hostile-1", 9), pytest.param(SEVERAL, 5, marks=pytest.mark.nightly)]
)
def test_a_downloaded_report_opens_by_itself_for_everyone(goto, path, charts, scheme, width, tmp_path):
    page = goto(path, scheme=scheme)
    with page.expect_download() as found:
        page.get_by_role("link", name="Download report").click()
    assert found.value.suggested_filename.startswith("collage-")
    file = tmp_path / "report.html"
    found.value.save_as(file)
    page.goto("about:blank")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.set_content(file.read_text(encoding="utf-8"))
    assert page.locator(".chart svg").count() == charts
    assert page.locator("main img").count() == 0
    assert pale_inks(page) == set()
    assert serious_violations(page, width) == []
    assert not [url for url in asked if not url.startswith(("data:", "blob:", "about:"))]
