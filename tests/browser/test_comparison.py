"""What a reader does: picks runs in the table, compares them, changes the metric, keeps the address, embeds it."""

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.browser.boxes import downloaded_picture, drag
from tests.browser.conftest import wait_for_evaluation
from tests.dashboard.generated import GeneratedRun

pytestmark = [pytest.mark.slow, pytest.mark.browser]

PICKED = ("plain", "light", "plus", "master-weights", "fp32 reference")


def tick(page, name):
    """Tick the run in the table."""
    page.get_by_role("checkbox", name=f"Pick {name} to compare", exact=True).check()


def address_of(names):
    return "/compare?" + "&".join(f"run=run-{name.replace(' ', '-')}" for name in names)


def drawn(page, chart=0):
    """Wait for a chart's curves. A line that is level has no height, by which a browser calls it invisible."""
    page.wait_for_selector(f"#compare-chart-{chart} .scatterlayer .trace", state="attached")


def curves_of(page, chart):
    """By name the last value of each line that a chart shows."""
    drawn(page, chart)
    return page.evaluate(
        """chart => Object.fromEntries(document.querySelector(`#compare-chart-${chart} .js-plotly-plot`).data
            .filter(trace => trace.showlegend !== false && trace.visible !== false)
            .map(trace => [trace.name, trace.y.at(-1)]))""",
        chart,
    )


def test_the_runs_table_leads_to_curves_with_the_right_names_and_numbers_and_back(goto):
    page = goto("/runs")
    for name in PICKED:
        tick(page, name)
    page.get_by_role("link", name=f"Compare {len(PICKED)} runs").click()
    drawn(page)
    assert "/compare?run=run-plain" in page.url
    shared = page.locator("#compare-legend .run-label").all_text_contents()
    for chart in range(4):
        assert sorted(curves_of(page, chart)) == sorted(shared) == sorted(PICKED)
    curves = curves_of(page, 0)
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
def test_another_metric_and_other_strategies_stand_in_the_address_and_come_back_from_it(goto):
    page = goto(address_of(PICKED))
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
    page.locator("#compare-chart-3 .ytitle", has_text="Weight norm").wait_for()
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    assert sorted(curves_of(page, 3)) == sorted(PICKED)
    said.get_by_text(told).wait_for()
    assert page.locator("#compare-metric").input_value() == "Weight norm"
    assert page.locator("#compare-chart-3 .ytitle").text_content() == "Weight norm (weight)"
    assert page.locator("#compare-chart-3 .xtitle").text_content() == "tokens"
    page.get_by_text("Axes", exact=True).click()
    page.locator("#compare-axis").get_by_text("Step").click()
    page.wait_for_function("document.querySelector('#compare-chart-0 .xtitle')?.textContent === 'step'")
    page.go_back()
    page.wait_for_function("document.querySelector('#compare-chart-0 .xtitle')?.textContent === 'tokens'")


def test_a_live_curve_grows_without_a_reload_and_keeps_the_zoom(goto, growing):
    page = goto("/compare?run=run-growing&run=run-plain", "#compare-chart-0 .scatterlayer .trace")
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
    growing(steps=200)
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
def test_runs_that_differ_in_a_learning_rate_are_told_apart_until_a_reader_treats_them_as_one(goto, send, client):
    for place, rate in enumerate((1e-3, 3e-4, 3e-4)):
        logged = {"validation_loss": 2.5 - rate}
        own: dict = {"config": {"lr": rate, "seed": place}, "logs": lambda _, logged=logged: logged}
        send(GeneratedRun(f"rate {place}", "plus", seed=place, **own))
    wait_for_evaluation(client)
    page = goto("/compare?run=run-rate-0&run=run-rate-1&run=run-rate-2", "#compare-chart-0 .scatterlayer .trace")
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


@pytest.mark.nightly
def test_the_legend_hides_a_line_in_all_charts_and_keeps_to_what_it_says(goto):
    """Hidden lines were once remembered apart from the legend: after other pages it said that they are shown."""
    page = goto(address_of(PICKED[:3]))
    for chart in range(4):
        drawn(page, chart)
    light = page.locator("#compare-legend .line", has_text="light")
    light.click()
    for chart in range(4):
        assert sorted(curves_of(page, chart)) == ["plain", "plus"]
    assert light.get_attribute("aria-pressed") == "false"
    page.get_by_text("Axes", exact=True).click()
    page.locator("#compare-axis").get_by_text("Tokens").click()
    page.wait_for_function("document.querySelector('#compare-chart-0 .xtitle')?.textContent === 'tokens'")
    assert sorted(curves_of(page, 0)) == ["plain", "plus"], "what is drawn anew keeps to it"
    page.get_by_role("checkbox", name="Compare plain", exact=True).click()
    page.wait_for_function("document.querySelectorAll('#compare-legend .line').length === 2")
    page.wait_for_function(
        "document.querySelector('#compare-chart-0 .js-plotly-plot').data.every(t => t.name !== 'plain')"
    )
    assert light.get_attribute("aria-pressed") == "false"
    assert list(curves_of(page, 0)) == ["plus"]
    page.get_by_role("link", name="Incidents", exact=True).click()
    page.wait_for_function("!document.querySelector('#compare-legend')")
    page.go_back()
    drawn(page)
    assert light.get_attribute("aria-pressed") == "true"
    assert "light" in curves_of(page, 0)
    light.focus()
    page.keyboard.press("Shift+Enter")
    assert list(curves_of(page, 0)) == ["light"]


@pytest.fixture
def elsewhere():
    """Serve a page of another origin on this machine: its address. A page that no server sent may frame nothing."""
    bodies: list[str] = []

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(f'<!doctype html><link rel="icon" href="data:,">{bodies[-1]}'.encode())

        def log_message(self, *_):
            """Nothing is written of it."""

    def serve(body):
        bodies.append(body)
        return f"http://127.0.0.1:{server.server_port}"

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield serve
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "part", "place"),
    [
        pytest.param("/run/run-plus", "curves", ".chart-card", marks=pytest.mark.nightly),
        ("/run/run-plus", "layers", ".beside"),
        pytest.param("/compare?run=run-plus&run=run-light", "curves", ".charts", marks=pytest.mark.nightly),
        pytest.param("/run/run-plus", "page", ".chart-card", marks=pytest.mark.nightly),
    ],
)
def test_a_part_stands_alone_and_a_whole_page_without_what_leads_elsewhere(goto, elsewhere, path, part, place):
    """A foreign page holds the line that the page gives for the part."""
    page = goto(path)
    lines = page.locator(".pandas pre", has_text="<iframe").text_content().splitlines()
    (line,) = [line for line in lines if f"embed={part}" in line]
    page.goto(elsewhere(line))
    frame = page.frame_locator("iframe")
    frame.locator(f"{place} .js-plotly-plot .main-svg").first.wait_for()
    for other in (".bar", ".crumbs", ".pandas"):
        assert frame.locator(other).locator("visible=true").count() == 0, other
    if part == "page":
        frame.locator("h1").wait_for()
        return
    for other in ("h1", "#run-summary", "#compare-strategies"):
        assert frame.locator(other).locator("visible=true").count() == 0, other
    assert frame.locator(".beside").locator("visible=true").count() == (part == "layers")
