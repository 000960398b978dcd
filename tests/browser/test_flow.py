"""How data flows to a page: a slow server, one that goes away and comes back, and what a tick may cost."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.browser.questions import asks_for
from tests.dashboard.generated import GeneratedRun
from tests.system import chromium
from tests.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SLOW_SECONDS = 6.0
"""Longer than a page waits between two refreshes."""
BACK_WHILE_TYPING = """async (text) => {
    const typed = () => dash_component_api.getLayout("runs-query").props.value;
    while (typed() !== text) await new Promise(requestAnimationFrame);
    history.back();
}"""


class Between:
    """Stands between dashboard and server: `asked` holds each path; not `fast`, it is slow; `away`, none comes."""

    def __init__(self, server_url):
        self.fast, self.away = threading.Event(), False
        self.asked: list[str] = []
        self.fast.set()
        between = self
        # A kept connection may be closed just as it is asked again; what then fails is asked twice.
        unkept = httpx.Limits(max_keepalive_connections=0)
        self._http = http = httpx.Client(
            base_url=server_url, trust_env=False, timeout=PATIENCE_SECONDS, limits=unkept
        )

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                between.asked.append(self.path)
                between.fast.wait(SLOW_SECONDS)
                if between.away:
                    self.close_connection = True
                    return
                answer = http.get(self.path, headers={"Authorization": self.headers["Authorization"]})
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers["content-type"])
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            def log_message(self, *_):
                """Nothing is written."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._http.close()

    @contextmanager
    def slow(self):
        self.fast.clear()
        yield
        self.fast.set()


@pytest.fixture(scope="module")
def between(server_url):
    chromium()
    standing = Between(server_url[0])
    yield standing
    standing.close()


@pytest.fixture(scope="module")
def dashboard_url(between, server_url, dashboard, dashboard_port, tmp_path_factory):
    with dashboard(between.url, server_url[1], tmp_path_factory.mktemp("between"), port=dashboard_port) as url:
        yield url


TOLD_WITHIN = 5
"""Seconds of the page's own clock after which a reader knows that a server hangs."""


def test_a_server_that_hangs_is_told_within_five_seconds(page, goto, dashboard_url, between):
    """It took 21 s: as long as a question is waited for."""
    page.clock.install()
    goto("/runs", ".ag-row .run-cell")
    with between.slow():
        told = page.locator("#waiting", has_text="The server does not answer")
        page.get_by_label("Search names, projects, tags and ids").fill("plain")
        page.locator("#waiting", has_text="Waiting").wait_for()
        page.clock.pause_at(page.evaluate("Date.now() / 1000") + TOLD_WITHIN)
        told.wait_for()
        page.clock.resume()
        page.goto(f"{dashboard_url}/run/run-plain", wait_until="commit")
        page.clock.pause_at(page.evaluate("Date.now() / 1000") + TOLD_WITHIN)
        told.wait_for()
        page.clock.resume()
    page.wait_for_selector("#run-panel .hm image")


SEEN = """(words) => {
    window.seen = [];
    const look = () => {
        const said = document.body?.innerText || "";
        window.seen.push(words.filter((word) => said.includes(word)));
        requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
}"""
FALSE = ("logged yet", "throughput logged", "No step was measured", "no measured step")
"""What runs that log and measure everything must never be told, while their numbers are on their way."""


OF_A_RUN = ["events", "heatmap", "layers", "run-plain", *["run-table"] * 2, *["series"] * 3]
"""What its page asks; tables: of its row, and of the list beside it."""


