"""`sync`: send what runs have left on disk, in order, from this terminal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from collage_monitor.command.progress import progress
from collage_monitor.command.server import server_options
from collage_monitor.local import data_folder, find_token

if TYPE_CHECKING:
    from collage_agent.transport.sender import FolderOutcome

__all__ = ["sync"]


@click.command("sync")
@server_options
@click.option(
    "--dir",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Data folder. Default: COLLAGE_DIR, otherwise the user's data folder.",
)
@click.option(
    "--wait",
    "seconds",
    default=30.0,
    show_default=True,
    help="Seconds to keep trying a server that is unreachable or busy.",
)
def sync(server_url: str, token: str | None, as_json: bool, folder: Path | None, seconds: float) -> None:
    """Send the reports that runs have left on disk, in the order in which they were made.

    Ends with 1 when something is left. Reports that the server already has are not stored twice.
    """
    from collage_agent.run_settings import DeliveryLimits
    from collage_agent.transport.http import HttpTransport
    from collage_agent.transport.sender import send_folder

    where = data_folder(folder)
    transport = HttpTransport(server_url, lambda: token or find_token(server_url, where), DeliveryLimits())
    try:
        with progress(f"send what is in {where / 'spool'}"):
            outcomes = send_folder(where, transport, seconds)
    finally:
        transport.close()
    if as_json:
        click.echo(json.dumps({"server_url": server_url, "folder": str(where), **asdict(outcomes)}))
    else:
        _tell(outcomes, where)
    if outcomes.error is not None:
        raise SystemExit(1)


def _tell(outcomes: FolderOutcome, folder: Path) -> None:
    from collage_agent.transport.report_counts import given_up

    for entry in outcomes.spools:
        dropped = f", given up: {given_up(entry.dropped)}" if entry.dropped else ""
        left = f", {entry.bytes_left} bytes left" if entry.bytes_left else ""
        click.echo(f"run {entry.run_id}, stream {entry.stream_id}: {entry.sent} reports sent{dropped}{left}")
    if outcomes.in_use:
        click.echo(f"{outcomes.in_use} files belong to runs that are alive and send them themselves")
    if not outcomes.spools and not outcomes.in_use:
        click.echo(f"nothing waits in {folder / 'spool'}")
    if outcomes.error is not None:
        click.echo(
            f"collage-monitor: not everything could be sent: {outcomes.error}. `collage-monitor up` starts a "
            "server here; --server-url names another",
            err=True,
        )
