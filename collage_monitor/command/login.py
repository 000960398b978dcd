"""`login` and `open`: the server that a person works with, and its dashboard in the browser.

The address and the token are kept by `collage_monitor.local`; a token is checked at the server first, and never
printed (`docs/command.md`).
"""

from __future__ import annotations

import json
import sys
import webbrowser
from urllib.parse import urlencode, urlsplit

import click

from collage_monitor.client import Client
from collage_monitor.command.progress import remark
from collage_monitor.command.server import dashboard_of, find_run, open_client, server_options
from collage_monitor.connection import quoted
from collage_monitor.errors import CollageError
from collage_monitor.local import Login, forget_login, keep_login, read_login

__all__ = ["login", "open_page"]


@click.command("login")
@click.argument("server_url", required=False)
@click.option(
    "--token", envvar="COLLAGE_TOKEN", help="The token. Without it you are asked, or it is read from a pipe."
)
@click.option("--dashboard-url", envvar="COLLAGE_DASHBOARD_URL", help="Address of this server's dashboard.")
@click.option("--forget", is_flag=True, help="Log out: remove the address and the token.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as JSON.")
def login(
    server_url: str | None, token: str | None, dashboard_url: str | None, forget: bool, as_json: bool
) -> None:
    """Store SERVER_URL and a token for it, so that your commands, `Client()` and trainings find them.

    The token is tested first, then stored in a file that only you may read. Without SERVER_URL, say where you are
    logged in.
    """
    if forget:
        gone = forget_login()
        click.echo(json.dumps({"forgotten": gone}) if as_json else "logged out" if gone else "nobody was logged in")
        return
    if server_url is None:
        _tell(read_login(), as_json)
        return
    for address in filter(None, (server_url, dashboard_url)):
        _require_address(address)
    kept = Login(server_url.rstrip("/"), _token(token, server_url), dashboard_url and dashboard_url.rstrip("/"))
    with Client(kept.server_url, kept.token) as client:
        # Every role may ask for it, so that a token for trainings passes, and a wrong one does not.
        client.catalogue()
    path = keep_login(kept)
    if not as_json:
        remark(f"the token is kept in {path}, for you alone")
    _tell(kept, as_json)


def _token(token: str | None, server_url: str) -> str:
    if token is None and not sys.stdin.isatty():
        token = sys.stdin.readline()
    if token is None:
        token = click.prompt(f"Token for {server_url}", hide_input=True, err=True)
    if not token.strip():
        raise click.UsageError("no token: pass --token, or pipe it in")
    return token.strip()


def _require_address(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
        raise click.UsageError(
            f"{address!r} is no address of a server; write https://HOST, without user or password"
        )


def _tell(kept: Login | None, as_json: bool) -> None:
    if as_json:
        known = {"server_url": kept.server_url, "dashboard_url": kept.dashboard_url} if kept else None
        click.echo(json.dumps(known))
    elif kept is None:
        click.echo("not logged in; `collage-monitor login https://HOST` keeps a server's address and a token")
    else:
        click.echo(f"logged in at {kept.server_url}")


@click.command("open")
@server_options
@click.argument("runs", nargs=-1)
@click.option(
    "--dashboard-url",
    envvar="COLLAGE_DASHBOARD_URL",
    help="Address of the dashboard; default: the one that the server names.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the address; open no browser.")
def open_page(
    server_url: str,
    token: str | None,
    as_json: bool,
    runs: tuple[str, ...],
    dashboard_url: str | None,
    only_print: bool,
) -> None:
    """Open the dashboard in the browser: its table of runs, the page of one run, or several side by side.

    A run is an id, the beginning of one, or a name.
    """
    address = dashboard_url or dashboard_of(server_url)
    if address is None:
        raise CollageError(
            f"where the dashboard of {server_url} is, is not known here: pass --dashboard-url, set "
            "COLLAGE_DASHBOARD_URL, or give it to `collage-monitor login`"
        )
    page = address.rstrip("/")
    if runs:
        with open_client(server_url, token) as client:
            ids = [find_run(client, run).run_id for run in runs]
        page += (
            f"/run/{quoted(ids[0])}"
            if len(ids) == 1
            else f"/compare?{urlencode([('run', run_id) for run_id in ids])}"
        )
    if as_json:
        click.echo(json.dumps({"page": page}))
    else:
        click.echo(page)
    if not (only_print or as_json or webbrowser.open(page)):
        click.echo("no browser here; open the address above in yours", err=True)
