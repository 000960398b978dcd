"""The comparison of the demo's five runs as one page of the site, docs/demo.html: `python -m tools.static_demo`.

The runs are kept beside this file as exports without their layers. A server of its own imports them, and the
dashboard's `report` makes the page. `python -m tools.static_demo FOLDER` keeps those of another demo, from the
folder that `collage-monitor demo --output FOLDER` left.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from collage_dashboard.html_report import report
from collage_dashboard.server_reader import Reader

from collage_monitor.client import Client
from collage_monitor.command.up import Services
from collage_monitor.importing import new_run_id, read_lines, send_source

KEPT = Path(__file__).with_name("demo_runs")
PAGE = Path(__file__).parents[1] / "docs" / "demo.html"
PORTS = (17430, 17431)


def made(client: Client) -> str:
    """The page, by a server that gets the runs under new ids."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="collage-demo-page-") as name:
        for kept in sorted(KEPT.glob("*.jsonl.gz")):
            path = Path(name, kept.stem)
            path.write_bytes(gzip.decompress(kept.read_bytes()))
            runs.append(send_source(client, read_lines(path), "demo", new_run_id()).run_id)
    return report(Reader(lambda: client), runs)


def keep(client: Client, run_ids: list[str]) -> Iterator[Path]:
    """Export these runs in this order, compressed without a date; yields the files."""
    for place, run_id in enumerate(run_ids, 1):
        with client.export(run_id, "jsonl", layers=False) as stream:
            content = b"".join(stream.parts)
        path = KEPT / f"{place}-{client.run(run_id).name.replace(' ', '-')}.jsonl.gz"
        path.write_bytes(gzip.compress(content, mtime=0))
        yield path


@contextmanager
def _served(folder: Path) -> Iterator[Client]:
    with (
        Services(folder, *PORTS, alone=True) as services,
        Client(services.server_url, services.token, timeout_seconds=60) as client,
    ):
        yield client


def main(arguments: list[str]) -> None:
    """Make the page, or keep the runs of a demo's folder."""
    if arguments:
        rows = json.loads(Path(arguments[0], "summary.json").read_text())
        with _served(Path(arguments[0], "data")) as client:
            for path in keep(client, [row["run_id"] for row in rows]):
                print(path, path.stat().st_size)
        return
    with tempfile.TemporaryDirectory(prefix="collage-demo-server-") as name, _served(Path(name)) as client:
        PAGE.write_text(made(client))
    print(f"{PAGE}: {PAGE.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
