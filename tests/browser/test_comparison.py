"""What a reader does: picks runs in the table, compares them, changes the metric, keeps the address, embeds it."""

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.browser.boxes import downloaded_picture, drag
from tests.browser.questions import asks_for
from tests.dashboard.generated import GeneratedRun
from tests.dashboard.posting import post_run

pytestmark = [pytest.mark.slow, pytest.mark.browser]

PICKED = ("plain", "light", "plus", "master-weights", "fp32 reference")


def tick(page, name):
    """Tick the run in the table."""
    page.get_by_role("checkbox", name=f"Pick {name} to compare", exact=True).check()


def drawn(page, chart=0):
    """Wait for a chart's curves. A line that is level has no height, by which a browser calls it invisible."""
    page.wait_for_selector(f"#compare-chart-{chart} .scatterlayer .trace", state="attached")


def open_comparison(watched, names=PICKED):
    """Open the comparison of the named runs by its address."""
    runs = "&".join(f"run=run-{name.replace(' ', '-')}" for name in names)
    watched.page.goto(f"{watched.url}/compare?{runs}")
    drawn(watched.page)
    return watched.page


def compare(page, url, names=PICKED):
    """From the table of runs to the comparison of the named ones."""
    page.goto(f"{url}/runs")
    for name in names:
        tick(page, name)
    page.get_by_role("link", name=f"Compare {len(names)} runs").click()
    drawn(page)


def legend(page, chart):
    """The names of a chart's curves; the page has one legend with all of them."""
    drawn(page, chart)
    shared = page.locator("#compare-legend .run-label").all_text_contents()
    names = page.evaluate(
        """chart => document.querySelector(`#compare-chart-${chart} .js-plotly-plot`).data
            .filter(trace => trace.showlegend !== false).map(trace => trace.name)""",
        chart,
    )
    assert sorted(shared) == sorted(names)
    return names


def test_the_runs_table_leads_to_curves_with_the_right_names_and_numbers_and_back(watched):
    page = watched.page
    compare(page, watched.url)
    assert "/compare?run=run-plain" in page.url
    for chart in range(4):
        assert sorted(legend(page, chart)) == sorted(PICKED)
    curves = page.evaluate(
        """() => Object.fromEntries(document.querySelector('#compare-chart-0 .js-plotly-plot').data
            .filter(trace => trace.showlegend !== false)
            .map(trace => [trace.name, trace.y[trace.y.length - 1]]))"""
    )
    assert curves["plain"] == pytest.approx(0.84, abs=0.02)
    assert curves["plus"] == pytest.approx(1.0, abs=1e-9)
    row = page.locator("#compare-table tr", has_text="Collage light")
    assert row.get_by_text("0.030").count() == 1
    strategies = page.locator("#compare-strategies")
    light = strategies.locator("tr", has_text="Collage light")
    assert "states are stuck" in light.inner_text(), "nothing is healthy by EDQ alone"
    assert "healthy" in strategies.locator("tr", has_text="Collage plus").inner_text()
    parts = (".answer .verdict", "#compare-strategies table", "#compare-chart-0 .main-svg >> nth=0")
    assert downloaded_picture(page, *parts) == "collage-comparison-of-5-runs.png"
    page.go_back()
    page.get_by_role("link", name="Compare 5 runs").wait_for()
    page.get_by_role("checkbox", name="Pick plain to compare", checked=True, exact=True).wait_for()


@pytest.mark.nightly
def test_another_metric_and_other_strategies_stand_in_the_address_and_come_back_from_it(watched):
    page = open_comparison(watched)
    answer = page.locator("#compare-advice .answer .verdict")
    answer.get_by_text("Use Collage plus · bfloat16").wait_for()
    assert len(answer.inner_text().replace("✓", "").split()) <= 15
    said = page.locator("#compare-worth")
    said.get_by_text("than Plain · bfloat16's for 2 bytes more").wait_for()
    assert "pair=" not in page.url, "nobody has chosen yet"
    page.get_by_role("textbox", name="Strategy B").click()
    page.get_by_role("option", name="Collage plus").click()
    chosen = "new URLSearchParams(location.search).getAll('pair').includes('Collage plus · bfloat16')"
    page.wait_for_function(chosen)
    said.get_by_text("Collage plus · bfloat16").wait_for()
    told = said.inner_text()
    page.locator("#compare-metric").click()
    page.get_by_role("option", name="Weight norm").click()
    page.get_by_text("Axes", exact=True).click()
    page.locator("#compare-axis").get_by_text("Tokens").click()
    page.wait_for_function("location.search.includes('metric=param_norm')")
    page.wait_for_function("location.search.includes('axis=tokens')")
    page.wait_for_function(
        "document.querySelector('#compare-chart-3 .ytitle')?.textContent.startsWith('Weight norm')"
    )
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    assert sorted(legend(page, 3)) == sorted(PICKED)
    said.get_by_text(told).wait_for()
    assert page.locator("#compare-metric").input_value() == "Weight norm"
    assert page.locator("#compare-chart-3 .ytitle").text_content() == "Weight norm (weight)"
    assert page.locator("#compare-chart-3 .xtitle").text_content() == "tokens"
    page.get_by_text("Axes", exact=True).click()
    page.locator("#compare-axis").get_by_text("Step").click()
    page.wait_for_function("document.querySelector('#compare-chart-0 .xtitle')?.textContent === 'step'")
    page.go_back()
    page.wait_for_function("document.querySelector('#compare-chart-0 .xtitle')?.textContent === 'tokens'")


