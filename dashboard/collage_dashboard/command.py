"""`collage-monitor serve dashboard`: serve the dashboard in a process of its own.

It checks addresses and tokens, makes the dashboard of `app.py` and serves it by waitress
(`tests/dashboard/test_command.py`).
"""

from __future__ import annotations

import errno
import json
import logging
import re
import signal
import socket
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType
from typing import Any

import click

from collage_dashboard.app import create_dashboard
from collage_dashboard.sign_in import ClientOfToken
from collage_monitor.client import Client
from collage_monitor.local import DASHBOARD_PORT, LOOPBACK_HOSTS, find_token, server_address, web_address

__all__ = ["dashboard"]

_THREADS = 8
_NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
_TIMEOUT_SECONDS = 20.0
_NOTEBOOKS = ("http://localhost:*", "http://127.0.0.1:*")
"""Pages of this machine, whichever port they have: they may show a dashboard that is for this machine alone."""
_ORIGIN = re.compile(r"https?://[\w.*\[\]:-]+")


@click.command("dashboard")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=DASHBOARD_PORT, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--server-url", envvar="COLLAGE_SERVER_URL", default=server_address, show_default="the local server's"
)
@click.option("--token", envvar="COLLAGE_TOKEN", help="Token; default: the local server's own.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the token; read when needed.")
@click.option(
    "--allowed-host", "allowed_hosts", multiple=True, help="Another host name under which browsers reach it."
)
@click.option(
    "--embed-in",
    multiple=True,
    metavar="ORIGIN",
    callback=lambda _context, _option, given: tuple(map(_origin, given)),
    help="Origin whose pages may show it in a frame, https://wiki.example.org; pages of this machine may "
    "where nobody signs in.",
)
@click.option(
    "--sign-in", is_flag=True, help="Require sign-in on this machine, too; beyond it, sign-in is always required."
)
@click.option(
    "--trusted-proxy", help="Address of the TLS proxy in front of it, whose X-Forwarded headers are trusted."
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def dashboard(
    host: str,
    port: int,
    server_url: str,
    token: str | None,
    token_file: Path | None,
    allowed_hosts: tuple[str, ...],
    embed_in: tuple[str, ...],
    sign_in: bool,
    trusted_proxy: str | None,
    as_json: bool,
) -> None:
    """Show runs in the browser, read from a server over HTTP.

    On this machine alone, anyone who can open the page can do what the token may. Beyond it everybody must first
    sign in, with their own token or through the server's OpenID provider.
    """
    from waitress.server import create_server

    if host not in LOOPBACK_HOSTS and not allowed_hosts:
        raise click.UsageError(
            f"host {host} listens beyond this machine: any web page could reach it through a rebound name; list "
            "the dashboard's own names with --allowed-host"
        )
    if token_file is not None and not token and _read(token_file) is None:
        raise click.ClickException(f"cannot read a token from {token_file}; `collage-monitor up` writes one")

    def client() -> Client:
        known = token or (_read(token_file) if token_file else find_token(server_url))
        return Client(server_url, known, timeout_seconds=_TIMEOUT_SECONDS)

    def client_of(own: str) -> Client:
        return Client(server_url, own, timeout_seconds=_TIMEOUT_SECONDS)

    beyond = host not in LOOPBACK_HOSTS
    # Requests through a proxy come from beyond this machine.
    asked: ClientOfToken | None = client_of if beyond or trusted_proxy or sign_in else None
    names = frozenset(allowed_hosts) | LOOPBACK_HOSTS
    app = create_dashboard(
        client, allowed_hosts=names, sign_in=asked, embed_in=embed_in or (() if asked else _NOTEBOOKS)
    )
    proxied = _behind(trusted_proxy) if trusted_proxy else {}
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    try:
        sockets = listening_sockets(host, port)
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {host}:{port} ({error.strerror or error}); another --port?"
        ) from error
    address = web_address(host, sockets[0].getsockname()[1])
    if beyond and not trusted_proxy:
        click.echo(
            "plain HTTP beyond this machine: tokens travel readable; put a proxy with TLS before it and name it "
            "with --trusted-proxy",
            err=True,
        )
    if asked is not None:
        click.echo("everybody signs in; the token of the dashboard serves for that alone", err=True)
    click.echo(json.dumps({"dashboard_url": address}) if as_json else f"dashboard {address}  (server {server_url})")
    with ExitStack() as stack:
        # As the first process of a container it would not end at SIGTERM without a handler.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _end))
        for listening in sockets:
            stack.enter_context(closing(listening))
        create_server(app.server, sockets=sockets, threads=_THREADS, ident="collage-monitor", **proxied).run()


def _origin(given: str) -> str:
    if _ORIGIN.fullmatch(given) is None:
        raise click.BadParameter(f"{given!r} is no origin: scheme, host and port alone, https://wiki.example.org")
    return given


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of `host`, all on one port; port 0: one that is free at the first address.

    Raises:
        OSError: the host has no address here, or the port is taken.
    """
    found = socket.getaddrinfo(
        None if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    absent: OSError | None = None
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            taken = sockets[0].getsockname()[1] if sockets else port
            try:
                one = socket.create_server((address[0], taken, *address[2:]), family=family)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                # This machine lacks the kind of address that the name has; most containers lack ::1.
                absent = error
            else:
                sockets.append(stack.enter_context(closing(one)))
        if not sockets and absent is not None:
            raise absent
        stack.pop_all()
    return sockets


def _behind(proxy: str) -> dict[str, Any]:
    """The options with which waitress trusts the proxy's headers for the client's address and HTTPS."""
    headers = {"x-forwarded-for", "x-forwarded-proto"}
    return {"trusted_proxy": proxy, "trusted_proxy_headers": headers, "clear_untrusted_proxy_headers": True}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
