"""`collage-monitor dashboard`: serve the dashboard in a process of its own."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import click

from collage_dashboard.app import create_dashboard
from collage_dashboard.guard import LOOPBACK_HOSTS
from collage_monitor.client import Client
from collage_monitor.local import DASHBOARD_PORT, find_token, server_address

__all__ = ["dashboard"]

_THREADS = 8
_TIMEOUT_SECONDS = 20.0


@click.command("dashboard")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=DASHBOARD_PORT, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--server-url", envvar="COLLAGE_SERVER_URL", default=server_address, show_default="the local server's"
)
@click.option("--token", envvar="COLLAGE_TOKEN", help="Token; default for a local server: its own.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the token; read when needed.")
@click.option("--allowed-host", "allowed_hosts", multiple=True, help="Another name under which browsers reach it.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def dashboard(
    host: str,
    port: int,
    server_url: str,
    token: str | None,
    token_file: Path | None,
    allowed_hosts: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show runs in the browser, read from a server over HTTP.

    Whoever can open the page can read every run that the token can: beyond this machine, put it behind a proxy
    that asks who is there.
    """
    from waitress.server import create_server

    if host not in LOOPBACK_HOSTS and not allowed_hosts:
        raise click.UsageError(
            f"host {host} is reached from other machines, by pages of any name too; state the names under which "
            "browsers reach the dashboard with --allowed-host"
        )
    if token_file is not None and not token and _read(token_file) is None:
        raise click.ClickException(f"cannot read a token from {token_file}; `collage-monitor up` writes one")

    def client() -> Client:
        known = token or (_read(token_file) if token_file else find_token(server_url))
        return Client(server_url, known, timeout_seconds=_TIMEOUT_SECONDS)

    app = create_dashboard(client, allowed_hosts=frozenset(allowed_hosts) | LOOPBACK_HOSTS)
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    try:
        server = create_server(app.server, host=host, port=port, threads=_THREADS, ident="collage-monitor")
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {host}:{port} ({error.strerror or error}); another --port?"
        ) from error
    address = f"http://{host}:{server.effective_port}"
    if host not in LOOPBACK_HOSTS:
        click.echo("plain HTTP beyond this machine: put a proxy with TLS and a sign-in before it", err=True)
    click.echo(json.dumps({"dashboard_url": address}) if as_json else f"dashboard {address}  (server {server_url})")
    server.run()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