@pytest.mark.nightly
def test_a_tab_of_a_live_run_draws_its_figures_and_keeps_them(watched):
    page = watched.page
    page.goto(f"{watched.url}/run/run-live")
    page.get_by_role("tab", name="Oracle").click()
    drawn = "document.querySelectorAll('#run-panel .js-plotly-plot:has(.scatterlayer .trace)').length"
    page.wait_for_function(f"{drawn} === 4")
    for _ in range(2):
        with page.expect_response(asks_for("run-revision.data")):
            pass
    assert page.evaluate(drawn) == 4


def test_a_live_curve_grows_without_a_reload_and_keeps_the_zoom(watched, growing):
    page = watched.page
    page.goto(f"{watched.url}/compare?run=run-growing&run=run-plain")
    drawn(page)
    last = """() => { const traces = document.querySelector('#compare-chart-0 .js-plotly-plot').data;
        return traces.filter(trace => trace.name === 'growing')[0].x.at(-1) }"""
    assert page.evaluate(last) == 100
    drag(page.locator("#compare-chart-0 .nsewdrag"), (0.2, 0.5), (0.6, 0.5))
    shown = "() => document.querySelector('#compare-chart-0 .js-plotly-plot').layout.xaxis.range"
    page.wait_for_function("location.search.includes('from=') && location.search.includes('to=')")
    zoom = [int(part.partition("=")[2]) for part in page.url.split("&")[-2:]]
    plots = "[...document.querySelectorAll(\"[id^='compare-chart-'] .js-plotly-plot\")]"
    each = f"{plots}.map(plot => `${{plot.layout.xaxis.range}}`)"
    page.wait_for_function(f"{each}.every(range => range === '{zoom[0]},{zoom[1]}')")
    growing(200)
    assert zoom[1] > 110
    page.wait_for_function(f"({last})() === {zoom[1] - zoom[1] % 10}")
    assert page.evaluate(shown) == zoom
    assert 10 < zoom[0] < zoom[1] < 190
    page.reload()
    drawn(page)
    page.wait_for_function(f"{each}.every(range => range === '{zoom[0]},{zoom[1]}')")
    page.get_by_text("Axes", exact=True).click()
    page.locator("#compare-scale").get_by_text("Log").click()
    kinds = f"{plots}.map(plot => plot._fullLayout.yaxis.type)"
    page.wait_for_function(f"{kinds}[0] === 'log'")
    page.go_back()
    page.wait_for_function(f"{kinds}[0] === 'linear'")
    page.go_back()
    page.wait_for_function(f"(ends => ends[0] < 11 && ends[1] > 195)(({shown})())")
    page.wait_for_function(f"({last})() === 200")


@pytest.mark.nightly
def test_runs_that_differ_in_a_learning_rate_are_told_apart_until_a_reader_treats_them_as_one(watched, server_url):
    address, token_file = server_url
    for place, rate in enumerate((1e-3, 3e-4, 3e-4)):
        run = GeneratedRun(f"rate {place}", "plus", seed=place, config={"lr": rate, "seed": place})
        post_run(address, run, token_file.read_text().strip())
    page = watched.page
    page.goto(f"{watched.url}/compare?run=run-rate-0&run=run-rate-1&run=run-rate-2")
    drawn(page)
    said = page.locator("#compare-advice")
    assert "These runs differ in lr (0.001 and 0.0003)." in said.text_content()
    assert re.search(r"The loss with lr 0\.00\d+ is lower by .*chance", said.locator(".verdict").inner_text())
    rows = page.locator("#compare-strategies tbody tr .run-label")
    assert rows.all_text_contents() == [
        "Collage plus · bfloat16 · lr 0.001",
        "Collage plus · bfloat16 · lr 0.0003 (2 runs)",
    ]
    page.get_by_role("button", name="Treat these runs as one configuration").click()
    page.get_by_role("button", name="Tell them apart by configuration again").wait_for()
    assert rows.all_text_contents() == ["Collage plus · bfloat16 (3 runs)"]
    page.reload()
    page.get_by_role("button", name="Tell them apart by configuration again").click()
    page.get_by_role("button", name="Treat these runs as one configuration").wait_for()
    assert rows.count() == 2


