"""`collage-monitor report`: one HTML file about a run or several, from a server or from what runs left on disk."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from collage_dashboard.reader import Reader
from collage_dashboard.view import MAXIMUM_RUNS
from collage_monitor.client import Client
from collage_monitor.command import require
from collage_monitor.command.progress import progress
from collage_monitor.command.server import find_run, server_options
from collage_monitor.command.up import Services, environment_without_settings
from collage_monitor.local import data_folder, find_token

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
    help="Data folder of --offline. Default: COLLAGE_DIR, else the user's.",
)
@server_options
def report(
    run_ids: tuple[str, ...],
    output: Path | None,
    offline: bool,
    folder: Path | None,
    server_url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Write one self-contained HTML file about a run, or about several side by side.

    With --offline and no RUN it is about every run that has left reports in the data folder.
    """
    if folder is not None and not offline:
        raise click.UsageError("--dir says where runs left their reports: add --offline, or leave it out")
    if not run_ids and not offline:
        raise click.UsageError("name a run; `collage-monitor list` shows their ids")
    if len(run_ids) > MAXIMUM_RUNS:
        raise click.UsageError(f"{len(run_ids)} runs; a report holds up to {MAXIMUM_RUNS}")
    if offline:
        with _replayed(data_folder(folder), run_ids) as (services, found):
            written, names = _write(services.server_url, services.token, found, output)
    else:
        written, names = _write(server_url, token or find_token(server_url), run_ids, output)
    answer = {"file": str(written), "runs": names, "bytes": written.stat().st_size}
    click.echo(json.dumps(answer) if as_json else f"written    {written}")


def _write(
    server_url: str, token: str | None, runs: tuple[str, ...], output: Path | None
) -> tuple[Path, list[str]]:
    from collage_dashboard.report import file_name
    from collage_dashboard.report import report as rendered

    with Client(server_url, token, timeout_seconds=_TIMEOUT_SECONDS) as client:
        ids = [find_run(client, run) for run in runs]
        names = [client.run(run_id).name for run_id in ids]
        path = output or Path(file_name(names))
        with progress(f"report of {len(ids)} run{'s' * (len(ids) > 1)}"):
            text = rendered(Reader(lambda: client), ids)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {path} ({error.strerror or error}); another --output?") from error
    return path, names


@contextmanager
def _replayed(folder: Path, run_ids: tuple[str, ...]) -> Iterator[tuple[Services, tuple[str, ...]]]:
    """A server of its own, for as long as the context is open, that has what runs left in `folder`; and their ids.

    It works on a copy: what was left can still be sent to another server.
    """
    require("report --offline", "agent", "server")
    left = sorted(path.name for path in (folder / "spool").glob("*") if path.is_dir())
    missing = [run_id for run_id in run_ids if run_id not in left]
    if missing or not left:
        known = f"; there are {', '.join(left[:5])}{' …' if len(left) > 5 else ''}" if left else ""
        what = f"run {missing[0]!r} has left no" if missing else "no run has left"
        raise click.ClickException(f"{what} reports in {folder / 'spool'}{known}. --dir names another folder")
    chosen = run_ids or tuple(left)
    if len(chosen) > MAXIMUM_RUNS:
        raise click.ClickException(f"{len(chosen)} runs in {folder / 'spool'}; name up to {MAXIMUM_RUNS} of them")
    with tempfile.TemporaryDirectory(prefix="collage-report-") as name:
        copy = Path(name)
        for run_id in chosen:
            shutil.copytree(folder / "spool" / run_id, copy / "spool" / run_id)
        with Services(copy, _free_port(), _free_port(), alone=True) as services:
            _replay(copy, services.server_url)
            yield services, chosen


def _replay(folder: Path, server_url: str) -> None:
    """Send the copy to its own server."""
    command = [sys.executable, "-c", "from collage_monitor.command import main; main()"]
    command += ["sync", "--dir", str(folder), "--server-url", server_url]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_without_settings(), check=False)
    if done.returncode:
        raise click.ClickException(f"what was left on disk could not be read: {done.stderr.strip()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
