"""`replay`: send what runs have left on disk, in order, from this terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from collage_agent.settings import DeliveryLimits, is_loopback
from collage_agent.transport.delivery import Delivery
from collage_agent.transport.envelope import Transport
from collage_agent.transport.http import HttpTransport
from collage_agent.transport.spool import SpoolFile, abandoned_spools, waiting_spools
from collage_monitor.errors import NotAuthorised
from collage_monitor.local import DEFAULT_SERVER_URL, data_folder, read_token

__all__ = ["Outcome", "replay", "send_spools"]

_ENVELOPES_AT_ONCE = 50


@dataclass
class Outcome:
    """What became of one spool file."""

    run_id: str
    stream_id: str
    sent: int
    dropped: dict[str, int]
    bytes_left: int


@dataclass
class Outcomes:
    """What became of a folder's spools. `in_use` counts those whose process lives, and so sends them itself."""

    spools: list[Outcome] = field(default_factory=list)
    in_use: int = 0
    error: str | None = None


@click.command("replay")
@click.option("--server-url", envvar="COLLAGE_SERVER_URL", default=DEFAULT_SERVER_URL, show_default=True)
@click.option(
    "--token", envvar="COLLAGE_TOKEN", help="Token; default for a local server: the one in the data folder."
)
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="Data folder. Default: COLLAGE_DIR, else the user's."
)
@click.option(
    "--wait", "seconds", default=30.0, show_default=True, help="How long to try a server that is away or busy."
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome of each file as JSON.")
def replay(server_url: str, token: str | None, folder: Path | None, seconds: float, as_json: bool) -> None:
    """Send the reports that runs have left on disk, in the order in which they were made.

    Ends with 1 when something is left. What the server has already is known to it and counted once.
    """
    where = data_folder(folder)
    local_token = read_token(where) if is_loopback(server_url) else None
    transport = HttpTransport(server_url, lambda: token or local_token, DeliveryLimits())
    try:
        outcomes = send_spools(where, transport, seconds)
    finally:
        transport.close()
    if as_json:
        click.echo(json.dumps({"server_url": server_url, "folder": str(where), **_plain(outcomes)}))
    else:
        _tell(outcomes, where)
    if outcomes.error is not None:
        raise SystemExit(1)


def send_spools(
    folder: Path,
    transport: Transport,
    seconds: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Outcomes:
    """Send every spool that nobody holds, oldest first; stops where the server does not take one in time."""
    outcomes = Outcomes()
    deadline = clock() + seconds

    def wait(pause: float) -> bool:
        sleep(min(pause, max(0.0, deadline - clock())))
        return clock() >= deadline

    for spool in abandoned_spools(folder, folder):
        delivery = Delivery(transport, spool, DeliveryLimits(), wait=wait, clock=clock)
        while not spool.is_empty:
            if delivery.drain(_ENVELOPES_AT_ONCE, now=True):
                continue
            if isinstance(delivery.last_error, NotAuthorised) or (
                delivery.last_error and wait(delivery.pause_seconds)
            ):
                break
        outcomes.spools.append(_outcome(delivery, spool))
        spool.close()
        if delivery.last_error is not None:
            outcomes.error = str(delivery.last_error)
            break
    else:
        outcomes.in_use = len(waiting_spools(folder))
    return outcomes


def _outcome(delivery: Delivery, spool: SpoolFile) -> Outcome:
    return Outcome(spool.path.parent.name, spool.path.stem, delivery.sent, dict(delivery.dropped), spool.bytes_left)


def _plain(outcomes: Outcomes) -> dict[str, Any]:
    return {
        "spools": [vars(entry) for entry in outcomes.spools],
        "in_use": outcomes.in_use,
        "error": outcomes.error,
    }


def _tell(outcomes: Outcomes, folder: Path) -> None:
    for entry in outcomes.spools:
        dropped = "".join(f", {count} given up ({reason})" for reason, count in entry.dropped.items())
        left = f", {entry.bytes_left} bytes left" if entry.bytes_left else ""
        click.echo(f"run {entry.run_id}, stream {entry.stream_id}: {entry.sent} reports sent{dropped}{left}")
    if outcomes.in_use:
        click.echo(f"{outcomes.in_use} files belong to runs that are alive and send them themselves")
    if not outcomes.spools and not outcomes.in_use:
        click.echo(f"nothing waits in {folder / 'spool'}")
    if outcomes.error is not None:
        click.echo(f"not everything could be sent: {outcomes.error}", err=True)