def visible(page, chart):
    """The lines that a chart shows."""
    return page.evaluate(
        """chart => document.querySelector(`#compare-chart-${chart} .js-plotly-plot`).data
            .filter(trace => trace.showlegend !== false && trace.visible !== false)
            .map(trace => trace.name).sort()""",
        chart,
    )


@pytest.mark.nightly
def test_the_legend_hides_a_line_in_all_charts_and_keeps_to_what_it_says(watched):
    """Hidden lines were once remembered apart from the legend: after other pages it said that they are shown."""
    page = open_comparison(watched, PICKED[:3])
    for chart in range(4):
        drawn(page, chart)
    light = page.locator("#compare-legend .line", has_text="light")
    light.click()
    for chart in range(4):
        assert visible(page, chart) == ["plain", "plus"]
    assert light.get_attribute("aria-pressed") == "false"
    page.get_by_text("Axes", exact=True).click()
    page.locator("#compare-axis").get_by_text("Tokens").click()
    page.wait_for_function("document.querySelector('#compare-chart-0 .xtitle')?.textContent === 'tokens'")
    assert visible(page, 0) == ["plain", "plus"], "what is drawn anew keeps to it"
    page.get_by_role("checkbox", name="Compare plain", exact=True).click()
    page.wait_for_function("document.querySelectorAll('#compare-legend .line').length === 2")
    page.wait_for_function(
        "document.querySelector('#compare-chart-0 .js-plotly-plot').data.every(t => t.name !== 'plain')"
    )
    assert light.get_attribute("aria-pressed") == "false"
    assert visible(page, 0) == ["plus"]
    page.get_by_role("link", name="Incidents", exact=True).click()
    page.wait_for_function("!document.querySelector('#compare-legend')")
    page.go_back()
    drawn(page, 0)
    assert light.get_attribute("aria-pressed") == "true"
    assert "light" in visible(page, 0)
    light.focus()
    page.keyboard.press("Shift+Enter")
    assert visible(page, 0) == ["light"]


@pytest.fixture
def elsewhere():
    """Serve a page of another origin on this machine: its address. A page that no server sent may frame nothing."""
    served = []

    def serve(body):
        class Page(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(f'<!doctype html><link rel="icon" href="data:,">{body}'.encode())

            def log_message(self, *_):
                """Nothing is written of it."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        served.append((server, Thread(target=server.serve_forever)))
        served[-1][1].start()
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server, thread in served:
        server.shutdown()
        thread.join()
        server.server_close()


def embedded(watched, elsewhere, path, part):
    """What a foreign page shows that holds the lines which the page at `path` gives for the part."""
    page = watched.page
    page.goto(watched.url + path)
    lines = page.locator(".pandas pre", has_text="<iframe").text_content().splitlines()
    (line,) = [line for line in lines if f"embed={part}" in line]
    page.goto(elsewhere(line))
    return page.frame_locator("iframe")


@pytest.mark.parametrize(
    ("path", "part", "chart"),
    [
        pytest.param("/run/run-plus", "curves", ".chart-card .js-plotly-plot .main-svg", marks=pytest.mark.nightly),
        ("/run/run-plus", "layers", ".beside .js-plotly-plot .main-svg"),
        pytest.param(
            "/compare?run=run-plus&run=run-light",
            "curves",
            ".charts .js-plotly-plot .main-svg",
            marks=pytest.mark.nightly,
        ),
        pytest.param("/run/run-plus", "page", ".chart-card .js-plotly-plot .main-svg", marks=pytest.mark.nightly),
    ],
)
def test_a_part_stands_alone_and_a_whole_page_without_what_leads_elsewhere(watched, elsewhere, path, part, chart):
    frame = embedded(watched, elsewhere, path, part)
    frame.locator(chart).first.wait_for()
    for other in (".bar", ".crumbs", ".pandas"):
        assert frame.locator(other).locator("visible=true").count() == 0, other
    if part == "page":
        frame.locator("h1").wait_for()
        return
    for other in ("h1", "#run-summary", "#compare-strategies"):
        assert frame.locator(other).locator("visible=true").count() == 0, other
    assert frame.locator(".beside").locator("visible=true").count() == (part == "layers")
