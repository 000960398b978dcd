"""A real server and a real dashboard, each in a process of its own, and a real Chromium to look at them."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import pytest

from collage_monitor.client import Client
from tests.dashboard.generated import GeneratedRun, demo_runs
from tests.dashboard.posting import post_run
from tests.ports import command, free_port, running
from tests.system import chromium
from tests.waiting import PATIENCE_SECONDS, until

CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--process-per-site",
    # A page lives for seconds: it costs more than it saves to optimize its scripts, and to draw movements.
    "--js-flags=--no-opt,--no-maglev,--single-threaded-gc",
    "--force-prefers-reduced-motion",
    "--disable-lcd-text",
    "--num-raster-threads=1",
)
POLLING_MILLISECONDS = 50
"""How often a page is asked whether it meets a condition: with each frame, as is usual, takes a tenth of a core."""


@dataclass
class Watched:
    """A page with everything that the browser complained about and every host it asked."""

    page: object
    url: str
    complaints: list = field(default_factory=list)
    foreign: list = field(default_factory=list)


@pytest.fixture(scope="module")
def runs():
    """The demo's five runs, and one that still runs."""
    return [*demo_runs(), GeneratedRun("stochastic, live", "stochastic", state="running", run_id="run-live")]


@pytest.fixture(scope="session")
def served():
    """A context manager: a server over a data folder, as (its address, the file of its token)."""
    return _served


@pytest.fixture(scope="module")
def server_url(tmp_path_factory, runs):
    """The address of a server that holds the runs; it asks for the token in its folder."""
    chromium()
    with _served(tmp_path_factory.mktemp("server")) as (address, token_file):
        for run in runs:
            post_run(address, run, token_file.read_text().strip())
        yield address, token_file


@pytest.fixture(scope="package")
def dashboard_port():
    """One for the dashboards of all modules: what the browser has compiled of an address it compiles once."""
    return free_port()


@pytest.fixture(scope="module")
def dashboard_url(server_url, dashboard_port, tmp_path_factory):
    """The address of a dashboard that reads from the server."""
    address, token_file = server_url
    with _dashboard(address, token_file, tmp_path_factory.mktemp("dashboard"), port=dashboard_port) as url:
        yield url


@pytest.fixture(scope="module")
def client(server_url):
    """A client of the server, with the token of its folder."""
    address, token_file = server_url
    with Client(address, token_file.read_text().strip()) as own:
        yield own


@pytest.fixture(scope="module")
def evaluated(client):
    """The same, once the server has looked at all runs."""
    wait_for_evaluation(client)
    return client


def wait_for_evaluation(client):
    """Wait until the server has looked at all runs."""
    until(lambda: all(row.overview for row in client.run_table(limit=500).rows), "the evaluation of all runs")


@pytest.fixture(scope="module")
def send(server_url):
    """Posts a run to the server, or more `steps` of it, or from a `first` one on."""
    address, token_file = server_url
    return partial(post_run, address, token=token_file.read_text().strip())


@pytest.fixture
def growing(send):
    """A run that is half done, and a way to take it further."""
    post = partial(send, GeneratedRun("growing", "plus", state="running", run_id="run-growing"))
    post(steps=100)
    return post


@pytest.fixture
def lonely(tmp_path):
    """A dashboard without a server: its address, and how to start the server that it waits for."""
    chromium()
    port = free_port()
    (tmp_path / "token").write_text("a-token-of-the-test-that-is-long-enough")
    with _dashboard(f"http://127.0.0.1:{port}", tmp_path / "token", tmp_path) as url:
        yield url, _served(tmp_path, port)


@pytest.fixture(scope="package")
def browser():
    """Debian's Chromium, without a window, for as long as only tests of this folder follow each other."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium(), args=list(CHROMIUM_FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def page(open_page, dashboard_url):
    """A fresh page for the dashboard over the runs."""
    return open_page(dashboard_url).page


@pytest.fixture
def goto(page, dashboard_url):
    """Leads that page to a path of the dashboard, and gives it once what the selector `there` names is on it."""

    def lead(path, there=None, *, width=None, height=1000, scheme=None):
        if width is not None:
            page.set_viewport_size({"width": width, "height": height})
        if scheme is not None:
            page.emulate_media(color_scheme=scheme)
        page.goto(dashboard_url + path)
        if there is not None:
            # A line that is level has no height, by which a browser calls it invisible.
            page.locator(there).first.wait_for(state="attached" if there.endswith(".trace") else "visible")
        return page

    return lead


@pytest.fixture(scope="session")
def dashboard():
    """A context manager: a dashboard of a server, as its address."""
    return _dashboard


@pytest.fixture(scope="package")
def contexts(browser):
    """Contexts that no page uses. In each an idle tab keeps the site's process, which has compiled our scripts."""
    return []


@pytest.fixture
def open_page(browser, contexts):
    """Open a page that remembers nothing but, if `cached`, the files that are kept for good.

    At the end nothing may have been complained of and nobody else asked.
    """
    opened = []

    def make(url, *, width=1440, scheme="light", cached=True):
        context = contexts.pop() if contexts and cached else browser.new_context()
        page = context.new_page()
        page.set_default_timeout(1e3 * PATIENCE_SECONDS)
        page.wait_for_function = partial(page.wait_for_function, polling=POLLING_MILLISECONDS)
        page.set_viewport_size({"width": width, "height": 1000})
        page.emulate_media(color_scheme=scheme)
        _forget(context, page, url)
        watched = Watched(page, url)
        opened.append((context, watched, _watch(context, watched)))
        return watched

    yield make
    for context, watched, on_request in opened:
        context.remove_listener("request", on_request)
        idle = context.new_page()
        idle.route("**/*", lambda route: route.fulfill(body=""))
        idle.goto(watched.url)
        for page in context.pages:
            if page is not idle:
                page.close()
        contexts.append(context)
    for _, watched, _ in opened:
        assert watched.complaints == []
        assert watched.foreign == []


def _forget(context, page, url):
    """Empty what the address has stored in the context, but for the cache of what it serves."""
    context.clear_cookies()
    origin = f"{urlsplit(url).scheme}://{urlsplit(url).netloc}"
    kinds = "local_storage,indexeddb,service_workers,cache_storage"
    context.new_cdp_session(page).send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": kinds})


def _watch(context, watched):
    """Note complaints of the page and every request of its context; returns what listens to these."""

    def on_request(request):
        watched.foreign.extend([request.url] * _foreign(request.url))

    page = watched.page
    page.on("console", lambda message: watched.complaints.extend([message.text] * (message.type == "error")))
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    context.on("request", on_request)
    return on_request


@contextmanager
def _served(folder, port=None):
    port = port or free_port()
    serve = command("serve", "--dir", folder, "--port", port)
    with running(serve, f"http://127.0.0.1:{port}/healthz", folder / "server.log"):
        yield f"http://127.0.0.1:{port}", folder / "token"


@contextmanager
def _dashboard(server_url, token_file, folder, *more, port=None):
    port = port or free_port()
    arguments = ("--port", port, "--server-url", server_url, "--token-file", token_file, *more)
    with running(
        command("serve", "dashboard", *arguments), f"http://127.0.0.1:{port}/healthz", folder / "dashboard.log"
    ):
        yield f"http://127.0.0.1:{port}"


def _foreign(url):
    return not url.startswith(("http://127.0.0.1:", "data:", "blob:"))
