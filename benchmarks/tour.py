"""How long a new user needs for the three questions of docs/tour.md, over the data that `make demo` has left.

    python -m benchmarks.tour

It opens the dashboard in Chromium, clicks what the tour says, and prints the seconds until each answer can be read.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click
from playwright.sync_api import sync_playwright

from tests.browser.screenshots import serving
from tests.browser.test_tour import QUESTIONS
from tests.system import find_chromium
from tests.waiting import PATIENCE_SECONDS, until


@click.command()
@click.option("--demo", type=click.Path(path_type=Path, exists=True), default="demo-output", show_default=True)
def main(demo: Path) -> None:
    """Walk the tour once, and print each answer with its seconds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(demo / "data", Path(folder)) as (client, _, url, _),
        sync_playwright() as playwright,
    ):
        until(lambda: all(row.overview for row in client.run_table().rows), "the evaluation of all runs")  # type: ignore[no-untyped-call]
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.set_default_timeout(1e3 * PATIENCE_SECONDS)
        for question in QUESTIONS:
            began = time.monotonic()
            answer = " ".join(question(page, url).split())  # type: ignore[no-untyped-call]
            click.echo(f"{time.monotonic() - began:.1f} s  {answer}")
        browser.close()


if __name__ == "__main__":
    main()
