"""A temporary server for the reports that runs have left on disk."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from collage_monitor.command import require
from collage_monitor.command.progress import progress
from collage_monitor.command.up import Services, environment_without_settings

__all__ = ["runs_left_in", "served_from_disk"]


def runs_left_in(folder: Path) -> list[str]:
    """The ids of the runs that have left reports in this data folder, oldest first."""
    return sorted(path.name for path in (folder / "spool").glob("*") if path.is_dir())


@contextmanager
def served_from_disk(
    verb: str, folder: Path, run_ids: Sequence[str], most: int
) -> Iterator[tuple[Services, tuple[str, ...]]]:
    """A server with the reports that runs left in `folder`, all or those named, and their ids; it ends with the
    context.

    It works on a copy, so the reports can still be sent to another server. `most`: how many runs the verb accepts.

    Raises:
        click.ClickException: nothing was left, or not by these runs, or by too many.
    """
    require(verb, "agent", "server")
    left = runs_left_in(folder)
    missing = [run_id for run_id in run_ids if run_id not in left]
    if missing or not left:
        known = f"; there are {', '.join(left[:5])}{' …' if len(left) > 5 else ''}" if left else ""
        what = f"run {missing[0]!r} has left no" if missing else "no run has left"
        raise click.ClickException(f"{what} reports in {folder / 'spool'}{known}. --dir names another folder")
    chosen = tuple(run_ids) or tuple(left)
    if len(chosen) > most:
        raise click.ClickException(f"{len(chosen)} runs in {folder / 'spool'}; name up to {most} of them")
    with tempfile.TemporaryDirectory(prefix="collage-report-") as name:
        copy = Path(name)
        for run_id in chosen:
            shutil.copytree(folder / "spool" / run_id, copy / "spool" / run_id)
        with Services(copy, _free_port(), _free_port(), alone=True) as services:
            with progress("read what runs have left on disk"):
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
