"""What the dashboard costs and how soon it shows something, in Chromium, on a store of many runs.

The store holds 60 runs of 2,000 steps × 100 layers, 5,000 small ones, and one each of 2,000 and 10,000 layers.
Server and dashboard are processes of their own. The gate's figures: for the server, its CPU for a page of the table
of runs. For people, seconds until a page says something useful (also over those of a bare Dash page, visited in
turn), until the heatmap of a run of many layers is drawn (over those of a Dash page of that heatmap alone), and
until a zoomed one has finer data. For an open tab, the bytes that a tick carries, and its share of a core. Bytes
and CPU do not depend on other work of the machine; seconds do.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from operator import truediv
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, Page, Request, Response, sync_playwright

from benchmarks._harness import Figure, Options, main
from benchmarks._population import NOW, UnsyncedStore, evaluate, populate
from benchmarks._serving import cpu_seconds
from collage_monitor import wire
from collage_monitor.client import Client
from tests.browser.questions import asks_for
from tests.dashboard.generated import GeneratedRun
from tests.dashboard.posting import post_run
from tests.ports import command, free_port, running
from tests.system import find_chromium

LARGE, STEPS, LAYERS = 60, 2_000, 100
SMALL: Final = 5_000
ROUNDS, GATE_ROUNDS = 7, 3
TAB_SECONDS: Final = 30.0
TABS: Final = 3
_LIVE: Final = "large-0"
_WIDE: Final = {"wide": (2_000, 2.0), "widest": (10_000, 4.0)}
"""Runs of many layers, by name: how many, and the seconds in which they are to be seen."""
_WIDE_STEPS: Final = 50
_BARE: Final = """import sys, dash
app = dash.Dash(serve_locally=True)
app.layout = dash.html.Div("A page", id="bare")
app.run(port=int(sys.argv[1]))"""
"""The least that a Dash page can be."""
_BARE_HEATMAP: Final = """import sys, dash, numpy, plotly.graph_objects as go
layers, steps = int(sys.argv[2]), int(sys.argv[3])
cells = numpy.random.default_rng(0).random((layers, steps)).round(6).tolist()
drawn = go.Heatmap(x=list(range(steps)), y=[f"layer.{i}" for i in range(layers)], z=cells)
app = dash.Dash(serve_locally=True)
app.layout = dash.dcc.Graph(figure=go.Figure(drawn, {"height": 900}))
app.run(port=int(sys.argv[1]))"""
"""The least that shows so many layers: a Dash page of a heatmap and nothing else."""
_PAGES: Final = {
    "runs": ("/runs", ".run-cell"),
    "run": ("/run/large-1", ".number"),
    "comparison of 10 runs": (
        "/compare?" + "&".join(f"run=large-{i}" for i in range(10)),
        "#compare-strategies td",
    ),
}


def measure(options: Options) -> Generator[Figure, None, list[str]]:
    """Every figure, with the limit that it is held to."""
    rounds = options.rounds or (GATE_ROUNDS if options.gate else ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        _populate(Path(folder), options.seed)
        filled = time.monotonic() - began
        with _running(Path(folder)) as (server, dashboard, address, url), sync_playwright() as playwright:
            token = (Path(folder) / "token").read_text().strip()
            client = Client(address, token)
            yield from _table_pages(client, server, rounds)
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
            yield from _paints(browser, url, rounds)
            yield from wide_paints(browser, url, rounds, Path(folder))
            yield beside_bare(browser, url, rounds, Path(folder))
            yield grown_tick(browser, url, address, token, rounds)
            yield from _live_tab(browser, url, client, (server, dashboard))
            browser.close()
            client.close()
    return [
        f"{LARGE} runs of {STEPS} steps × {LAYERS} layers and {SMALL} small ones, filled in {filled:.0f} s",
        f"{rounds} rounds; one live tab was open {TABS} times for {TAB_SECONDS:.0f} s",
    ]


def _populate(folder: Path, seed: int) -> None:
    store = UnsyncedStore(folder / "collage.sqlite", stale_after_seconds=1e9)
    store.open()
    families = (("large", LARGE, STEPS, LAYERS), ("small", SMALL, 8, 0))
    populate(
        store,
        [(name, 1, _WIDE_STEPS, layers) for name, (layers, _) in _WIDE.items()],
        seed,
        lambda store, _: evaluate(store),
    )
    # Evaluated once, and copied with the rest.
    populate(store, families, seed, lambda store, _: evaluate(store))
    for name, runs, *_ in families:
        for place in range(1, runs, 2):
            store.runs.update(f"{name}-{place}", wire.RunUpdate(state="finished"), NOW)
    store.close()


@contextmanager
def _running(folder: Path) -> Iterator[tuple[int, int, str, str]]:
    """(process of the server, of the dashboard, address of the server, of the dashboard)."""
    ports = free_port(), free_port()  # type: ignore[no-untyped-call]
    address, url = (f"http://127.0.0.1:{port}" for port in ports)
    serve = command("serve", "--dir", folder, "--port", ports[0])  # type: ignore[no-untyped-call]
    look = ("--port", ports[1], "--server-url", address, "--token-file", folder / "token")
    with (
        running(serve, f"{address}/healthz", folder / "server.log") as server,
        running(command("serve", "dashboard", *look), f"{url}/healthz", folder / "dashboard.log") as dashboard,  # type: ignore[no-untyped-call]
    ):
        yield server.pid, dashboard.pid, address, url


def _table_pages(client: Client, server: int, rounds: int) -> list[Figure]:
    """CPU of the server for a page of runs, of groups, of an opened group, once all runs are evaluated."""
    while any(row.overview is None for row in client.run_table(sort="health", descending=False, limit=1).rows):
        time.sleep(0.5)
    while _busy(server):
        pass
    single: list[float] = []
    grouped: list[float] = []
    opened: list[float] = []
    groups = [entry.group for entry in client.run_groups("strategy").rows if entry.group is not None]
    largest = max(groups, key=lambda group: group.count).key
    for _ in range(rounds):
        before, asked = cpu_seconds(server), 0
        for sort in ("updated_at", "edq_ratio", "name", "loss"):
            for offset in (0, 50, 2_500, SMALL - 50):
                client.run_table(sort=sort, offset=offset, limit=50)
                asked += 1
        single.append(1e3 * (cpu_seconds(server) - before) / asked)
        for spent, keys in ((grouped, ()), (opened, (largest,))):
            before = cpu_seconds(server)
            for _ in range(asked):
                client.run_groups("strategy", sort="loss", opened=keys)
            spent.append(1e3 * (cpu_seconds(server) - before) / asked)
    return [
        Figure("a page of 50 of 5,060 runs, CPU of the server", "ms", tuple(single), limit=50.0),
        Figure("5,060 runs grouped by strategy, CPU of the server", "ms", tuple(grouped), limit=50.0),
        Figure("their group opened, its first 50 runs, CPU of the server", "ms", tuple(opened), limit=50.0),
    ]


def _busy(server: int) -> bool:
    """Whether the server still evaluates or seals in the background, over more than the interval of either."""
    before = cpu_seconds(server)
    time.sleep(12.0)
    return cpu_seconds(server) - before > 1.2


def _paints(browser: Browser, url: str, rounds: int) -> list[Figure]:
    figures = []
    _visit(browser, url, "/runs", ".run-cell")  # The dashboard compresses its files once.
    for name, (path, useful) in _PAGES.items():
        seconds = tuple(_visit(browser, url, path, useful) for _ in range(rounds))
        figures.append(Figure(f"first useful paint, {name}", "s", seconds, limit=2.0))
    zooms = tuple(_zoom(browser, url) for _ in range(rounds))
    return [*figures, Figure("heatmap zoomed, finer data shown", "s", zooms, limit=1.0)]


def wide_paints(browser: Browser, url: str, rounds: int, folder: Path) -> Iterator[Figure]:
    """Until the heatmap shows the layers of the runs that have many, beside a Dash page of such a heatmap alone.

    Seconds are those of the machine: most pass while its browser starts React, Dash and Plotly.
    """
    for name, (layers, limit) in _WIDE.items():
        port = free_port()  # type: ignore[no-untyped-call]
        bare, least, ours = f"http://127.0.0.1:{port}", [], []
        script = [sys.executable, "-c", _BARE_HEATMAP, str(port), str(layers), str(_WIDE_STEPS)]
        with running(script, bare, folder / f"{name}.log"):
            for _ in range(rounds):
                least.append(_visit(browser, bare, "/", ".hm image"))
                ours.append(_visit(browser, url, f"/run/{name}", "#run-panel .hm image"))
        ratios = tuple(map(truediv, ours, least))
        yield Figure(f"{layers:,} layers shown / a Dash page of their heatmap alone", "ratio", ratios, limit=2.0)
        yield Figure(f"{layers:,} layers shown", "s", tuple(ours), limit=limit)
        yield Figure(f"a Dash page of the heatmap of {layers:,} layers alone", "s", tuple(least))


def beside_bare(browser: Browser, url: str, rounds: int, folder: Path) -> Figure:
    """The table of runs on the screen, over a Dash page of one line: visited in turn, each in a fresh context."""
    port = free_port()  # type: ignore[no-untyped-call]
    bare, ratios = f"http://127.0.0.1:{port}", []
    with running([sys.executable, "-c", _BARE, str(port)], bare, folder / "bare.log"):
        for _ in range(rounds):
            least = _visit(browser, bare, "/", "#bare")
            ratios.append(_visit(browser, url, "/runs", ".run-cell") / least)
    return Figure("first screen over a bare Dash page's", "ratio", tuple(ratios), limit=3.0)


def grown_tick(browser: Browser, url: str, address: str, token: str, rounds: int) -> Figure:
    """The bytes, both ways, of the largest of the ticks by which a run's open page takes in a new measured step:
    its charts, and its overview, often a tick later."""
    every, begun = 2, 300
    live = GeneratedRun("growing", "plus", blocks=20, steps=400, every=every, state="running", run_id="growing")
    post_run(address, live, token, begun)  # type: ignore[no-untyped-call]
    page = _live_page(browser, url, live.run_id)
    found: list[float] = []
    last = "document.querySelector('#run-panel .js-plotly-plot').data[0].x.at(-1)"
    _until_idle(page)
    for place in range(1, rounds + 1):
        ticks: list[int] = []

        def carry(request: Request, ticks: list[int] = ticks) -> None:
            ticks += [0] if _is_tick(request) or not ticks else []
            ticks[-1] += _bytes_of(request)

        page.on("requestfinished", carry)
        post_run(address, live, token, begun + place * every)  # type: ignore[no-untyped-call]
        page.wait_for_function(f"{last} === {begun + place * every}")
        _until_idle(page)
        page.remove_listener("requestfinished", carry)
        found.append(float(max(ticks)))
    page.close()
    return Figure("the tick of a new step, 102 layers, bodies both ways", "bytes", tuple(found), limit=8_000.0)


def _visit(browser: Browser, url: str, path: str, useful: str) -> float:
    page = browser.new_page()
    began = time.monotonic()
    page.goto(url + path, wait_until="commit")
    page.wait_for_selector(useful)
    taken = time.monotonic() - began
    page.close()
    return taken


def _zoom(browser: Browser, url: str) -> float:
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto(f"{url}/run/large-1")
    page.wait_for_selector("#run-panel .hm image")
    steps = "document.querySelector('#run-panel .js-plotly-plot').data[0].x"
    coarse = page.evaluate(f"{steps}[1] - {steps}[0]")
    page.locator("#run-panel .hm image").first.scroll_into_view_if_needed()
    box: Any = page.locator("#run-panel .hm image").first.bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 200)
    began = time.monotonic()
    page.mouse.up()
    page.wait_for_function(f"{steps}[1] - {steps}[0] < {coarse}")
    taken = time.monotonic() - began
    page.close()
    return taken


def _live_tab(browser: Browser, url: str, client: Client, processes: tuple[int, int]) -> list[Figure]:
    """The bytes of a tick and the cost of an open tab: a live run without changes, then one that changes.

    The server evaluates thousands of live runs meanwhile: the same time without a tab, before each with one, tells
    what the tab adds.
    """
    client.update_run(_LIVE, wire.RunUpdate(state="running", notes="live"))  # Its reports are old: it is stale.
    idle: list[float] = []
    without, added = [], []
    for _ in range(TABS):
        with _spending(processes) as alone:
            time.sleep(TAB_SECONDS)
        page = _live_page(browser, url)
        with _spending(processes) as watched:
            began = time.monotonic()
            while time.monotonic() - began < TAB_SECONDS:
                idle.append(float(_next_tick(page)))
        page.close()
        without.append(alone[0])
        added.append(watched[0] - alone[0])
    page = _live_page(browser, url)
    carried: list[int] = []

    def carry(request: Any) -> None:
        carried.append(_bytes_of(request))

    page.on("requestfinished", carry)
    client.update_run(_LIVE, wire.RunUpdate(notes="changed"))
    _next_tick(page)
    _next_tick(page)
    page.remove_listener("requestfinished", carry)  # A page that closes no longer knows the sizes of its requests.
    page.close()
    return [
        Figure("an idle tick of a live run, bodies both ways", "bytes", tuple(idle), limit=2_000.0),
        Figure("a tick that changes the run's page", "bytes", (float(sum(carried)),), limit=50_000.0),
        Figure("server and dashboard without a tab, CPU over a core's", "share", tuple(without)),
        Figure("what one open live tab adds, CPU over a core's", "share", tuple(added), limit=0.02),
    ]


def _live_page(browser: Browser, url: str, run_id: str = _LIVE) -> Page:
    """The live run's page, once it has settled."""
    page = browser.new_page()
    page.goto(f"{url}/run/{run_id}")
    page.wait_for_selector("#run-panel .hm image")
    for _ in range(2):
        _next_tick(page)
    return page


@contextmanager
def _spending(processes: tuple[int, int]) -> Iterator[list[float]]:
    """At the end holds the share of a core that the processes took meanwhile."""
    found: list[float] = []
    began, spent = time.monotonic(), sum(map(cpu_seconds, processes))
    yield found
    found.append((sum(map(cpu_seconds, processes)) - spent) / (time.monotonic() - began))


def _next_tick(page: Page) -> int:
    with page.expect_request_finished(_is_tick) as found:
        pass
    return _bytes_of(found.value)


def _is_tick(found: Request | Response) -> bool:
    return bool(asks_for("run-revision.data")(found))  # type: ignore[no-untyped-call]


def _until_idle(page: Page) -> None:
    """Wait until two ticks in a row found nothing new: the overview comes a moment after the step."""
    idle = 0
    while idle < 2:
        with page.expect_response(_is_tick) as found:
            pass
        idle = idle + 1 if found.value.status == 204 else 0


def _bytes_of(request: Any) -> int:
    sizes = request.sizes()
    return int(sizes["requestBodySize"] + sizes["responseBodySize"])


if __name__ == "__main__":
    sys.exit(main("dashboard", __doc__ or "", measure))
