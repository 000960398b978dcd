"""Pictures of every page of the dashboard, from the demo's data, for the documentation.

`make screenshots` trains the demo first where its data is not there yet. Each page is taken light and dark, on a
laptop's screen and on a wide one, of a real server and dashboard in Chromium.
"""

import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import click
from collage_studies.catalogue import study_named
from collage_studies.studies.diary import picture_of
from collage_studies.trial_records import RecordFile
from playwright.sync_api import sync_playwright

from collage_monitor.client import Client
from tests.ports import command, free_port, running
from tests.system import find_chromium
from tests.waiting import PATIENCE_SECONDS, until

IMAGES = Path("docs/images")
STUDIES = Path("docs/studies")
SIZES = {1280: 860, 1920: 1080}
SCHEMES = ("light", "dark")


@click.command()
@click.option("--demo", type=click.Path(path_type=Path), default="demo-output", show_default=True)
@click.option("--only", help="Take this page alone.")
@click.option("--diary", type=click.Path(path_type=Path), help="The server's folder of that study: its incidents.")
def main(demo, only, diary):
    """Take all pictures into docs/images, or with --diary those of that study into docs/studies/images."""
    if diary is not None:
        _take_incidents(diary)
        return
    if not (demo / "data").exists():
        ports = ["--port", str(free_port()), "--dashboard-port", str(free_port())]
        subprocess.run([*command("demo", "--exit", "--output", demo), *ports], check=True)
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        with serving(demo / "data", folder) as (client, look, url, guarded):
            until(lambda: all(row.overview for row in client.run_table().rows), "the evaluation of all runs")
            pages = _pages(client, url)
            pages["sign-in"] = (guarded, "input[type=password]")
            pages["report"] = (_report(pages["run"][0].rpartition("/")[2], look, folder), ".chart svg rect")
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
            for name, (address, there) in pages.items():
                if only in {None, name}:
                    for width in SIZES:
                        for scheme in SCHEMES:
                            path = IMAGES / f"{name}-{width}-{scheme}.png"
                            path.write_bytes(_take(browser, address, there, width, scheme))
                            click.echo(f"{path} {path.stat().st_size // 1000} kB")
            browser.close()


def _take_incidents(data):
    """The page of each incident that the study's records name, light, on a laptop's screen."""
    records = RecordFile(STUDIES / "data" / "diary.jsonl").of(study_named("diary").trials(False))
    with (
        tempfile.TemporaryDirectory() as name,
        sync_playwright() as playwright,
        serving(data, Path(name)) as (_, _, url, _),
    ):
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        for record in records:
            if "incident" in record.words:
                address = f"{url}/incident/{record.words['incident']}"
                there = "#incident-figure .scatterlayer .trace"
                path = STUDIES / "images" / picture_of(record.trial.settings["story"])
                path.write_bytes(_take(browser, address, there, min(SIZES), "light"))
                click.echo(f"{path} {path.stat().st_size // 1000} kB")
        browser.close()


def _pages(client, url):
    """Address, and a selector of what is drawn last, by name."""
    rows = client.run_table(sort="edq_ratio", descending=False).rows
    incidents = client.incidents().events
    if not incidents:
        raise click.ClickException(
            "no alert has fired in this data: delete its folder, so that the demo trains anew"
        )
    worst = f"{url}/run/{rows[0].run_id}"
    layer = rows[0].overview.worst[0].layer
    compared = "&".join(f"run={row.run_id}" for row in reversed(rows) if row.group == rows[0].group)
    return {
        "first": (url, "#compare-chart-1 .scatterlayer .trace"),
        "runs": (f"{url}/runs", ".runs-grid .verdict-cell"),
        "run": (worst, "body:has(#run-panel .hm image) #run-stack .scatterlayer .trace"),
        "layers": (f"{worst}?rows=block&layer={layer}#run-tab", "#run-layer-card .value"),
        "curves": (f"{worst}?tab=curves#run-tab", "#run-panel .scatterlayer .trace"),
        "comparison": (f"{url}/compare?{compared}", "#compare-chart-3 .scatterlayer .trace"),
        "incidents": (f"{url}/incidents", ".incident-table"),
        "incident": (f"{url}/incident/{incidents[0].incident_id}", "#incident-figure .scatterlayer .trace"),
    }


def _report(run_id, look, folder):
    """The address of the report of a run, as its command writes it."""
    path = folder / "report.html"
    subprocess.run(command("report", run_id, "--output", path, *look), check=True)
    return path.as_uri()


@contextmanager
def serving(data, folder):
    """A reader of the server over `data`, the options that lead to it, and two dashboards: open, and guarded."""
    ports = [free_port() for _ in range(3)]
    address, url, guarded = (f"http://127.0.0.1:{port}" for port in ports)
    token = (data / "token").read_text().strip()
    serve = command("serve", "--dir", data, "--port", ports[0])
    look = ("--server-url", address, "--token", token)
    with (
        running(serve, f"{address}/healthz", folder / "server"),
        running(command("serve", "dashboard", "--port", ports[1], *look), f"{url}/healthz", folder / "open"),
        running(
            command("serve", "dashboard", "--port", ports[2], "--sign-in", *look),
            f"{guarded}/healthz",
            folder / "asks",
        ),
        Client(address, token) as client,
    ):
        yield client, look, url, guarded


def _take(browser, address, there, width, scheme):
    size = {"width": width, "height": SIZES[width]}
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.set_default_timeout(1e3 * PATIENCE_SECONDS)
    address, _, place = address.partition("#")
    page.goto(address)
    page.wait_for_selector(there, state="attached")
    page.wait_for_load_state("networkidle")
    page.wait_for_function("!document.getElementById('waiting')?.textContent")
    if place:
        page.evaluate("place => document.getElementById(place).scrollIntoView()", place)
    # Two frames: what was drawn last is on the screen.
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    picture = page.screenshot(animations="disabled")
    page.close()
    return picture


if __name__ == "__main__":
    main()