@pytest.mark.parametrize(
    ("path", "there", "words", "questions"),
    [
        ("/?q=pl", ".ag-row .run-cell", ["Collage plus", "Worst: plain"], ["run-filters", "run-table"]),
        (
            "/run/run-plain",
            "#run-panel .hm image",
            ["Loses 57.0 % of its updates now", "Validation loss", "6 runs, 2 sick"],
            OF_A_RUN,
        ),
        (
            "/compare?run=run-plain&run=run-plus",
            "#compare-chart-3 .scatterlayer .trace",
            ["Use Collage plus", "losing updates"],
            ["compare", *["run-table"] * 2],
        ),
        ("/fleet", ".fleet img", ["states are stuck", "Collage plus"], None),
        ("/incidents", "#page a", ["No alert has fired"], None),
    ],
)
def test_a_page_asks_once_and_what_the_server_drew_stays_until_it_has_its_own_and_no_frame_lies(
    page, goto, between, evaluated, path, there, words, questions
):
    """Rows went when the application came, and charts said that nothing was logged before their numbers came."""
    between.asked.clear()
    page.add_init_script(f"({SEEN})({json.dumps([*words, *FALSE])})")
    goto(path, there)
    page.locator("#opening").wait_for(state="detached")
    page.wait_for_load_state("networkidle")
    asked = list(between.asked)
    page.wait_for_function("before => window.seen.length > before + 30", arg=page.evaluate("seen.length"))
    seen = [set(frame) for frame in page.evaluate("seen")]
    assert set(words) <= seen[-1]
    shown = seen[next(place for place, frame in enumerate(seen) if frame) :]
    for word in words:
        missing = sum(word not in frame for frame in shown)
        assert not missing, f"{missing} of {len(shown)} frames lack {word!r}"
    assert not set(FALSE) & set().union(*seen)
    if questions is None:
        return
    assert len(set(asked)) == len(asked), "a question was asked twice"
    assert sorted(one.partition("?")[0].rpartition("/")[2] for one in asked) == questions
    tables = [httpx.URL(one).params for one in asked if "run-table" in one]
    assert all("run_id" in one or int(one["limit"]) <= 60 for one in tables), "no page asks for all runs"


@pytest.mark.nightly
def test_a_slow_server_is_waited_for_and_its_answers_appear(page, goto, between):
    with between.slow():
        goto("/runs")
        page.locator("#waiting", has_text="Waiting for the server").wait_for()
        page.get_by_role("link", name="plain", exact=True).wait_for()
        goto("/compare?run=run-plain&run=run-live")
        page.locator("#compare-strategies td", has_text="0.913").first.wait_for()
        for chart in range(4):
            page.wait_for_selector(f"#compare-chart-{chart} .scatterlayer .trace")
        goto("/run/run-live", "#run-panel .hm image")
        page.locator(".answer", has_text="Healthy.").wait_for()


def test_an_error_goes_away_by_itself_when_the_server_is_back(goto, between):
    page = goto("/run/run-live", "#run-panel .hm image")
    between.away = True
    page.get_by_text("The server does not answer").wait_for()
    page.get_by_role("tab", name="Curves").click()
    page.get_by_text("What is shown was read before").wait_for()
    between.away = False
    drawn = "document.querySelectorAll('#run-panel .js-plotly-plot:has(.scatterlayer .trace)').length === 7"
    page.wait_for_function(drawn)
    page.get_by_text("The server does not answer").wait_for(state="detached")


def test_a_tick_that_follows_another_change_at_once_keeps_it(goto):
    page = goto("/runs")
    page.get_by_role("checkbox", name="Pick plus to compare").wait_for()
    page.evaluate(
        """() => {
            dash_clientside.set_props("runs-picked", { data: { "run-plain": "plain" } });
            document.querySelector("[aria-label='Pick plus to compare']").click();
        }"""
    )
    link = page.get_by_role("link", name="Compare 2 runs")
    link.wait_for()
    assert link.get_attribute("href").endswith("?run=run-plain&run=run-plus")


