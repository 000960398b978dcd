"""`collage-monitor report`: one HTML file about a run or several, from a server or from what runs left on disk."""

from __future__ import annotations

import json
from pathlib import Path

import click

from collage_dashboard.server_reader import Reader
from collage_dashboard.view import MAXIMUM_RUNS
from collage_monitor.client import Client
from collage_monitor.command.conditions import schedule_option
from collage_monitor.command.offline import served_from_disk
from collage_monitor.command.progress import progress
from collage_monitor.command.server import find_run, server_options
from collage_monitor.local import data_folder, find_token
from collage_monitor.schedule import RateSchedule

__all__ = ["report"]

_TIMEOUT_SECONDS = 120.0


@click.command("report")
@click.argument("run_ids", nargs=-1, metavar="RUN...")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="File.  [default: by the run's name]"
)
@click.option("--offline", is_flag=True, help="Ask no server: read the reports that runs have left on disk.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Data folder that --offline reads. Default: COLLAGE_DIR, otherwise the user's data folder.",
)
@schedule_option
@server_options
def report(
    run_ids: tuple[str, ...],
    output: Path | None,
    offline: bool,
    folder: Path | None,
    schedule: RateSchedule | None,
    server_url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Write one self-contained HTML file about a run, or about several side by side.

    With --offline and no RUN it covers every run that has left reports in the data folder. With --schedule, a
    report on one run forecasts when it and other strategies will lose their updates.
    """
    if folder is not None and not offline:
        raise click.UsageError("--dir says where runs left their reports: add --offline, or leave it out")
    if not run_ids and not offline:
        raise click.UsageError("name a run; `collage-monitor list` shows their ids")
    if len(run_ids) > MAXIMUM_RUNS:
        raise click.UsageError(f"{len(run_ids)} runs; a report holds up to {MAXIMUM_RUNS}")
    if offline:
        with served_from_disk("report --offline", data_folder(folder), run_ids, MAXIMUM_RUNS) as (services, found):
            written, names = _write(services.server_url, services.token, found, output, schedule)
    else:
        written, names = _write(server_url, token or find_token(server_url), run_ids, output, schedule)
    answer = {"file": str(written), "runs": names, "bytes": written.stat().st_size}
    click.echo(json.dumps(answer) if as_json else f"written    {written}")


def _write(
    server_url: str, token: str | None, runs: tuple[str, ...], output: Path | None, schedule: RateSchedule | None
) -> tuple[Path, list[str]]:
    from collage_dashboard.html_report import report as rendered
    from collage_dashboard.number_downloads import file_stem

    with Client(server_url, token, timeout_seconds=_TIMEOUT_SECONDS) as client:
        found = [find_run(client, run) for run in runs]
        ids, names = [run.run_id for run in found], [run.name for run in found]
        path = output or Path(f"{file_stem(names)}.html")
        with progress(f"report of {len(ids)} run{'s' * (len(ids) > 1)}"):
            text = rendered(Reader(lambda: client), ids, schedule=schedule)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {path} ({error.strerror or error}); another --output?") from error
    return path, names
