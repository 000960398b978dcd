"""A page of somebody else's shows a run or a comparison, whole or in part, by the lines that the page gives."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.browser]


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
