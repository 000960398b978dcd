"""Pictures of every page of the dashboard, from the demo's data, for the documentation.

`make screenshots` trains the demo first where its data is not there yet. Each page is taken light and dark, on a
laptop's screen and on a wide one, of a real server and dashboard in Chromium.
"""

import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import click
from playwright.sync_api import sync_playwright

from collage_monitor.client import Client
from tests.ports import command, free_port, running
from tests.waiting import PATIENCE_SECONDS, until

IMAGES = Path("docs/images")
SIZES = {1280: 860, 1920: 1080}
SCHEMES = ("light", "dark")


@click.command()
@click.option("--demo", type=click.Path(path_type=Path), default="demo-output", show_default=True)
@click.option("--only", help="Take this page alone.")
def main(demo, only):
    """Take all pictures into docs/images."""
    if not (demo / "data").exists():
        ports = ["--port", str(free_port()), "--dashboard-port", str(free_port())]
        subprocess.run([*command("demo", "--exit", "--output", demo), *ports], check=True)
    IMAGES.mkdir(parents=True, exist_ok=True)
    with _serving(demo / "data") as (client, url), sync_playwright() as playwright:
        until(lambda: all(row.overview for row in client.run_table().rows), "the evaluation of all runs")
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
        for name, (address, there) in _pages(client.run_table(sort="edq_ratio", descending=False).rows).items():
            if only in {None, name}:
                for width in SIZES:
                    for scheme in SCHEMES:
                        path = IMAGES / f"{name}-{width}-{scheme}.png"
                        path.write_bytes(_take(browser, url + address, there, width, scheme))
                        click.echo(f"{path} {path.stat().st_size // 1000} kB")
        browser.close()


def _pages(rows):
    """Address, and a selector of what is drawn last, by name; `rows` begin with the run that loses the most."""
    worst = f"/run/{rows[0].run_id}"
    layer = rows[0].overview.worst[0].layer if rows[0].overview else ""
    compared = "&".join(f"run={row.run_id}" for row in reversed(rows))
    return {
        "runs": ("/", ".runs-grid .verdict-cell"),
        "run": (worst, ".barlayer .point"),
        "layers": (f"{worst}?rows=block&layer={layer}#run-tab", ".barlayer .point"),
        "curves": (f"{worst}?tab=curves#run-tab", ".scatterlayer .trace"),
        "comparison": (f"/compare?{compared}", "#compare-chart-3 .scatterlayer .trace"),
    }


@contextmanager
def _serving(data):
    """A reader of the server over `data`, and the address of a dashboard."""
    ports = {name: free_port() for name in ("serve", "dashboard")}
    address, url = (f"http://127.0.0.1:{ports[name]}" for name in ("serve", "dashboard"))
    token = data / "token"
    serve = command("serve", "--dir", data, "--port", ports["serve"])
    look = command("dashboard", "--port", ports["dashboard"], "--server-url", address, "--token-file", token)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(serve, f"{address}/healthz", Path(folder) / "server"),
        running(look, f"{url}/healthz", Path(folder) / "dashboard"),
        Client(address, token.read_text().strip()) as client,
    ):
        yield client, url


def _take(browser, address, there, width, scheme):
    size = {"width": width, "height": SIZES[width]}
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.set_default_timeout(1e3 * PATIENCE_SECONDS)
    address, _, place = address.partition("#")
    page.goto(address)
    page.wait_for_selector(there, state="attached")
    page.wait_for_load_state("networkidle")
    page.wait_for_function("document.getElementById('waiting').textContent === ''")
    if place:
        page.evaluate("place => document.getElementById(place).scrollIntoView()", place)
    # Two frames: what was drawn last is on the screen.
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    picture = page.screenshot(animations="disabled")
    page.close()
    return picture


if __name__ == "__main__":
    main()