LIVE_PAGES = {
    "/run/run-ticking": ("#run-panel .hm image", "..run-revision.data"),
    "/?q=ticking": (".run-cell a", "..runs-revision.data"),
    "/compare?run=run-ticking&run=run-plain": ("#compare-chart-3 .scatterlayer .trace", "..compare-revision.data"),
}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.nightly] * (not path.startswith("/run/"))) for path in LIVE_PAGES],
)
def test_a_tick_that_finds_nothing_new_carries_next_to_nothing(goto, send, path):
    there, idle = LIVE_PAGES[path]
    run = GeneratedRun("ticking", "plus", state="running", run_id="run-ticking")
    send(run, steps=100)
    page = goto(path, there, width=2400)  # All columns of the table are there.
    sizes: list[int] = []
    while len(sizes) < 2:  # The evaluation in the background may still come in between.
        with page.expect_response(asks_for(idle)) as found:
            pass
        spent = found.value.request.sizes()
        if found.value.status == 204:
            sizes.append(spent["requestBodySize"] + spent["responseBodySize"])
    assert max(sizes) <= 2000
    assert page.locator(there).count() > 0, "what is drawn stays"
    changed = []
    page.on("requestfinished", lambda request: changed.append(request.sizes()["responseBodySize"]))
    newest = replace(run, steps=200 * (2 + [*LIVE_PAGES].index(path)))
    send(newest)
    if path.startswith("/?"):
        page.locator('.ag-cell[col-id="last_step"]', has_text=str(newest.steps)).first.wait_for()
    else:
        drawn = "[...document.querySelectorAll('.js-plotly-plot')].some(p => p.data.some(t => t.x?.at(-1) === %d))"
        page.wait_for_function(drawn % newest.steps)
    assert sum(changed) <= 50_000


@pytest.mark.nightly
def test_a_paused_page_stays_as_it_is_until_it_goes_on(goto, send):
    run = GeneratedRun("paused", "plus", state="running", run_id="run-paused")
    send(run, steps=100)
    page = goto("/run/run-paused", "#run-panel .hm image")
    button = page.get_by_role("button", name="Pause")
    button.press("Enter")
    page.get_by_text("Paused: nothing new is read").wait_for()
    page.wait_for_function("collageFlow.isDue()")
    send(run)
    page.get_by_role("tab", name="Norms").click()  # What its reader chooses is read all the same.
    page.wait_for_selector("#run-panel .scatterlayer .trace", state="attached")
    assert "step 100" in page.locator("#run-head").inner_text()
    button.click()
    page.locator("#run-head", has_text="step 200").wait_for()
    assert button.get_attribute("aria-pressed") == "false"


def test_a_hidden_page_asks_nothing_until_it_is_seen_again(goto):
    page = goto("/run/run-live", "#run-panel .hm image")
    page.evaluate("() => Object.defineProperty(document, 'hidden', { get: () => window.isHidden ?? true })")
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "_dash-update" in request.url else None)
    page.wait_for_function("collageFlow.isDue()")
    asked.clear()
    with page.expect_response(asks_for("run-revision.data")):
        assert asked == []
        page.evaluate("() => { window.isHidden = false; document.dispatchEvent(new Event('visibilitychange')) }")


def test_filter_sort_and_search_stand_in_the_address_and_follow_the_way_back(page, goto):
    page.clock.install()
    goto("/?state=finished&sort=edq_ratio")
    first = "document.querySelector('.ag-row[row-index=\"0\"] .run-cell a')?.textContent"
    page.wait_for_function(f"{first} === 'plain'")
    assert "stochastic, live" not in page.locator(".ag-row .run-cell a").all_text_contents()
    page.locator(".ag-header-cell-text", has_text="Run").first.click()
    page.wait_for_function("location.search.includes('sort=name')")
    page.wait_for_function(f"{first} === 'fp32 reference'")
    box = page.get_by_label("Search names, projects, tags and ids")
    for word in ("plus", "light"):
        box.fill(word)
        page.wait_for_function("word => location.search.includes(`q=${word}`)", arg=word)
        page.wait_for_function(f"word => {first} === word", arg=word)
    for word, name in (("plus", "plus"), ("", "fp32 reference")):
        page.go_back()
        page.wait_for_function(f"name => {first} === name", arg=name)
        page.wait_for_function("word => document.querySelector('#runs-query').value === word", arg=word)
    assert "q=" not in page.url
    box.press_sequentially("li")
    page.evaluate(BACK_WHILE_TYPING, "li")
    page.wait_for_function("location.search.includes('sort=edq_ratio')")
    page.clock.fast_forward(600)
    assert "q=" not in page.url
    page.wait_for_function(f"{first} === 'plain'")
